#!/bin/bash
# As many tasks do, this installs what it needs: as root, in the machine that the agent leaves.
reward=0
apt-get update -q && apt-get install -y -q --no-install-recommends jq || exit 1
expected=$(jq -Rn '[inputs | split(",") | {(.[0]): ((.[2] | tonumber) * (.[3] | tonumber))}] |
    map(to_entries[]) | group_by(.key) | map({(.[0].key): (map(.value) | add)}) | add' < <(tail -n +2 /app/orders.csv))
[ "$(jq -S . /app/totals.json)" = "$(jq -S . <<< "$expected")" ] && reward=1
echo "$reward" > /logs/verifier/reward.txt
