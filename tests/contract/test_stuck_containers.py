"""A container whose supervisor hangs: no rollout waits for it, and it is replaced when it holds no lease."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import aiohttp
import pytest

from agentenv.config import ContainerSettings, PoolSettings
from agentenv.slots.backends.attached import AttachedBackend
from agentenv.slots.backends.local import LocalBackend
from agentenv.slots.pool import SlotPool
from agentenv.wire.states import ContainerState, SlotState
from tests.contract.conftest import Client
from tests.waiting import START_S, until


def _supervisor(backend: LocalBackend, container: str) -> int:
    launcher = backend.pids[container]
    return int(Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()[0])


@pytest.fixture
def backend(tmp_path: Path) -> LocalBackend:
    return LocalBackend(ContainerSettings(slots_per_container=2, require_sandbox=False), state_dir=tmp_path)


async def test_a_release_returns_although_the_supervisor_hangs(backend: LocalBackend) -> None:
    settings = PoolSettings(max_containers=1, reset_timeout_s=1.0)
    async with SlotPool(backend, settings) as pool:
        one, other = await pool.lease("one", timeout_s=START_S), await pool.lease("other", timeout_s=START_S)
        container = one.container.id
        os.kill(_supervisor(backend, container), signal.SIGSTOP)
        await asyncio.wait_for(one.release(), 30)
        await until(lambda: pool.statistics().containers.get(ContainerState.draining, 0) == 1)
        assert other.lost is None, "who has a lease there keeps it"
        async with Client.open(other.container) as client:
            assert (await client.run(other.key, "echo works")).stdout == "works\n"
        await other.release()
        async with await pool.lease("next", timeout_s=START_S) as after:
            assert after.container.id != container


async def test_a_supervisor_that_hangs_is_told_before_anything_is_reset(backend: LocalBackend) -> None:
    settings = PoolSettings(max_containers=1, reset_timeout_s=1.0, suspect_after_s=0.5)
    async with SlotPool(backend, settings) as pool:
        lease = await pool.lease("holder", timeout_s=START_S)
        async with aiohttp.ClientSession() as session:
            os.kill(_supervisor(backend, lease.container.id), signal.SIGSTOP)
            silent_s = 0.0
            async with asyncio.timeout(30):
                while silent_s <= 1.0:
                    async with session.get(lease.container.base_url + "/health") as response:
                        silent_s = (await response.json())["supervisor_silent_s"]
                    await asyncio.sleep(0.05)
        await until(lambda: pool.statistics().containers.get(ContainerState.draining, 0) == 1)
        assert lease.lost is None
        await asyncio.wait_for(lease.release(), 30)
        async with await pool.lease("next", timeout_s=START_S) as after:
            assert after.container.id != lease.container.id


async def test_a_slot_that_somebody_else_leases_is_not_one_that_resets_too_slowly(backend: LocalBackend) -> None:
    async with SlotPool(backend, PoolSettings(max_containers=1)) as owner:
        held = await owner.lease("held", timeout_s=START_S)
        settings = PoolSettings(max_containers=1, reset_timeout_s=15.0)
        async with SlotPool(AttachedBackend([held.container]), settings) as guest:
            async with await guest.lease("guest", timeout_s=START_S):
                await asyncio.sleep(settings.reset_timeout_s + 3)
                assert ContainerState.draining not in guest.statistics().containers
            assert held.lost is None
            await held.release()
            await until(lambda: guest.statistics().slots.get(SlotState.free, 0) == 2)
