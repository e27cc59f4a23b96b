"""What a guest is given: its container's specification, token and first program, as a tar on a disk of its own.

A tar can be read from a block device without a file system, and lies in memory here: nothing of a token is written to
a disk.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import tarfile
from pathlib import Path
from typing import Final

from agentenv.deadlines import TIME_FACTOR
from agentenv.wire.spec import SandboxSpec

ADDRESS: Final = "10.0.2.15"
PORT: Final = 8642
"""Where the sandbox server listens in the guest."""
KERNEL_WORDS: Final = (
    "console=ttyS0 root=/dev/vda ro loglevel=1 panic=-1 "
    'init=/bin/sh -- -c "mount -t tmpfs -o mode=755,size=64m tmpfs /run; tar -xf /dev/vdb -C /run; exec /run/init"'
)
"""The kernel's command line. A kernel that panics restarts at once, which ends the machine (``-no-reboot``). It prints
nothing less, because the console is the container's log, and lines about processes have names that slots choose."""
STOP: Final = b"stop\n"
"""On the line of events, to the guest: what SIGTERM is to a container's process. Repeated: a guest that has not booted
does not read it."""

# ttyS0 is the console, and the supervisor's log; ttyS1 its events, and :data:`STOP`.
_PLACE: Final = Path("/run")
"""Where the guest unpacks it."""
_INIT: Final = """#!/bin/sh
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8
export PYTHONPATH=/opt/agentenv PYTHONDONTWRITEBYTECODE=1 AGENTENV_TIME_FACTOR={time_factor}
[ -e /proc/self ] || mount -t proc proc /proc
[ -e /sys/kernel ] || mount -t sysfs sysfs /sys
[ -e /dev/null ] || mount -t devtmpfs devtmpfs /dev
ulimit -n 1048576 # as systemd has it: a slot takes 40, and there may be hundreds
echo 4194304 >/proc/sys/kernel/pid_max
mkdir -p /dev/pts /dev/shm
mount -t devpts -o gid=5,mode=620,ptmxmode=666 devpts /dev/pts
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /tmp
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mkdir /sys/fs/cgroup/init # a cgroup with controllers for others has no processes of its own
echo $$ >/sys/fs/cgroup/init/cgroup.procs
echo '+cpu +memory +pids' >/sys/fs/cgroup/cgroup.subtree_control
for device in /sys/class/net/e*; do device=${{device##*/}}; done
ip link set lo up
ip address add {address}/24 dev "$device"
ip link set "$device" up
stty -F /dev/ttyS1 raw -echo
exec 3<>/dev/ttyS1
/usr/bin/python3 -P -s -m agentenv.sandbox /run/spec.json >&3 2>/dev/console 3>&- </dev/null &
supervisor=$!
(while read -r line <&3; do [ "$line" = stop ] && break; done; kill -TERM $supervisor) &
wait $supervisor
printf '{{"event": "exited", "code": %d}}\\n' $? >&3
stty -F /dev/ttyS1 >/dev/null # waits until it is sent
echo o >/proc/sysrq-trigger
sleep 60
"""


def job(spec: SandboxSpec, token: str) -> int:
    """A descriptor of the tar."""
    inside = dataclasses.replace(
        spec,
        token_file=str(_PLACE / "token"),
        data_dir=str(_PLACE / "agentenv"),
        disk_dir="",
        host=ADDRESS,
        port=PORT,
        uid_block=0,
    )
    init = _INIT.format(time_factor=TIME_FACTOR, address=ADDRESS)
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for name, text, mode in (
            ("init", init, 0o700),
            ("spec.json", json.dumps(dataclasses.asdict(inside)), 0o600),
            ("token", token, 0o600),
        ):
            member = tarfile.TarInfo(name)
            data = text.encode()
            member.size, member.mode = len(data), mode
            archive.addfile(member, io.BytesIO(data))
    descriptor = os.memfd_create("agentenv-job")
    os.write(descriptor, content.getbuffer())
    return descriptor
