#!/bin/bash
# Two rewards: whether nothing is lost (which is the score), and whether modes are kept.
place=$(mktemp -d)
log="$place/a log"
lost=0
for round in 1 2 3 4 5; do
    echo "$round" > "$log"
    chmod 640 "$log"
    bash /app/rotate.sh "$log" 3 || lost=1
done
for n in 1 2 3; do [ "$(cat "$log.$n")" = $((6 - n)) ] || lost=1; done
[ ! -e "$log.4" ] && [ -e "$log" ] && [ ! -s "$log" ] || lost=1
mode=$(stat -c %a "$log")
kept=$([ "$mode" = 640 ] && echo 1 || echo 0)
[ "$lost" = 0 ] && reward=$kept || reward=0
echo "{\"reward\": $reward, \"nothing lost\": $((1 - lost)), \"mode kept\": $kept}" > /logs/verifier/reward.json
