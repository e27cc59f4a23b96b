#!/bin/bash
set -e
groupadd --system "$SERVICE"
useradd --system --gid "$SERVICE" --home-dir /srv/data --no-create-home --shell /usr/sbin/nologin "$SERVICE"
install -d -o "$SERVICE" -g "$SERVICE" -m 2750 /srv/data
echo '{}' > /srv/data/state.json
chown "$SERVICE:$SERVICE" /srv/data/state.json
chmod 600 /srv/data/state.json
