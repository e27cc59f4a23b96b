"""The kill of a slot: all of it, as often as it takes, before anything it holds is let go."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from agentenv.sandbox.supervisor import cgroups, slot_process
from agentenv.sandbox.supervisor.limits import CgroupPlan
from agentenv.sandbox.supervisor.slot_process import SlotProcess
from tests.waiting import START_S, until


class Box:
    """A slot's cgroup as version 1 has it: nothing kills all of it at one stroke. Here a plain directory."""

    def __init__(self, directory: Path) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self._list = directory / "cgroup.procs"
        self.plan = CgroupPlan(
            directories=(directory,),
            settings=(),
            join_files=(),
            kill_file=None,
            pids_limit=None,
            memory_limit=None,
            version=1,
        )

    def add(self) -> int:
        """One more process in it; its pid."""
        self.processes.append(subprocess.Popen(["sleep", "1000"]))
        self._list.write_text("".join(f"{process.pid}\n" for process in self.processes if process.poll() is None))
        return self.processes[-1].pid


async def test_an_agent_that_cannot_die_before_another_process_is_not_waited_for_in_vain(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Version 1: whoever holds a lock that the agent waits for is killed too, and so is what it has just made."""
    monkeypatch.setattr(slot_process, "KILL_DEADLINE_S", START_S)
    box = Box(tmp_path)
    box.add()
    exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    slot = SlotProcess(0, -1, exited, ours, box.plan, agent_pidfd=os.pidfd_open(box.processes[0].pid))

    async def holder_dies() -> None:
        await asyncio.to_thread(box.processes[0].wait, START_S)
        box.add()
        await asyncio.to_thread(box.processes[1].wait, START_S)
        exited.set_result(signal.SIGKILL)

    dying = asyncio.create_task(holder_dies())
    try:
        await slot.kill()
        await dying
        assert [process.returncode for process in box.processes] == [-signal.SIGKILL] * 2
    finally:
        theirs.close()
        for process in box.processes:
            process.kill()
            process.wait()


async def test_the_agent_s_socket_is_closed_after_the_kill(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What was sent and never read may carry descriptors whose last close takes long."""
    exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    slot = SlotProcess(0, -1, exited, ours, Box(tmp_path).plan)
    open_at_kill: list[bool] = []

    def kill(_: CgroupPlan) -> None:
        open_at_kill.append(ours.fileno() >= 0)
        exited.set_result(signal.SIGKILL)

    monkeypatch.setattr(cgroups, "kill", kill)
    monkeypatch.setattr(slot_process, "kill_family", lambda _: None)
    await slot.kill()
    assert open_at_kill == [True]
    assert ours.fileno() == -1
    theirs.close()


async def test_what_survives_the_kill_keeps_its_socket_open(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    slot, number = SlotProcess(0, -1, exited, ours, Box(tmp_path).plan), ours.fileno()
    monkeypatch.setattr(slot_process, "KILL_DEADLINE_S", 0.01)
    monkeypatch.setattr(slot_process, "kill_family", lambda _: None)
    with pytest.raises(TimeoutError):
        await slot.kill()
    slot.close()
    theirs.send(b"still heard")
    os.close(number)
    theirs.close()


async def test_without_cgroups_all_that_descends_from_the_agent_is_killed_by_itself() -> None:
    """Outside a pid namespace of its own nothing else would end them."""
    agent = subprocess.Popen(["bash", "-c", "(sleep 1000 & sleep 1000; :) & echo up; wait"], stdout=subprocess.PIPE)
    assert agent.stdout is not None
    assert agent.stdout.readline() == b"up\n"
    family = {agent.pid}
    while len(family) < 4:
        await asyncio.sleep(0.01)
        family |= _children_of(family)
    exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    exited.set_result(signal.SIGKILL)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    slot = SlotProcess(0, -1, exited, ours, None, agent_pid=agent.pid, agent_pidfd=os.pidfd_open(agent.pid))
    await slot.kill()
    theirs.close()
    agent.wait()
    agent.stdout.close()
    await until(lambda: not any(_lives(pid) for pid in family))


def _children_of(pids: set[int]) -> set[int]:
    found = [Path(f"/proc/{pid}/task/{pid}/children").read_text().split() for pid in pids]
    return {int(child) for children in found for child in children}


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
