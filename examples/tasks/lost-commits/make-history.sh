#!/bin/bash
# Five commits, of which a reset has lost two.
set -e
git config --global init.defaultBranch main
git config --global user.name ana
git config --global user.email ana@localhost
git init -q .
commit() { # commit FILE TEXT MESSAGE AUTHOR
    echo "$2" >> "$1"
    git add "$1"
    git commit -q --message "$3" --author "$4 <$4@localhost>"
}
commit garden.txt 'sow the peas' 'Begin a list for the garden' ana
commit house.txt 'mend the roof' 'And one for the house' ben
commit garden.txt 'prune the apple tree' 'The apple tree' cem
commit house.txt 'paint the door' 'The door' dora
git reset -q --hard HEAD~2
commit cellar.txt 'sort the jars' 'The cellar' ana
