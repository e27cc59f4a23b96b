"""A pool of one container's slots, without health, heartbeats or resets."""

from __future__ import annotations

import asyncio
import itertools

from agentenv.containers.handle import ContainerHandle
from agentenv.errors import AcquireTimeoutError, LeaseLostError
from agentenv.wire.leases import NO_TAGS, LeaseKey, Tags
from agentenv.wire.network import NetworkPolicy
from agentenv.wire.roots import RootSpec


class StubLease:
    def __init__(self, trajectory: str, slot: int, container: ContainerHandle) -> None:
        self.trajectory = trajectory
        self.key = LeaseKey(slot=slot, epoch=1, secret="s" * 16)
        self.container = container
        self.lost: LeaseLostError | None = None
        self.released = 0
        self.sealed = 0
        self.checkpoints: list[str] = []
        self.restored: list[str] = []
        self.networks: list[NetworkPolicy] = []
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

    async def checkpoint(self) -> str:
        self.checkpoints.append(f"{len(self.checkpoints):032x}")
        return self.checkpoints[-1]

    async def restore(self, checkpoint: str) -> None:
        self.restored.append(checkpoint)

    async def drop(self, checkpoint: str) -> None:
        self.checkpoints.remove(checkpoint)

    async def set_network(self, network: NetworkPolicy) -> None:
        self.networks.append(network)

    async def release(self) -> None:
        await asyncio.sleep(0)
        self.released += 1


class StubPool:
    def __init__(self, container: ContainerHandle) -> None:
        self.container = container
        self.leases: list[StubLease] = []
        self.asked: list[tuple[RootSpec | None, str]] = []
        """The root and the container of each request."""
        self.lacking = 0
        """How many of the next requests find no slot."""
        self.gate = asyncio.Event()
        self.gate.set()
        self._slots = itertools.count()

    async def lease(
        self,
        trajectory: str,
        *,
        timeout_s: float | None = None,
        tags: Tags = NO_TAGS,
        root: RootSpec | None = None,
        container: str = "",
    ) -> StubLease:
        await self.gate.wait()
        self.asked.append((root, container))
        if self.lacking:
            self.lacking -= 1
            raise AcquireTimeoutError("no slot became free")
        lease = StubLease(trajectory, next(self._slots), self.container)
        self.leases.append(lease)
        return lease
