#!/bin/bash
set -e
mkdir -p /app/hosts
cat /app/east.txt /app/west.txt | awk '{ for (n = 2; n <= NF; n++) print $1, $n }' | sort -u -k1,1V -k2,2 |
    awk '$1 != last { if (NR > 1) print line; line = last = $1 } { line = line " " $2 } END { print line }' \
        > /app/hosts/all.txt
