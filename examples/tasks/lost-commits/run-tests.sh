#!/bin/bash
# What tests need is installed by them, in the machine that the agent leaves.
apt-get update -qq && apt-get install -y -qq --no-install-recommends python3-pytest > /dev/null
python3 -m pytest "$TEST_DIR/test_outputs.py" -rA -p no:cacheprovider
