"""A trajectory's right to one slot, as its holder sees it."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Protocol, Self

from agentenv.containers.handle import ContainerHandle
from agentenv.errors import AgentEnvError
from agentenv.wire.leases import LeaseKey


class LeaseOwner(Protocol):
    """Who a lease is given back to: the pool."""

    async def seal_lease(self, lease: SlotLease) -> None:
        """See :meth:`SlotLease.seal`."""

    async def release_lease(self, lease: SlotLease) -> None:
        """See :meth:`SlotLease.release`."""


class SlotLease:
    """One slot, held until released, lost, or the pool closes. An async context manager that releases.

    ``lost`` is None while the slot is this trajectory's, and the typed error once it is not.
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
        """Wait until the slot is lost; why: LeaseLostError, or SlotDestroyedError when what ran in it did it.

        Waits for ever on a lease that is released in good order.
        """
        await self._ended.wait()
        assert self.lost is not None
        return self.lost

    async def seal(self) -> None:
        """Kill everything that runs in the slot, keep workspace and lease.

        Raises the lease's own error when it has ended (see :meth:`wait_lost`), ConnectionLostError when the container
        did not answer in time (the lease lives on).
        """
        if self.lost is not None:
            raise self.lost
        await self._landlord.seal_lease(self)

    async def release(self) -> None:
        """Give the slot back; returns when the container has reset it, or is gone, or takes longer than the pool's
        ``reset_timeout_s``. May be repeated.

        Cancelling this stops the waiting, never the releasing.
        """
        await self._landlord.release_lease(self)

    def end(self, error: AgentEnvError) -> None:
        """For the pool: the slot is lost."""
        self.lost = error
        self._ended.set()

    def __repr__(self) -> str:
        state = "lost" if self.lost is not None else "released" if self.released else "held"
        return f"<SlotLease {self.trajectory!r} {self.container.id}/{self.key.slot} epoch {self.key.epoch} {state}>"
