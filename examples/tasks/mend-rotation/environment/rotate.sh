#!/bin/bash
# rotate.sh FILE KEEP
file=$1
keep=$2
for n in $(seq 1 $((keep - 1))); do
    [ -e $file.$n ] && mv $file.$n $file.$((n + 1))
done
mv $file $file.1
touch $file
