#!/bin/bash
[ ! -e /app/east.txt ] || echo "this is the agent's machine"
reward=0
diff /tests/expected.txt /app/hosts/all.txt && reward=1
echo "$reward" > /logs/verifier/reward.txt
