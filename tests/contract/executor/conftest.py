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
from tests.contract.executor.farm import Breaker, FakeBreaker, LocalBreaker, NomadBreaker
from tests.nomad.farm import KillableNomad, nomad_farm

BACKENDS = ["fake", "local", "nomad"]
Backend = FakeBackend | LocalBackend | KillableNomad


def make(request: pytest.FixtureRequest, state_dir: Path) -> Backend:
    settings = ContainerSettings(slots_per_container=4)
    if request.param == "fake":
        return FakeBackend(settings)
    if request.param == "nomad":
        return nomad_farm(request.getfixturevalue("cluster").address, settings)
    return LocalBackend(settings, state_dir=state_dir)


@pytest_asyncio.fixture(params=BACKENDS, scope="module", loop_scope="module")
async def executor(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[ToolExecutor]:
    settings = PoolSettings(min_containers=1, max_containers=1, acquire_timeout_s=120)
    shared = SlotPool(make(request, tmp_path_factory.mktemp("state")), settings)
    async with shared, ToolExecutor(shared, ToolCatalog.builtin()) as opened:
        yield opened


@pytest_asyncio.fixture(loop_scope="module")
async def session(executor: ToolExecutor) -> AsyncIterator[ToolSession]:
    async with executor.open("t", acquire_timeout_s=120) as opened:
        yield opened


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
    return make(request, tmp_path)


@pytest.fixture
async def pool(backend: Backend) -> AsyncIterator[SlotPool]:
    settings = PoolSettings(
        min_containers=1, max_containers=1, suspect_after_s=0.5, gone_after_s=10, acquire_timeout_s=120
    )
    async with SlotPool(backend, settings) as opened:
        yield opened


@pytest.fixture
def breaker(backend: Backend) -> Breaker:
    if isinstance(backend, FakeBackend):
        return FakeBreaker(backend)
    return NomadBreaker(backend) if isinstance(backend, KillableNomad) else LocalBreaker(backend)
