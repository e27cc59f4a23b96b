"""What only the fake can be made to do on demand: stall, be quarantined, fail to start, crash its server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from agentenv.config import ContainerSettings, PoolSettings
from agentenv.errors import AcquireTimeoutError, ContainerLostError, SandboxUnavailableError
from agentenv.slots.backends.fake import FakeBackend
from agentenv.slots.pool import SlotPool
from agentenv.wire.states import ContainerState, SlotState
from tests.contract.conftest import Client, renewed
from tests.waiting import START_S, until


@asynccontextmanager
async def _pool(slots: int = 2, **settings: float) -> AsyncIterator[tuple[SlotPool, FakeBackend]]:
    backend = FakeBackend(ContainerSettings(slots_per_container=slots))
    async with SlotPool(backend, PoolSettings.model_validate({"max_containers": 1, **settings})) as pool:
        yield pool, backend


async def test_a_late_container_is_suspect_and_keeps_its_leases() -> None:
    async with _pool(suspect_after_s=0.3, gone_after_s=30) as (pool, backend), await pool.lease("holder") as lease:
        backend.stall(lease.container.id, 600)
        await until(lambda: pool.statistics().containers == {ContainerState.suspect: 1})
        asking = asyncio.create_task(pool.lease("new", timeout_s=60))
        await until(lambda: pool.statistics().waiting == 1)
        await asyncio.sleep(0.1)
        assert not asking.done()
        assert lease.lost is None
        backend.stall(lease.container.id, 0)
        async with await asking as second:
            assert second.container.id == lease.container.id
        await until(lambda: pool.statistics().containers == {ContainerState.ready: 1})
        assert lease.lost is None


async def test_a_silent_container_is_given_up_and_replaced() -> None:
    async with _pool(suspect_after_s=0.2, gone_after_s=0.6) as (pool, backend):
        lease = await pool.lease("holder")
        backend.stall(lease.container.id, 60)
        error = await asyncio.wait_for(lease.wait_lost(), 30)
        assert isinstance(error, ContainerLostError)
        assert "has not responded" in str(error)
        async with await pool.lease("next") as again:
            assert again.container.id != lease.container.id
        assert len(backend.containers) == 1


async def test_a_lease_whose_answer_never_came_is_found_and_released() -> None:
    """The container stalls in the middle of the hand-over: the waiter leaves, the slot must come back."""
    async with _pool(slots=1, suspect_after_s=0.4, gone_after_s=30) as (pool, backend):
        await until(lambda: pool.statistics().slots == {SlotState.free: 1})
        backend.stall(backend.containers[0].id, 600)
        with pytest.raises(AcquireTimeoutError):
            await pool.lease("impatient", timeout_s=0.2)
        backend.stall(backend.containers[0].id, 0)
        async with await pool.lease("patient", timeout_s=60):
            pass
        await until(lambda: pool.statistics().slots == {SlotState.free: 1})


async def test_a_server_crash_keeps_leases() -> None:
    async with _pool() as (pool, backend), await pool.lease("holder") as lease:
        async with Client.open(lease.container) as client:
            await client.run(lease.key, "echo kept > file")
            before = client.boot
            backend.crash_and_restart(lease.container.id)
        async with Client.open(lease.container) as client:
            assert (await client.run(lease.key, "echo no", boot=before)).error == "call_lost"
            assert (await client.run(lease.key, "cat file")).stdout == "kept\n"
        await renewed(pool, lease)
        assert lease.lost is None


async def test_quarantined_slots_are_not_used_and_spoiled_containers_replaced() -> None:
    async with _pool(slots=3) as (pool, backend):
        first = await pool.lease("a")
        backend.quarantine_next_reset(first.container.id)
        await first.release()
        assert pool.statistics().slots == {SlotState.quarantined: 1, SlotState.free: 2}
        second = await pool.lease("b")
        assert second.key.slot == 1
        backend.quarantine_next_reset(second.container.id)
        await second.release()
        await until(lambda: pool.statistics().slots == {SlotState.free: 3})
        async with await pool.lease("c") as lease:
            assert lease.container.id != first.container.id


async def test_a_spoiled_container_keeps_the_leases_it_has() -> None:
    async with _pool(slots=3) as (pool, backend):
        kept, *others = [await pool.lease(f"t{number}") for number in range(3)]
        for lease in others:
            backend.quarantine_next_reset(lease.container.id)
            await lease.release()
        assert pool.statistics().containers == {ContainerState.draining: 1}
        await asyncio.sleep(0.1)
        assert kept.lost is None
        await kept.release()
        await until(lambda: pool.statistics().slots == {SlotState.free: 3})


async def test_a_start_that_can_never_succeed_fails_everybody_at_once() -> None:
    backend = FakeBackend(start_delay_s=0.2)
    backend.fail_next_start("bwrap is missing", permanent=True, next_step="apt-get install bubblewrap")
    async with SlotPool(backend, PoolSettings(acquire_timeout_s=60)) as pool:
        asking = [asyncio.create_task(pool.lease(f"t{number}")) for number in range(3)]
        done, _ = await asyncio.wait(asking, timeout=30)
        assert len(done) == 3
        for task in done:
            with pytest.raises(SandboxUnavailableError, match=r"bwrap is missing.*apt-get install bubblewrap"):
                task.result()
        with pytest.raises(SandboxUnavailableError):
            await pool.lease("later")
        assert pool.statistics().faults["start_failed"] == 1


async def test_a_start_that_failed_once_is_tried_again() -> None:
    backend = FakeBackend()
    backend.fail_next_start("the disk was full for a moment")
    async with SlotPool(backend, PoolSettings(acquire_timeout_s=10)) as pool, await pool.lease("t"):
        assert pool.statistics().faults["start_failed"] == 1


async def test_a_timeout_names_the_last_failed_start() -> None:
    backend = FakeBackend()
    for _ in range(20):
        backend.fail_next_start("no space left on device", next_step="free some space")
    async with SlotPool(backend, PoolSettings()) as pool:
        with pytest.raises(AcquireTimeoutError, match=r"no space left on device.*free some space"):
            await pool.lease("t", timeout_s=0.5)


async def test_hundreds_of_containers_and_thousands_of_slots() -> None:
    backend = FakeBackend(ContainerSettings(slots_per_container=10))
    # All of them are in this process, so on a loaded machine all of them are slow to answer.
    settings = PoolSettings(
        max_containers=200, acquire_timeout_s=2 * START_S, suspect_after_s=60, gone_after_s=2 * START_S
    )
    async with SlotPool(backend, settings) as pool, AsyncExitStack() as stack:
        leases = await asyncio.gather(*(pool.lease(f"t{number}") for number in range(1_500)))
        stack.push_async_callback(asyncio.gather, *(lease.release() for lease in leases))
        places = {(lease.container.id, lease.key.slot) for lease in leases}
        assert len(places) == 1_500
        assert pool.statistics().leased == 1_500
        assert 150 <= sum(pool.statistics().containers.values()) <= 200
