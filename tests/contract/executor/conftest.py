"""Sessions on every backend that can be had here: one container of four slots.

A module's tests share the container, each on a slot of its own; tests that break containers take ``pool``,
which is theirs alone.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from agentenv.config import ContainerSettings, PoolSettings
from agentenv.executor.session import ToolSession
from agentenv.executor.tool_executor import ToolExecutor
from agentenv.slots.backends.fake import FakeBackend
from agentenv.slots.backends.local import LocalBackend
from agentenv.slots.pool import SlotPool
from agentenv.tools.catalog import ToolCatalog
from tests.contract.conftest import KINDS, SHARED, AnyPool, Breakable, breakable, over
from tests.contract.executor.farm import Breaker, FakeBreaker, LocalBreaker, NomadBreaker
from tests.nomad.farm import KillableNomad

SETTINGS = ContainerSettings(slots_per_container=4)


@pytest_asyncio.fixture(params=[*KINDS, "farm-local", "farm-nomad"], scope="module", loop_scope="module")
async def shared_pool(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[AnyPool]:
    settings = PoolSettings(min_containers=1, max_containers=1, acquire_timeout_s=120)
    backend = breakable(request, SETTINGS, tmp_path_factory.mktemp("state"))
    async with over(backend, settings, shared=request.param in SHARED) as opened:
        yield opened


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def executor(shared_pool: AnyPool) -> AsyncIterator[ToolExecutor]:
    async with ToolExecutor(shared_pool, ToolCatalog.builtin()) as opened:
        yield opened


@pytest_asyncio.fixture(loop_scope="module")
async def session(executor: ToolExecutor) -> AsyncIterator[ToolSession]:
    async with executor.open("t", acquire_timeout_s=120) as opened:
        yield opened


@pytest.fixture(params=KINDS)
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Breakable:
    return breakable(request, SETTINGS, tmp_path)


@pytest.fixture
async def pool(backend: Breakable) -> AsyncIterator[SlotPool]:
    settings = PoolSettings(
        min_containers=1, max_containers=1, suspect_after_s=0.5, gone_after_s=60, acquire_timeout_s=120
    )
    async with SlotPool(backend, settings) as opened:
        yield opened


@pytest.fixture
def breaker(backend: Breakable) -> Breaker:
    match backend:
        case FakeBackend():
            return FakeBreaker(backend)
        case KillableNomad():
            return NomadBreaker(backend)
        case LocalBackend():
            return LocalBreaker(backend)
    raise AssertionError(f"nothing breaks a {backend.name} container")
