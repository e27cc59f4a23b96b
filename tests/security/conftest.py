"""A real farm of one container, of local processes and over Nomad and Docker: what is tried here both must refuse."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import pytest
import pytest_asyncio

from agentenv.config import ContainerSettings, PoolSettings
from agentenv.deadlines import scaled
from agentenv.executor.session import ToolSession
from agentenv.executor.tool_executor import ToolExecutor
from agentenv.slots.backends.base import ContainerBackend
from agentenv.slots.backends.local import LocalBackend
from agentenv.slots.pool import SlotPool
from agentenv.tools.catalog import ToolCatalog
from agentenv.wire.spec import MIB, SlotLimits
from tests.nomad.farm import nomad_farm
from tests.waiting import START_S

LIMITS = SlotLimits(
    processes=60,
    memory_bytes=256 * MIB,
    workspace_bytes=32 * MIB,
    workspace_inodes=2_000,
    tmp_bytes=32 * MIB,
    shm_bytes=16 * MIB,
)


@pytest_asyncio.fixture(params=["local", "nomad"], scope="module", loop_scope="module")
async def executor(request: pytest.FixtureRequest) -> AsyncIterator[ToolExecutor]:
    """A module's tests share the container: what one did to its slots must not be felt by the next."""
    async with executor_of(request.param, request) as opened:
        yield opened


@asynccontextmanager
async def executor_of(backend: str, request: pytest.FixtureRequest, **limits: int) -> AsyncIterator[ToolExecutor]:
    """One container of plain slots on this backend, with LIMITS except these."""
    containers = ContainerSettings(slots_per_container=3, limits=replace(LIMITS, **limits))
    settings = PoolSettings(min_containers=1, max_containers=1, acquire_timeout_s=START_S)
    pool = SlotPool(_backend(backend, containers, request), settings)
    async with pool, ToolExecutor(pool, ToolCatalog.builtin()) as opened:
        yield opened


def _backend(name: str, containers: ContainerSettings, request: pytest.FixtureRequest) -> ContainerBackend:
    if name == "local":
        return LocalBackend(containers)
    return nomad_farm(request.getfixturevalue("cluster").address, containers)


class Slots:
    """Opens tool sessions and says what their commands printed."""

    def __init__(self, executor: ToolExecutor, stack: AsyncExitStack) -> None:
        self.executor = executor
        self._stack = stack

    async def open(self, name: str) -> ToolSession:
        return await self._stack.enter_async_context(self.executor.open(name))


@pytest_asyncio.fixture(loop_scope="module")
async def slots(executor: ToolExecutor) -> AsyncIterator[Slots]:
    async with AsyncExitStack() as stack:
        yield Slots(executor, stack)


async def sh(session: ToolSession, command: str, *, timeout_s: float = 20.0) -> str:
    """stdout of a command (whatever its exit code); an infra fault raises. ``timeout_s``: on a machine of ordinary
    speed."""
    result = await session.call("bash", {"command": command}, timeout_s=scaled(timeout_s))
    assert result.fault == "none", result
    return result.stdout
