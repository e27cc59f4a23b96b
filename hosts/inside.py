"""What slots promise, tried inside a guest: ``python -m hosts.inside [NAME...]``. One line of JSON per promise: its
name, whether it held, and what was seen. The code is 1 when one did not.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from agentenv import Farm, Sandbox, SlotLimits
from agentenv.errors import AgentEnvError, ConfigError
from agentenv.sdk.roots import store_directory
from agentenv.store import Store
from agentenv.store.addition import Runtime
from agentenv.wire.spec import MIB
from hosts.disk import BASE

LIMITS: Final = SlotLimits(
    processes=60, memory_bytes=300 * MIB, workspace_bytes=64 * MIB, tmp_bytes=32 * MIB, shm_bytes=16 * MIB
)
_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_TAKE: Final = "python3 -c 'x = b\"x\" * (400 << 20); print(len(x))'"
_FORK: Final = """python3 -c '
import os, signal, time
made = []
try:
    while len(made) < 90:
        made.append(os.fork())
        if not made[-1]:
            time.sleep(60)
except OSError:
    pass
print(len(made))
for pid in made:
    os.kill(pid, signal.SIGKILL)
'"""
_FILL: Final = "dd if=/dev/zero of=big bs=1M count=100 2>&1 | tail -n 1; stat -c %s big; rm big"
_LEAVE: Final = "setsid sleep 1000 & (trap '' TERM; exec setsid sleep 1001) & disown -a; echo left"
_BYTES: Final = bytes(range(256)) * 1024

Seen = tuple[bool, object]
"""Whether the promise held, and what was seen."""


def calls() -> Seen:
    """Bytes written are bytes read, and a call's exit code and streams are its own."""
    with Sandbox(limits=LIMITS) as box:
        box.write_file("bytes", _BYTES)
        done = box.run("echo out; echo err >&2; exit 7")
        same = box.read_file("bytes", binary=True) == _BYTES
        seen = (done.exit_code, done.stdout, done.stderr, same)
    return seen == (7, "out\n", "err\n", True), seen


def memory() -> Seen:
    """400 MB in a slot of 300 MiB: killed, and reported as that; the slot goes on."""
    with Sandbox(limits=LIMITS) as box:
        done, after = box.run(_TAKE), box.run("echo on")
        seen = {"exit": done.exit_code, "oom_killed": done.oom_killed, "peak": done.peak_memory_bytes}
    return done.exit_code != 0 and done.oom_killed and after.stdout == "on\n", seen


def processes() -> Seen:
    """90 processes in a slot of 60."""
    with Sandbox(limits=LIMITS) as box:
        running = box.run(_FORK).stdout.split()
        after = box.run("echo on").stdout
    return bool(running) and int(running[0]) <= LIMITS.processes and after == "on\n", running


def disk() -> Seen:
    """100 MiB in a workspace of 64."""
    with Sandbox(limits=LIMITS) as box:
        lines = box.run(_FILL).stdout.splitlines()
    return bool(lines) and int(lines[-1]) <= LIMITS.workspace_bytes, lines


def seal() -> Seen:
    """Nothing that was left running outlives a seal."""
    with Sandbox(limits=LIMITS) as box:
        box.run(_LEAVE)
        box.seal()
        left = box.run("cat /proc/[0-9]*/comm | grep -c sleep; true").stdout.strip()
    return left == "0", left


def reset() -> Seen:
    """The next one in a slot finds nothing of the one before."""
    with Farm(slots=1, limits=LIMITS) as farm:
        with farm.sandbox() as box:
            box.run(f"echo secret > file; echo secret > /tmp/file; {_LEAVE}")
        with farm.sandbox() as box:
            found = box.run("ls -A . /tmp; cat /proc/[0-9]*/comm | grep sleep; true").stdout.split()
    return not {"file", "sleep"} & set(found), found


def network() -> Seen:
    """A network that does not lead back to this machine, and none without being asked for."""
    with Sandbox(limits=LIMITS, allow_network=True, network="public") as box:
        inside = box.run("cat /proc/net/route | wc -l; cat /proc/net/dev | grep -c tap0").stdout.split()
        back = box.run("timeout 5 bash -c '</dev/tcp/10.0.2.15/22' && echo reached; true").stdout
    with Sandbox(limits=LIMITS) as box:
        without = box.run("cat /proc/net/route | wc -l").stdout.strip()
    seen = {"routes": inside, "this machine": back or "refused", "without": without}
    return int(inside[0]) > 1 and not back and int(without) <= 1, seen


def image() -> str:
    """The digest of a small Debian in this user's store."""
    return Store.open(store_directory()).add(None, [Path(BASE)], Runtime({"PATH": _PATH}, cmd=("bash",))).digest


def image_slot() -> Seen:
    """Root of an image's file system, and its limits; what it writes lies in memory, or on the disk."""
    seen: dict[str, object] = {}
    for storage in ("memory", "disk"):
        try:
            with Sandbox(image=image(), storage=storage, storage_mib=200, memory_mib=600) as box:
                done = box.run("id -u; echo a >/etc/x && cat /etc/x; rm /etc/debian_version; ls /etc | wc -l")
                seen[storage] = done.stdout.split()[:2] == ["0", "a"] or done.stdout + done.stderr
        except AgentEnvError as error:
            seen[storage] = f"{type(error).__name__}: {error}"
    return True in seen.values(), seen


def formats() -> Seen:
    """Each way to show an image to a slot: works, or is refused with the reason."""
    seen: dict[str, object] = {}
    for way in ("erofs", "tree", "shifted"):
        try:
            with Sandbox(image=image(), image_format=way, storage="disk") as box:
                seen[way] = box.run("cat /etc/debian_version").stdout.strip()
        except AgentEnvError as error:
            seen[way] = f"{type(error).__name__}: {error}"
    return any(str(one)[:1].isdigit() for one in seen.values()), seen


def checkpoints() -> Seen:
    """What was written after a checkpoint is gone when it is restored. Before Linux 6.6 slots are refused that could
    have one, with the reason."""
    try:
        sandbox = Sandbox(image=image(), storage_mib=200, memory_mib=600).open()
    except ConfigError as error:
        return bool(error.next_step) and "Linux 6.6" in str(error), str(error)
    with sandbox as box:
        box.run("echo one >/root/file")
        kept = box.checkpoint()
        box.run("echo two >/root/file")
        box.restore(kept)
        seen = box.run("cat /root/file").stdout
    return seen == "one\n", seen


def cpu() -> Seen:
    """Half a processor in an image slot: two seconds of CPU time take four."""
    with Sandbox(image=image(), storage="disk", cpus=0.5) as box:
        done = box.run("timeout 6 sh -c 'while :; do :; done'")
    share = (done.cpu_s or 0) / max(done.duration_s, 0.001)
    return share <= 0.6, f"{share:.2f} of a processor"


CHECKS: Final[dict[str, Callable[[], Seen]]] = {
    check.__name__: check
    for check in (
        calls, memory, processes, disk, seal, reset, network, image_slot, formats, checkpoints, cpu
    )
}  # fmt: skip


def report(checks: Mapping[str, Callable[[], Seen]]) -> int:
    """Make these checks, one line of JSON each. The code is 1 when one did not hold."""
    failed = False
    for name, check in checks.items():
        try:
            held, seen = check()
        except Exception as error:
            held, seen = False, f"{type(error).__name__}: {error}"
        failed |= not held
        print(json.dumps({"check": name, "held": held, "seen": seen}, default=str), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(report({name: CHECKS[name] for name in sys.argv[1:] or CHECKS}))
