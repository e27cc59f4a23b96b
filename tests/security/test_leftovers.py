"""Nothing outlives a reset, and nothing a slot does hurts its neighbours or the server."""

from __future__ import annotations

import asyncio

import pytest

from agentenv.deadlines import scaled
from agentenv.executor.tool_executor import ToolExecutor
from agentenv.wire.spec import MIB
from tests.security.conftest import LIMITS, Slots, sh

pytestmark = pytest.mark.asyncio(loop_scope="module")

LEAVE = (
    "echo x > /workspace/left; echo x > /tmp/left; echo x > /dev/shm/left; mkdir -p .config; ipcmk -Q >/dev/null;"
    " (setsid sleep 4321 >/dev/null 2>&1 &) ;"
    " (nohup bash -c 'trap \"\" TERM HUP INT; while :; do sleep 1; done' >/dev/null 2>&1 &)"
)


async def test_nothing_outlives_a_release(executor: ToolExecutor) -> None:
    for round_ in range(3):
        names = [f"{round_}-{index}" for index in range(3)]  # all three slots, so the same ones come back
        sessions = [executor.open(name) for name in names]
        for session in sessions:
            async with session:
                seen = await sh(
                    session,
                    "ls -A /workspace /tmp /dev/shm | grep -v :; ipcs -q | grep -c 0x; ls /proc | grep -c '^[0-9]'",
                )
                files, processes = seen.split()[:-1], int(seen.split()[-1])
                assert files == ["0"], seen
                assert processes <= 6, await sh(session, "ps aux")
                await sh(session, LEAVE)


async def test_sealing_kills_processes_and_keeps_the_workspace(slots: Slots) -> None:
    session = await slots.open("sealed")
    await sh(session, LEAVE)
    await session.seal()
    assert await sh(session, "ls") == "left\n"
    assert "4321" not in await sh(session, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
    assert await sh(session, "ls -A /tmp /dev/shm") == "/dev/shm:\n\n/tmp:\n"


HOGS = {
    # The loop keeps the call running to its deadline without a fork; a call that ended earlier would
    # leave its bomb in the background, where it may fill the slot for as long as it likes.
    "fork bomb": "bomb() { bomb | bomb & }; bomb; while :; do :; done",
    "kill storm": "for i in $(seq 200); do kill -9 -1; done",
    "memory hog": "tail /dev/zero",
    "disk filler": "cat /dev/zero > full",
    "inode filler": "for i in $(seq 100000); do : > f$i || break; done",
    "tmp filler": "cat /dev/zero > /tmp/full; cat /dev/zero > /dev/shm/full",
    "output flood": "yes",
    "error flood": "yes >&2",
    "descriptor hog": 'ulimit -n; for i in $(seq 10 5000); do eval "exec $i</dev/null" || break; done',
    "endless child": "setsid sleep 1000 & disown; sleep 1000",
}


@pytest.mark.parametrize("hog", HOGS)
async def test_no_hog_fails_a_neighbours_call_or_its_own_slot(slots: Slots, hog: str) -> None:
    bad, good = await slots.open("bad"), await slots.open("good")
    call = asyncio.create_task(bad.call("bash", {"command": HOGS[hog]}, timeout_s=2.0))
    for index in range(20):
        assert await sh(good, f"echo {index} > file; cat file") == f"{index}\n"
    async with asyncio.timeout(scaled(60.0)):
        result = await call
    assert result.fault in ("none", "model"), result
    assert await sh(bad, "rm -rf /workspace/* ; echo still usable") == "still usable\n"


async def test_a_memory_hog_is_told_so(slots: Slots) -> None:
    session = await slots.open("memory")
    result = await session.call("bash", {"command": "tail /dev/zero"}, timeout_s=60)
    assert result.oom_killed
    assert result.exit_code == 137
    assert (result.peak_memory_bytes or 0) > LIMITS.memory_bytes // 2


async def test_a_full_disk_is_told_to_the_command_only(slots: Slots) -> None:
    session = await slots.open("disk")
    result = await session.call("bash", {"command": "cat /dev/zero > full"}, timeout_s=60)
    assert result.exit_code == 1
    assert "No space left" in result.stderr
    written = await session.call("write_file", {"path": "more", "text": "x" * MIB})
    assert written.exit_code == 28
    assert await sh(session, "ls") == "full\n"


async def test_a_deadline_kills_even_what_daemonised(slots: Slots) -> None:
    session = await slots.open("deadline")
    await sh(session, "sleep 1111 >/dev/null 2>&1 &")
    result = await session.call(
        "bash", {"command": "(setsid sleep 2222 &) ; (setsid setsid sleep 3333 &); sleep 60"}, timeout_s=1.0
    )
    assert result.timed_out
    left = await sh(session, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
    assert "2222" not in left
    assert "3333" not in left
    assert "1111" in left  # from an earlier call: not this call's to kill
