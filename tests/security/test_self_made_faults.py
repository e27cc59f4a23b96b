"""A policy cannot make its own slot pass for a lost one: what it does to itself is data (promise 1)."""

from __future__ import annotations

import asyncio
import time

import pytest

from agentenv.deadlines import scaled
from agentenv.executor.session import ToolSession
from tests.security.conftest import Slots, sh
from tests.waiting import START_S

pytestmark = pytest.mark.asyncio(loop_scope="module")

PTRACE = """
import ctypes, os, signal, sys, time
libc = ctypes.CDLL(None, use_errno=True)
"""
TRACED = PTRACE + "libc.ptrace(0, 0, 0, 0); os.kill(os.getpid(), signal.SIGSTOP); time.sleep(1000)\n"
SEIZE_EVERYBODY = (
    PTRACE
    + """
seized = set()
time.sleep(1)  # until the next call's shell waits
ends = time.monotonic() + 60
while time.monotonic() < ends:
    for name in filter(str.isdigit, os.listdir("/proc")):
        pid = int(name)
        if pid not in (1, os.getpid()) and pid not in seized and libc.ptrace(0x4206, pid, 0, 0) == 0:
            seized.add(pid)
    time.sleep(0.001)
"""
)
STOP_EVERYBODY = """
import os, signal, time
open("/tmp/begun", "w").close()
ends = time.monotonic() + 20
while time.monotonic() < ends:
    try: os.kill(-1, signal.SIGSTOP)
    except OSError: pass
"""
STOP_PROBE = """
import os, signal, time
while True:
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if b"wait_woken" in open("/proc/" + name + "/cmdline", "rb").read():
                os.kill(int(name), signal.SIGSTOP)
                open("/tmp/stopped", "w").close()
        except OSError: pass
    time.sleep(0.0005)
"""
HOGS = """
import os, time
for path in ("/proc/self/oom_score_adj", "/proc/%d/oom_score_adj" % os.getppid()):
    try: open(path, "w").write("0")
    except OSError: pass
hogs = []
for _ in range(4):
    if (hog := os.fork()) == 0:
        memory = bytearray(100 << 20)
        for at in range(0, len(memory), 4096): memory[at] = 1
        time.sleep(50)  # they are not to make way for each other
    hogs.append(hog)
print(os.WTERMSIG(os.wait()[1]))
os.system("kill -9 %s 2>/dev/null" % " ".join(map(str, hogs)))
"""


async def _write(session: ToolSession, path: str, text: str) -> None:
    written = await session.call("write_file", {"path": path, "text": text})
    assert written.fault == "none", written


async def _works(session: ToolSession) -> None:
    assert await sh(session, "echo works") == "works\n"


async def test_a_call_that_makes_the_agent_its_tracer_is_answered(slots: Slots) -> None:
    one = await slots.open("one")
    await _write(one, "traced.py", TRACED)
    result = await one.call("bash", {"command": "exec python3 traced.py"}, timeout_s=2)
    assert (result.fault, result.timed_out, result.exit_code) == ("none", True, 137)
    await _works(one)


async def test_a_call_whose_shell_somebody_traces_is_answered(slots: Slots) -> None:
    one = await slots.open("one")
    await _write(one, "seize.py", SEIZE_EVERYBODY)
    # in a subshell: whoever ends a call ends its descendants, and this one is to go on
    await sh(one, "(setsid python3 seize.py >/dev/null 2>&1 &); sleep 0.3")
    for command in ("sleep 2", "true", "true"):
        result = await one.call("bash", {"command": command}, timeout_s=3)
        assert result.fault == "none", result
    await sh(one, "kill -9 -1")
    await _works(one)


async def test_calls_are_answered_while_everybody_is_being_stopped(slots: Slots) -> None:
    one = await slots.open("one")
    await _write(one, "stop.py", STOP_EVERYBODY)
    # in a subshell: whoever ends a call ends its descendants, and this one is to go on
    begun = await one.call("bash", {"command": "(setsid python3 stop.py >/dev/null 2>&1 &); sleep 0.2"}, timeout_s=2)
    assert begun.fault == "none"
    for _ in range(8):
        result = await one.call("bash", {"command": "true"}, timeout_s=2)
        assert result.fault == "none", result


async def test_a_wait_in_tmux_ends_in_time_although_its_helper_is_stopped(slots: Slots) -> None:
    one = await slots.open("one")
    assert (await one.call("tmux", {"action": "start"})).fault == "none"
    await _write(one, "stop.py", STOP_PROBE)
    await sh(one, "(setsid python3 stop.py >/dev/null 2>&1 &)")
    blocked = {"action": "send_keys", "text": "sleep 600\n", "block": True, "max_wait_s": 6}
    for _ in range(5):  # the first may be too quick for whoever stops it
        began_s = time.monotonic()
        async with asyncio.timeout(START_S):
            result = await one.call("tmux", blocked, timeout_s=10)
        assert (result.fault, result.timed_out) == ("none", True), result
        assert time.monotonic() - began_s < 10 + scaled(50.0)
        if await sh(one, "ls /tmp/stopped 2>/dev/null"):
            break
    else:
        pytest.fail("no helper was stopped")
    await sh(one, "kill -9 -1")
    await _works(one)


async def test_the_agent_is_no_victim_when_memory_runs_out(slots: Slots) -> None:
    one = await slots.open("one")
    await _write(one, "hogs.py", HOGS)
    assert (
        await sh(one, "cat /proc/1/oom_score_adj; (echo 0 > /proc/self/oom_score_adj) 2>/dev/null || echo refused")
    ).split()[1] == "refused"
    for _ in range(3):
        result = await one.call("bash", {"command": "python3 hogs.py"}, timeout_s=60)
        assert result.fault == "none", result
        assert "9" in result.stdout, "some of them are"
    await _works(one)


KEYS = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
for number in ((248, b"user", b"box", b"x", 1, -3), (250, 0, -3, 0, 0), (249, b"user", b"box", None, 0)):
    print(libc.syscall(*number), ctypes.get_errno())
"""


async def test_no_key_of_the_kernel_is_kept_or_found(slots: Slots) -> None:
    """A session keyring would outlive a reset, and be shared by all slots that were started from one login."""
    one = await slots.open("one")
    await _write(one, "keys.py", KEYS)
    assert set((await sh(one, "python3 keys.py; cat /proc/keys")).splitlines()) <= {"-1 38", "-1 1"}


async def test_every_refused_call_is_refused(slots: Slots) -> None:
    one = await slots.open("one")
    said = (await sh(one, "/run/agentenv/slotagent prove")).splitlines()
    assert len(said) == 1
    assert int(said[0].removeprefix("refused ")) > 30


@pytest.mark.parametrize("bytes_", [10, 3_000_000])
async def test_standard_input_is_a_file_of_the_slots_own(slots: Slots, bytes_: int) -> None:
    """One that the server has open as well could be locked by the slot when the server wants it."""
    one = await slots.open("one")
    command = "wc -c; wc -c < /dev/stdin; stat -Lc %u /proc/self/fd/0; id -u; sleep 1000 <&0 >/dev/null 2>&1 &"
    result = await one.call("bash", {"command": command, "stdin": "x" * bytes_}, timeout_s=20)
    read, again, owner, own = result.stdout.split()
    assert (read, again) == (str(bytes_), str(bytes_))
    assert owner == own
