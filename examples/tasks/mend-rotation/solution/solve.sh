#!/bin/bash
cat > /app/rotate.sh <<'END'
#!/bin/bash
# rotate.sh FILE KEEP
set -e
file=$1
keep=$2
rm -f -- "$file.$keep"
for ((n = keep - 1; n >= 1; n--)); do
    if [ -e "$file.$n" ]; then mv -- "$file.$n" "$file.$((n + 1))"; fi
done
mode=$(stat -c %a -- "$file")
mv -- "$file" "$file.1"
: > "$file"
chmod "$mode" -- "$file"
END
