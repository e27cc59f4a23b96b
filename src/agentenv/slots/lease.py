"""A trajectory's right to one slot, as its holder sees it."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Protocol, Self

from agentenv.containers.handle import ContainerHandle
from agentenv.errors import AgentEnvError
from agentenv.wire.leases import ActionReply, LeaseAction, LeaseKey


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
