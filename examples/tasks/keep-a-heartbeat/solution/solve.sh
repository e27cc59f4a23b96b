#!/bin/bash
cat > /srv/heartbeat.sh <<'END'
#!/bin/bash
while :; do
    date +%s > /run/heartbeat.new
    mv /run/heartbeat.new /run/heartbeat
    sleep 1
done
END
chmod +x /srv/heartbeat.sh
setsid nohup /srv/heartbeat.sh > /dev/null 2>&1 < /dev/null &
until [ -s /run/heartbeat ]; do sleep 0.1; done # whoever looks from now on finds a number
