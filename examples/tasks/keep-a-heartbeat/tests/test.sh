#!/bin/bash
# The file has to change while it is looked at, and to be a number whenever it is read.
good=0
first=$(cat /run/heartbeat)
for _ in $(seq 300); do
    now=$(cat /run/heartbeat)
    [[ $now =~ ^[0-9]+$ ]] || { good=0; break; }
    [ "$now" = "$first" ] || good=1
    [ "$good" = 1 ] && break
    sleep 0.1
done
echo "$good" > /logs/verifier/reward.txt
