"""A pool of one container's slots, without health, heartbeats or resets."""

from __future__ import annotations

import asyncio
import itertools

from agentenv.containers.handle import ContainerHandle
from agentenv.errors import AcquireTimeoutError, LeaseLostError
from agentenv.wire.leases import (
    ActionReply,
    ChangeNetwork,
    CheckpointSlot,
    DropCheckpoint,
    LeaseAction,
    LeaseKey,
    RestoreSlot,
    SealSlot,
    SlotRequest,
)
from agentenv.wire.network import NetworkPolicy
from agentenv.wire.roots import RootSpec
from agentenv.wire.states import SlotState


class StubLease:
    def __init__(self, trajectory: str, slot: int, container: ContainerHandle) -> None:
        self.trajectory = trajectory
        self.key = LeaseKey(slot=slot, epoch=1, secret="s" * 16)
        self.container = container
        self.lost: LeaseLostError | None = None
        self.root: RootSpec | None = None
        self.released = 0
        self.left = 0
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

    async def act(self, action: LeaseAction) -> ActionReply:
        made = ""
        match action:
            case SealSlot():
                self.sealed += 1
            case CheckpointSlot():
                made = f"{len(self.checkpoints):032x}"
                self.checkpoints.append(made)
            case RestoreSlot(checkpoint=name):
                self.restored.append(name)
            case DropCheckpoint(checkpoint=name):
                self.checkpoints.remove(name)
            case ChangeNetwork(network=policy):
                self.networks.append(policy)
        return ActionReply(slot=self.key.slot, state=SlotState.leased, checkpoint=made)

    def leave(self) -> None:
        self.left += 1

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

    async def lease_slots(self, request: SlotRequest, *, timeout_s: float | None = None) -> list[StubLease]:
        await self.gate.wait()
        self.asked.append((request.root, request.container))
        if self.lacking:
            self.lacking -= 1
            raise AcquireTimeoutError("no slot became free")
        made = [StubLease(trajectory, next(self._slots), self.container) for trajectory in request.trajectories]
        self.leases += made
        return made
