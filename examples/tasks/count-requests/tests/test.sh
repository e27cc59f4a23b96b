#!/bin/bash
reward=0
diff /tests/expected.txt /app/report.txt && reward=1
echo "$reward" > /logs/verifier/reward.txt
