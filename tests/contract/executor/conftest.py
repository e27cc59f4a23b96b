"""Sessions on every backend that can be had here: one container of four slots, made anew for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agentenv.config import ContainerSettings, PoolSettings
from agentenv.executor.session import ToolSession
from agentenv.executor.tool_executor import ToolExecutor
from agentenv.slots.backends.fake import FakeBackend
from agentenv.slots.backends.local import LocalBackend
from agentenv.slots.pool import SlotPool
from agentenv.tools.catalog import ToolCatalog
from tests.contract.executor.farm import Breaker, FakeBreaker, LocalBreaker

SETTINGS = ContainerSettings(slots_per_container=4)


@pytest.fixture(params=["fake", "local"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> FakeBackend | LocalBackend:
    return FakeBackend(SETTINGS) if request.param == "fake" else LocalBackend(SETTINGS, state_dir=tmp_path)


@pytest.fixture
async def pool(backend: FakeBackend | LocalBackend) -> AsyncIterator[SlotPool]:
    async with SlotPool(backend, PoolSettings(min_containers=1, max_containers=1)) as opened:
        yield opened


@pytest.fixture
def breaker(backend: FakeBackend | LocalBackend) -> Breaker:
    return FakeBreaker(backend) if isinstance(backend, FakeBackend) else LocalBreaker(backend)


@pytest.fixture
async def executor(pool: SlotPool) -> AsyncIterator[ToolExecutor]:
    async with ToolExecutor(pool, ToolCatalog.builtin()) as opened:
        yield opened


@pytest.fixture
async def session(executor: ToolExecutor) -> AsyncIterator[ToolSession]:
    async with executor.open("t", acquire_timeout_s=30) as opened:
        yield opened
