"""An unused plain slot of a real container waits while its place is taken by an image slot; what "unused" means is told
by the kernel."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from agentenv.containers.control import ContainerControl
from agentenv.executor.session import ToolSession
from agentenv.sandbox.supervisor.limits import CgroupPlan
from agentenv.sandbox.supervisor.slot_process import SlotProcess
from tests.integration.supervisor_harness import cgroups_of, members
from tests.security.image_slots import container, make_images

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="image slots are root's")


async def _groups(session: ToolSession) -> list[Path]:
    async with ContainerControl(session.lease.container, guest=True) as control:
        return cgroups_of((await control.info()).container)


def _processes(groups: list[Path], name: str) -> set[int]:
    return {pid for group in groups for pid in members(group / name)}


def _untouched(groups: list[Path], pids: set[int]) -> bool:
    """As the supervisor sees it of the plain slot 0, whose first processes had these pids."""
    plan = cast("CgroupPlan", SimpleNamespace(process_files=[group / "slot-0" / "cgroup.procs" for group in groups]))
    exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    agent = cast("socket.socket", None)
    return SlotProcess(0, min(pids), exited, agent, plan, agent_pid=max(pids)).untouched


async def test_it_waits_and_only_while_nothing_has_run_in_it(tmp_path: Path) -> None:
    async with container(make_images(tmp_path), slots=1) as slots:
        first = await slots.open()
        groups = await _groups(first)
        waiting = _processes(groups, "slot-0")
        assert len(waiting) == 2  # bwrap and the agent
        assert _untouched(groups, waiting)
        assert (await first.call("bash", {"command": "echo here"})).stdout == "here\n"
        assert _processes(groups, "image-0") & waiting == set()
        await slots.release_all()

        plain = await slots.open_plain()
        assert _processes(groups, "image-0") == set()
        assert waiting <= _processes(groups, "slot-0")
        assert (await plain.call("bash", {"command": "true"})).exit_code == 0
        assert not _untouched(groups, waiting)
        await slots.release_all()

        await slots.open()
        after = _processes(groups, "slot-0")
        assert len(after) == 2
        assert after & waiting == set()
        await slots.release_all()
