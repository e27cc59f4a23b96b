"""Nothing in a slot can hand the server a descriptor: what sessions talk over are pipes and terminals, and the
agent's socket is out of reach. A descriptor that arrives has to be closed, for as long as its maker likes."""

from __future__ import annotations

import pytest

from tests.security.conftest import Slots, sh

pytestmark = pytest.mark.asyncio(loop_scope="module")

SOCKETS = "for fd in /proc/{pid}/fd/*; do [ -S $fd ] && readlink $fd; done; readlink /proc/{pid}/fd/0"


@pytest.mark.parametrize("pty", [False, True])
async def test_a_sessions_shell_has_no_socket(slots: Slots, pty: bool) -> None:
    one = await slots.open("one")
    listed = await one.call("terminal", {"command": "ls -l /proc/$$/fd; echo $$ > shell", "pty": pty})
    assert listed.exit_code == 0
    assert "socket:" not in listed.stdout
    while_idle = await sh(one, SOCKETS.replace("{pid}", "$(cat shell)"))
    assert while_idle.startswith("pipe:[")


async def test_tmux_is_told_what_to_do_over_a_pipe(slots: Slots) -> None:
    one = await slots.open("one")
    started = await one.call("tmux", {"action": "start"})
    assert started.fault == "none"
    client = "$(pgrep -f 'tmux.*-C start-server' | head -n 1)"
    told = await sh(one, f"readlink /proc/{client}/fd/0 /proc/{client}/fd/1 /proc/{client}/fd/2")
    assert [each.split(":")[0] for each in told.splitlines()] == ["pipe"] * 3


async def test_a_background_process_has_no_socket(slots: Slots) -> None:
    one = await slots.open("one")
    await one.call("process", {"action": "start", "command": "echo $$ > pid; exec sleep 600"})
    await sh(one, "until [ -s pid ]; do sleep 0.1; done", timeout_s=60)
    assert (await sh(one, SOCKETS.replace("{pid}", "$(cat pid)"))).startswith("pipe:[")


async def test_the_agents_descriptors_cannot_be_had(slots: Slots) -> None:
    """pidfd_getfd on PID 1, and its /proc/1/fd: the socket to the server is there."""
    one = await slots.open("one")
    text = (
        "import ctypes, os\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "pidfd = libc.syscall(434, 1, 0)\n"
        "assert pidfd >= 0, ctypes.get_errno()\n"
        "had = [fd for fd in range(64) if libc.syscall(438, pidfd, fd, 0) >= 0]\n"
        "print(had, os.strerror(ctypes.get_errno()))\n"
    )
    assert await sh(one, f"python3 -c '{text}'") == "[] Operation not permitted\n"
    assert (
        await sh(one, "ls /proc/1/fd 2>&1 | tail -n 1") == "ls: cannot open directory '/proc/1/fd': Permission denied\n"
    )
