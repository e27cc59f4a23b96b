#!/bin/bash
awk -F, 'NR > 1 { owed[$1] += $3 * $4 }
    END { printf "{"; for (name in owed) { printf "%s\"%s\": %d", sep, name, owed[name]; sep = ", " } print "}" }' \
    /app/orders.csv > /app/totals.json
