"""Leasing slots of containers somebody else keeps: nothing is started, stopped, or taken from anybody."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from agentenv.config import ContainerSettings, PoolSettings
from agentenv.errors import AcquireTimeoutError, ContainerLostError
from agentenv.slots.backends.attached import AttachedBackend
from agentenv.slots.backends.fake import FakeBackend
from agentenv.slots.pool import SlotPool
from tests.waiting import START_S

ONE = PoolSettings(min_containers=1, max_containers=1)


@pytest.fixture
async def owner() -> AsyncIterator[FakeBackend]:
    """One container of two slots, kept by nobody in particular."""
    async with FakeBackend(ContainerSettings(slots_per_container=2)) as backend:
        await backend.scale(1)
        async for event in backend.events():
            assert event
            break
        yield backend


async def test_a_guest_leases_and_leaves_the_container_as_it_was(owner: FakeBackend) -> None:
    async with SlotPool(AttachedBackend(owner.containers), ONE) as pool, await pool.lease("guest") as lease:
        assert lease.container == owner.containers[0]
    assert len(owner.containers) == 1
    async with SlotPool(AttachedBackend(owner.containers), ONE) as pool, await pool.lease("again"):
        assert pool.statistics().leased == 1


async def test_what_is_attached_is_what_was_found(owner: FakeBackend) -> None:
    assert owner.found == 0
    backend = AttachedBackend(owner.containers)
    assert backend.found == 0
    async with backend:
        assert backend.found == 1


async def test_two_guests_share_a_container_and_never_a_slot(owner: FakeBackend) -> None:
    async with (
        SlotPool(AttachedBackend(owner.containers), ONE) as first,
        SlotPool(AttachedBackend(owner.containers), ONE) as second,
    ):
        async with await first.lease("a") as one, await second.lease("b") as other:
            assert one.key.slot != other.key.slot
            with pytest.raises(AcquireTimeoutError):
                await second.lease("c", timeout_s=0.3)
        async with await second.lease("d", timeout_s=START_S):
            pass


async def test_a_container_that_dies_is_lost_and_not_replaced(owner: FakeBackend) -> None:
    settings = PoolSettings(
        min_containers=1,
        max_containers=1,
        lease_ttl_s=1.0,
        suspect_after_s=0.2,
        gone_after_s=0.5,
        start_timeout_s=START_S,
    )
    async with SlotPool(AttachedBackend(owner.containers), settings) as pool, await pool.lease("t") as lease:
        owner.kill(lease.container.id)
        async with asyncio.timeout(START_S):
            assert isinstance(await lease.wait_lost(), ContainerLostError)
        assert sum(pool.statistics().containers.values()) == 0
