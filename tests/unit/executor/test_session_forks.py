"""Checkpoints and forks of a session: what is asked of its lease and of the pool."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from agentenv.config import ExecutorSettings
from agentenv.errors import AcquireTimeoutError, CheckpointError, ConfigError
from agentenv.executor.tool_executor import ToolExecutor
from agentenv.tools.catalog import ToolCatalog
from agentenv.wire.network import NO_NETWORK, NetworkPolicy
from agentenv.wire.roots import RootSpec
from tests.faults.stub_pool import StubPool
from tests.faults.wire_server import WireServer

ROOT = RootSpec("sha256:" + "a" * 64)


@pytest.fixture
async def pool() -> AsyncIterator[StubPool]:
    async with WireServer() as server:
        yield StubPool(server.handle())


@pytest.fixture
async def executor(pool: StubPool) -> AsyncIterator[ToolExecutor]:
    async with ToolExecutor(pool, ToolCatalog.builtin(), ExecutorSettings()) as opened:
        yield opened


async def test_a_checkpoint_names_its_container_and_the_root_of_what_begins_with_it(
    executor: ToolExecutor, pool: StubPool
) -> None:
    async with executor.open("t", root=ROOT) as session:
        checkpoint = await session.checkpoint()
        assert checkpoint.container == pool.container.id
        assert checkpoint.root == replace(ROOT, checkpoint=pool.leases[0].checkpoints[0])
        await session.restore(checkpoint)
        assert pool.leases[0].restored == pool.leases[0].checkpoints
        await session.drop(checkpoint)
    assert pool.leases[0].checkpoints == []


async def test_forks_are_asked_for_where_the_checkpoint_is_which_is_dropped_then(
    executor: ToolExecutor, pool: StubPool
) -> None:
    async with executor.open("t", root=ROOT, group="g") as session:
        forks = await session.fork(2)
        assert [fork.trajectory for fork in forks] == ["t-1", "t-2"]
        assert {fork.request.tags.group for fork in forks} == {"g"}
        (asked, container), other = pool.asked[1:]
        assert (asked, container) == other
        assert asked is not None
        assert (asked.image, container) == (ROOT.image, pool.container.id)
        assert asked.checkpoint
        assert pool.leases[0].checkpoints == []
        assert [fork.trajectory for fork in await forks[0].fork()] == ["t-1-1"]
        assert [lease.released for lease in pool.leases] == [0] * 4


async def test_all_forks_are_opened_or_none(executor: ToolExecutor, pool: StubPool) -> None:
    async with executor.open("t", root=ROOT) as session:
        pool.lacking = 1
        with pytest.raises(AcquireTimeoutError):
            await session.fork(3)
        assert [lease.released for lease in pool.leases] == [0, 1, 1]
        assert pool.leases[0].checkpoints == [], "nor is the checkpoint left"


async def test_a_slot_without_an_image_has_them_too(executor: ToolExecutor, pool: StubPool) -> None:
    async with executor.open("t") as session:
        checkpoint = await session.checkpoint()
        assert checkpoint.root == RootSpec("", pool.leases[0].checkpoints[0])
        (fork,) = await session.fork()
        assert pool.asked[1][0] == RootSpec("", f"{1:032x}")
        again = await fork.checkpoint()
        assert again.root == RootSpec("", pool.leases[1].checkpoints[0])
        await fork.restore(again)
        assert pool.leases[1].restored == [again.root.checkpoint]


async def test_what_cannot_be_restored_is_refused(executor: ToolExecutor, pool: StubPool) -> None:
    async with executor.open("plain") as plain, executor.open("t", root=ROOT) as session:
        checkpoint = await session.checkpoint()
        with pytest.raises(CheckpointError, match="not of this slot's image"):
            await session.restore(await plain.checkpoint())
        with pytest.raises(CheckpointError, match="not of this slot's image"):
            await plain.restore(checkpoint)
        with pytest.raises(CheckpointError, match="another container, far"):
            await session.restore(replace(checkpoint, container="far"))
        with pytest.raises(CheckpointError, match="another container, far"):
            await session.drop(replace(checkpoint, container="far"))
        assert pool.leases[1].restored == []


async def test_a_change_of_network_holds_for_forks_too(executor: ToolExecutor, pool: StubPool) -> None:
    allowed = NetworkPolicy("allow", ("example.org",))
    async with executor.open("plain") as plain, executor.open("t", root=ROOT) as session:
        with pytest.raises(ConfigError, match="container's network"):
            await plain.set_network(NO_NETWORK)
        await session.set_network(allowed)
        assert pool.leases[1].networks == [allowed]
        await session.fork()
        assert [root.network for root, _ in pool.asked if root is not None] == [NO_NETWORK, allowed]


async def test_a_network_that_the_slots_capabilities_forbid_is_not_asked_for(
    executor: ToolExecutor, pool: StubPool
) -> None:
    async with executor.open("t", root=replace(ROOT, capabilities=("net_admin",))) as session:
        with pytest.raises(ConfigError, match="net_admin"):
            await session.set_network(NetworkPolicy("public"))
        assert pool.leases[0].networks == []
