"""A farm service with containers of each kind, and its clients, each as another process would be."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from agentenv import AsyncFarm, ContainerSettings
from agentenv.config import PoolSettings
from agentenv.slots.backends.base import ContainerBackend
from agentenv.slots.backends.fake import FakeBackend
from agentenv.slots.backends.local import LocalBackend
from tests.farm_service import Served, served
from tests.waiting import START_S

SETTINGS = ContainerSettings(slots_per_container=4)
POOL = PoolSettings(max_containers=1)


@pytest.fixture(params=["fake", "local"])
async def farm(request: pytest.FixtureRequest) -> AsyncIterator[Served]:
    backend: ContainerBackend = FakeBackend(SETTINGS) if request.param == "fake" else LocalBackend(SETTINGS)
    async with served(backend, POOL) as opened:
        yield opened


def client(farm: Served, run: str = "tests") -> AsyncFarm:
    """As another process would be."""
    return AsyncFarm("farm", farm=farm.access(run), start_timeout_s=START_S)


async def names(mine: AsyncFarm) -> list[str]:
    """Of the run's sandboxes."""
    return [one.name for one in await mine.sandboxes()]


async def states(mine: AsyncFarm) -> dict[str, str]:
    """Of the run's sandboxes, by name."""
    return {one.name: one.state for one in await mine.sandboxes()}
