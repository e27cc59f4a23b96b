#!/bin/bash
set -e
awk 'NF == 5 { count[$4]++; bytes[$4] += $5 } END { for (s in count) print s, count[s], bytes[s] }' /app/access.log |
    sort > /app/report.txt
