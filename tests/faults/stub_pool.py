"""A pool of one container's slots, without health, heartbeats or resets."""

from __future__ import annotations

import asyncio
import itertools

from agentenv.containers.handle import ContainerHandle
from agentenv.errors import LeaseLostError
from agentenv.wire.leases import NO_TAGS, LeaseKey, Tags
from agentenv.wire.roots import RootSpec


class StubLease:
    def __init__(self, trajectory: str, slot: int, container: ContainerHandle) -> None:
        self.trajectory = trajectory
        self.key = LeaseKey(slot=slot, epoch=1, secret="s" * 16)
        self.container = container
        self.lost: LeaseLostError | None = None
        self.released = 0
        self.sealed = 0
        self._lost = asyncio.Event()

    def lose(self, error: LeaseLostError) -> None:
        self.lost = error
        self._lost.set()

    async def wait_lost(self) -> LeaseLostError:
        await self._lost.wait()
        assert self.lost is not None
        return self.lost

    async def seal(self) -> None:
        self.sealed += 1

    async def release(self) -> None:
        await asyncio.sleep(0)
        self.released += 1


class StubPool:
    def __init__(self, container: ContainerHandle) -> None:
        self.container = container
        self.leases: list[StubLease] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self._slots = itertools.count()

    async def lease(
        self, trajectory: str, *, timeout_s: float | None = None, tags: Tags = NO_TAGS, root: RootSpec | None = None
    ) -> StubLease:
        await self.gate.wait()
        lease = StubLease(trajectory, next(self._slots), self.container)
        self.leases.append(lease)
        return lease
