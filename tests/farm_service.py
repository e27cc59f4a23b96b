"""A farm service in the test's own process, and pools that are its clients."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from agentenv.api import serving
from agentenv.api.farm_server.access import Access
from agentenv.api.farm_server.app import farm_app
from agentenv.api.farm_server.farm import Farm
from agentenv.api.farm_server.tokens import TokenKeys
from agentenv.config import PoolSettings
from agentenv.farm_client.access import FarmAccess
from agentenv.farm_client.pool import FarmPool
from agentenv.slots.backends.base import ContainerBackend
from agentenv.slots.statistics import PoolStatistics
from agentenv.wire.farm import Scope

KEY = "a key of the tests, and of nothing else"
KEYS = TokenKeys([KEY])
TOKEN_S = 6 * 3600.0
"""Longer than a suite takes: some tokens are made when tests are collected."""


def token(run: str = "tests", scope: Scope = "run", cap: int | None = None) -> str:
    return KEYS.mint(run, scope, cap=cap, expires_s=TOKEN_S)


@dataclasses.dataclass(frozen=True)
class Served:
    """A farm, and where it is."""

    farm: Farm
    url: str

    def watching_pool(self, settings: PoolSettings, run: str = "tests") -> WatchingPool:
        pool = WatchingPool(self.access(run), settings=settings)
        pool.farm = self.farm
        return pool

    def pool(self, run: str = "tests", **changes: Any) -> FarmPool:
        return FarmPool(self.access(run), **changes)

    def access(self, run: str = "tests") -> FarmAccess:
        return FarmAccess((self.url,), token(run))


@asynccontextmanager
async def served(
    backend: ContainerBackend, pool: PoolSettings | None = None, *, access: Access | None = None, **options: Any
) -> AsyncIterator[Served]:
    """An open farm over this backend, which it opens and closes."""
    async with Farm(backend, pool, **options) as farm:
        app = farm_app(farm, access or Access(KEYS))
        async with serving.served(app, "farm", host="127.0.0.1", port=0, ending=farm.leave) as url:
            yield Served(farm, url)


class WatchingPool(FarmPool):
    """Its statistics show the farm's slots as they are now, not as they were some seconds ago."""

    farm: Farm

    def statistics(self) -> PoolStatistics:
        whole = self.farm.manager.statistics()
        mine = super().statistics()
        starts = {name: count for name, count in whole.faults.items() if name == "start_failed"}
        return dataclasses.replace(
            mine, slots=whole.slots, containers=whole.containers, faults={**mine.faults, **starts}
        )
