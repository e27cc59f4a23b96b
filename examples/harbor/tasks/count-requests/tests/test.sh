#!/bin/bash
if diff /tests/expected.txt /app/report.txt; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
