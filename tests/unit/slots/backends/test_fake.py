"""What is the fake's own: agents as ordinary children, nothing left of them, and nobody else touched."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from agentenv.config import ContainerSettings, PoolSettings
from agentenv.containers.control import ContainerControl
from agentenv.errors import SlotDestroyedError
from agentenv.executor.session import ToolSession
from agentenv.executor.tool_executor import ToolExecutor
from agentenv.slots.backends.fake import FakeBackend
from agentenv.slots.backends.fake.stand_in import StandInSlot
from agentenv.slots.pool import SlotPool
from agentenv.tools.catalog import ToolCatalog
from agentenv.wire.states import SlotState
from agentenv.wire.tools import SearchReply
from tests.waiting import DEADLINE_S

DAEMON = "(setsid sleep 1000 & echo $! > pid) > /dev/null; cat pid; pwd"
"""Says the pid of what it leaves running, and where."""

CALLER = """
import asyncio, sys
from tests.unit.slots.backends.test_fake import DAEMON, opened
async def main():
    async with opened() as (_, session):
        print((await session.call("bash", {"command": DAEMON})).stdout, flush=True)
        await asyncio.sleep(1000)
asyncio.run(main())
"""


@asynccontextmanager
async def opened(slots: int = 2) -> AsyncIterator[tuple[FakeBackend, ToolSession]]:
    backend = FakeBackend(ContainerSettings(slots_per_container=slots))
    async with (
        SlotPool(backend, PoolSettings(max_containers=1)) as pool,
        ToolExecutor(pool, ToolCatalog.builtin()) as executor,
        executor.open("t") as session,
    ):
        yield backend, session


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def gone(pid: int, *paths: Path) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while lives(pid) or any(path.exists() for path in paths):
            await asyncio.sleep(0.01)


async def left_by(session: ToolSession) -> tuple[int, Path]:
    pid, workspace = (await session.call("bash", {"command": DAEMON})).stdout.split()
    assert lives(int(pid))
    return int(pid), Path(workspace)


def sockets() -> set[str]:
    found = set()
    for number in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the directory's own
            found.add(str(number.readlink()))
    return {name for name in found if name.startswith("socket:")}


def children() -> set[int]:
    return {int(pid) for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()}


async def test_a_caller_that_is_killed_leaves_neither_processes_nor_files() -> None:
    caller = subprocess.Popen([sys.executable, "-c", CALLER], stdout=subprocess.PIPE, text=True)
    assert caller.stdout is not None
    lines = [await asyncio.to_thread(caller.stdout.readline) for _ in range(2)]
    pid, workspace = int(lines[0]), Path(lines[1].strip())
    farm = workspace.parents[2]
    assert farm.name.startswith("agentenv-fake-")
    assert lives(pid)
    caller.kill()
    caller.communicate()
    await gone(pid, farm)


async def test_what_ends_a_slot_ends_all_that_runs_in_it_and_nobody_else() -> None:
    with subprocess.Popen(["sleep", "1000"]) as bystander:
        async with opened() as (backend, session):
            pid, workspace = await left_by(session)
            await session.seal()
            await gone(pid)
            assert (await session.call("bash", {"command": "cat pid"})).stdout == f"{pid}\n"
            pid, _ = await left_by(session)
        await gone(pid, workspace)
        async with opened() as (backend, session):
            pid, workspace = await left_by(session)
            backend.kill(backend.containers[0].id)
            await gone(pid, workspace)
        assert bystander.poll() is None
        bystander.kill()


async def test_an_agent_that_its_own_slot_kills_is_the_policy_s_doing_and_leaves_nothing() -> None:
    async with opened() as (_, session):
        pid, workspace = await left_by(session)
        try:
            await session.call("bash", {"command": "kill -9 $PPID; sleep 1000"})
        except SlotDestroyedError:
            pass
        else:
            raise AssertionError("the slot is not destroyed")
        await gone(pid, workspace)


async def test_slots_that_nobody_uses_have_no_process_and_no_files() -> None:
    before = children()
    async with opened(slots=10) as (backend, session):
        idle = children() - before
        assert len(idle) == 1, "what removes the files when this process has ended"
        await left_by(session)
        assert len(children() - before) == 2
        assert len(backend.containers) == 1
    assert children() == before


async def test_a_workspace_has_one_name_for_all_tools() -> None:
    async with opened() as (_, session):
        await session.call("write_file", {"path": "/workspace/sub/file", "text": "here\n"})
        told = await session.call("bash", {"command": "cat file; cd; pwd; cd -", "cwd": "/workspace/sub"})
        here, home, sub = told.stdout.split()
        assert (here, f"{home}/sub") == ("here", sub)
        for path in ("/workspace", "/workspace/sub", ".", home, sub):
            found = await session.call("search", {"path": path, "pattern": "here"})
            reply = SearchReply.model_validate(found.content)
            assert [match.path for match in reply.matches] == ["sub/file"]
        outside = await session.call("read_file", {"path": "/workspaces/x"})
        assert outside.fault == "policy"


def test_ctrl_c_of_the_caller_is_not_its_slots() -> None:
    """The keyboard's signals go to a whole process group; agents and what cleans up are told by their caller alone."""
    group = subprocess.Popen(
        [sys.executable, "-c", CALLER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, process_group=0
    )
    assert group.stdout is not None
    pid, workspace = int(group.stdout.readline()), Path(group.stdout.readline().strip())
    os.killpg(group.pid, signal.SIGINT)
    group.communicate(timeout=DEADLINE_S)
    assert not lives(pid)
    assert not workspace.parents[2].exists()


async def test_a_slot_that_is_destroyed_twice_at_once_begins_one_epoch() -> None:
    async with opened() as (backend, session):
        pid, workspace = await left_by(session)
        key, container = session.lease.key, session.lease.container
        await asyncio.gather(*(backend.destroy_slot(container.id, key.slot) for _ in range(2)))
        await gone(pid, workspace)
        async with ContainerControl(container) as control:
            async with asyncio.timeout(DEADLINE_S):
                while (report := (await control.slots()).slots[key.slot]).state is not SlotState.free:
                    await asyncio.sleep(0.01)
        assert report.epoch == key.epoch + 1


async def test_a_slot_that_is_destroyed_as_its_container_ends_leaves_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its reset ends after the container has."""
    removing, closed, real = asyncio.Event(), asyncio.Event(), StandInSlot.discard

    async def late(slot: StandInSlot) -> None:
        if not removing.is_set():
            removing.set()
            await closed.wait()
        await real(slot)

    monkeypatch.setattr(StandInSlot, "discard", late)
    async with opened() as (backend, session):
        await left_by(session)
        key, container = session.lease.key, session.lease.container
        destroying = asyncio.create_task(backend.destroy_slot(container.id, key.slot))
        await removing.wait()
        backend.kill(container.id)
    before = sockets()
    closed.set()
    await destroying
    assert sockets() == before


async def test_a_lease_outlives_a_loop_that_was_held_for_longer_than_its_time() -> None:
    settings = PoolSettings(max_containers=1, lease_ttl_s=1.5)
    async with SlotPool(FakeBackend(), settings) as pool, await pool.lease("t") as lease:
        lost = asyncio.create_task(lease.wait_lost())
        for _ in range(3):
            await asyncio.sleep(0.2)
            time.sleep(3.0)
        await asyncio.wait({lost}, timeout=3.0)
        assert not lost.done()
        lost.cancel()
