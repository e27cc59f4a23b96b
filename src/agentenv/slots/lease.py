"""A trajectory's right to one slot, as its holder sees it."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self

from agentenv.containers.handle import ContainerHandle
from agentenv.errors import AgentEnvError
from agentenv.wire.leases import NO_TAGS, ActionReply, LeaseAction, LeaseKey, SlotRequest, Tags
from agentenv.wire.roots import RootSpec


class LeaseOwner(Protocol):
    """The pool, as far as a lease needs it."""

    async def act(self, lease: SlotLease, action: LeaseAction) -> ActionReply:
        """The answer of the lease's container; what the lease was lost with, when it is lost first."""

    async def release_lease(self, lease: SlotLease) -> None:
        """See :meth:`SlotLease.release`."""


class SlotLease:
    """One slot, held until released, lost, or the pool closes. An async context manager that releases.

    ``lost`` is None while the slot belongs to this trajectory, and then the error that ended the lease.
    """

    def __init__(
        self, lease_id: int, trajectory: str, key: LeaseKey, container: ContainerHandle, landlord: LeaseOwner
    ) -> None:
        self.id = lease_id
        self.trajectory = trajectory
        self.key = key
        self.container = container
        self.lost: AgentEnvError | None = None
        self.released = False
        self._landlord = landlord
        self._ended = asyncio.Event()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.release()

    async def wait_lost(self) -> AgentEnvError:
        """Wait until the slot is lost, and return the reason: LeaseLostError, or SlotDestroyedError when programs
        in the slot destroyed it.

        Never returns for a lease that is released normally.
        """
        await self._ended.wait()
        assert self.lost is not None
        return self.lost

    async def act(self, action: LeaseAction) -> ActionReply:
        """Do something to the slot (see the action), keeping the lease.

        Raises the lease's own error when it has ended (see :meth:`wait_lost`); ConnectionLostError when the container
        did not answer in time (the lease stays valid); CheckpointError when there is no room for the files;
        SandboxUnavailableError when a network cannot be had (then the slot has none).
        """
        if self.lost is not None:
            raise self.lost
        return await self._landlord.act(self, action)

    async def release(self) -> None:
        """Return the slot. Waits until the container has reset it or is gone, at most the pool's
        ``reset_timeout_s``. May be repeated.

        Cancelling this stops the waiting, not the release.
        """
        await self._landlord.release_lease(self)

    def end(self, error: AgentEnvError) -> None:
        """Called by the pool when the slot is lost."""
        self.lost = error
        self._ended.set()

    def __repr__(self) -> str:
        state = "lost" if self.lost is not None else "released" if self.released else "held"
        return f"<SlotLease {self.trajectory!r} {self.container.id}/{self.key.slot} epoch {self.key.epoch} {state}>"


class Leases(ABC):
    """What a pool of slots offers: :meth:`lease_slots`, and two ways to write a request."""

    @abstractmethod
    async def lease_slots(self, request: SlotRequest, *, timeout_s: float | None = None) -> list[SlotLease]:
        """A slot for each trajectory of the request, all of them or none, in their order. Cancelling this never leaks a
        slot. Raises as :meth:`lease`; QuotaError for a group that is larger than the farm can become."""

    async def lease(
        self,
        trajectory: str,
        *,
        timeout_s: float | None = None,
        tags: Tags = NO_TAGS,
        root: RootSpec | None = None,
        container: str = "",
    ) -> SlotLease:
        """Lease a slot, when it is this trajectory's turn. Release it, or use it as a context manager.

        ``timeout_s`` covers the whole wait; by default see the class. ``tags`` are shown to operators. With ``root``
        it is an image slot; ``container`` names the only one that can serve, because it has the checkpoint of that
        root: others who wait are served meanwhile.
        Raises AcquireTimeoutError when the time passes, SandboxUnavailableError as soon as no container can ever
        serve, CheckpointError when ``container`` or its checkpoint is gone, FarmUnreachableError, QuotaError,
        PoolClosedError, ConfigError for arguments out of range.
        """
        request = SlotRequest((trajectory,), tags, root=root, container=container)
        (lease,) = await self.lease_slots(request, timeout_s=timeout_s)
        return lease

    async def lease_group(
        self,
        trajectories: Sequence[str],
        *,
        timeout_s: float | None = None,
        tags: Tags = NO_TAGS,
        root: RootSpec | None = None,
        container: str = "",
    ) -> list[SlotLease]:
        """Lease a slot for each trajectory, all of them together or none; otherwise as :meth:`lease`. Nobody who came
        later is served before."""
        request = SlotRequest(tuple(trajectories), tags, root=root, container=container)
        return await self.lease_slots(request, timeout_s=timeout_s)
