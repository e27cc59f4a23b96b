"""Copying a workspace: the end of a container, while one is copied."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from agentenv.sandbox.supervisor import child, slot_process
from agentenv.sandbox.supervisor.plain_slot import pack_workspace
from agentenv.sandbox.supervisor.reaper import Reaper
from agentenv.sandbox.supervisor.slot_process import SlotSetup


async def test_a_container_that_ends_does_not_wait_for_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = SimpleNamespace(root=Path("/"), workspace=lambda _: Path("/"))
    identity = SimpleNamespace(mode="user")
    setup = cast("SlotSetup", SimpleNamespace(launcher=Path("/"), identity=identity, tree=tree))
    killed: list[int] = []
    monkeypatch.setattr(child, "spawn", lambda *_: 12345)
    monkeypatch.setattr(slot_process, "kill_family", killed.append)
    never: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    reaper = cast("Reaper", SimpleNamespace(watch=lambda _: never))
    copying = asyncio.create_task(pack_workspace(setup, 0, reaper, 1))
    await asyncio.sleep(0)
    copying.cancel()
    async with asyncio.timeout(20):
        with pytest.raises(asyncio.CancelledError):
            await copying
    assert killed == [12345]
