#!/bin/bash
user=$EXPECTED_USER
good=1
expect() { [ "$1" = "$2" ] || { echo "got '$1', not '$2'"; good=0; }; }
expect "$(getent passwd "$user" | cut -d: -f7)" /usr/sbin/nologin
[ "$(id -u "$user")" -lt 1000 ] || good=0
expect "$(stat -c '%U %G %a' /srv/data)" "$user $user 2750"
expect "$(stat -c '%U %a' /srv/data/state.json)" "$user 600"
expect "$(cat /srv/data/state.json)" '{}'
expect "$(su -s /bin/sh -c 'cat /srv/data/state.json; id -un' "$user")" $'{}\n'"$user"
su -s /bin/sh -c 'ls /srv/data' nobody && good=0
echo "$good" > /logs/verifier/reward.txt
