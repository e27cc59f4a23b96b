"""A trajectory's right to one slot, and the book of those that are held."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Protocol, Self

from agentenv.background import unless_lost
from agentenv.containers.handle import ContainerHandle
from agentenv.errors import AgentEnvError, LeaseLostError, SlotDestroyedError, StaleLeaseError
from agentenv.slots.container_link import ContainerLink
from agentenv.slots.statistics import Tally
from agentenv.wire.leases import NO_TAGS, ActionReply, LeaseAction, LeaseKey, PauseSlot, SlotRequest, Tags
from agentenv.wire.roots import RootSpec


class SlotLease:
    """One slot, held until released, lost, or the pool closes. An async context manager that releases.

    ``lost`` is None while the slot belongs to this trajectory, and then the error that ended the lease.
    """

    def __init__(
        self,
        lease_id: int,
        trajectory: str,
        key: LeaseKey,
        link: ContainerLink,
        container: ContainerHandle,
        book: LeaseBook,
    ) -> None:
        """``link``: what is done to the slot goes by it. ``container``: its calls go there."""
        self.id = lease_id
        self.trajectory = trajectory
        self.key = key
        self.link = link
        self.container = container
        self.lost: AgentEnvError | None = None
        self.released = False
        self.root: RootSpec | None = None
        """Of a lease that another process made and this one found again: what its slot was made from, if known."""
        self._book = book
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
        """Do something to the slot (see the action), keeping the lease, but for a pause, which ends it.

        Raises the lease's own error when it has ended (see :meth:`wait_lost`); ConnectionLostError when the container
        did not answer in time (the lease stays valid); CheckpointError when there is no room for the files;
        SandboxUnavailableError when a network cannot be had (then the slot has none).
        """
        if self.lost is not None:
            raise self.lost
        return await self._book.act(self, action)

    async def release(self) -> None:
        """Return the slot. Waits until the container has reset it or is gone, at most the pool's
        ``reset_timeout_s``. May be repeated.

        Cancelling this stops the waiting, not the release.
        """
        await self._book.release(self)

    def leave(self) -> None:
        """Hold it no longer, without a release: the slot stays as it is until the lease's time to live has passed."""
        self._book.leave(self)

    def end(self, error: AgentEnvError) -> None:
        """Called by the book when the slot is lost."""
        self.lost = error
        self._ended.set()

    @property
    def name(self) -> str:
        """As a farm names it (:data:`agentenv.wire.farm.LeaseId`)."""
        return f"{self.container.id}/{self.key.slot}/{self.key.epoch}"

    def __repr__(self) -> str:
        state = "lost" if self.lost is not None else "released" if self.released else "held"
        return f"<SlotLease {self.trajectory!r} {self.container.id}/{self.key.slot} epoch {self.key.epoch} {state}>"


class LeaseKeeper(Protocol):
    """Whose book it is: what its leases need done elsewhere."""

    def give_back(self, lease: SlotLease) -> asyncio.Task[None] | None:
        """A lease was released: have its slot reset. The task that does that; None if there is nothing to wait for."""

    def left(self, lease: SlotLease) -> None:
        """A lease is held no longer: renew it no longer."""

    def refused(self, lease: SlotLease, error: AgentEnvError) -> None:
        """A held lease's container no longer knows it: have it lost (:meth:`LeaseBook.lose`)."""


class LeaseBook:
    """The leases that are held: each until it is released or lost, whichever is first."""

    def __init__(self, keeper: LeaseKeeper, tally: Tally, reset_timeout_s: float) -> None:
        """``reset_timeout_s``: how long a release waits for the slot's reset."""
        self._keeper = keeper
        self._tally = tally
        self._reset_timeout_s = reset_timeout_s
        self._held: dict[int, SlotLease] = {}
        self._resets: dict[int, asyncio.Task[None]] = {}

    def __iter__(self) -> Iterator[SlotLease]:
        return iter(list(self._held.values()))

    def get(self, lease_id: int) -> SlotLease | None:
        """The lease; None if it is not held (any more)."""
        return self._held.get(lease_id)

    def hold(
        self,
        lease_id: int,
        trajectory: str,
        key: LeaseKey,
        link: ContainerLink,
        container: ContainerHandle | None = None,
    ) -> SlotLease:
        """A lease that was granted. ``container``: see :class:`SlotLease`, by default the link's."""
        lease = self._held[lease_id] = SlotLease(lease_id, trajectory, key, link, container or link.handle, self)
        self._tally.granted += 1
        return lease

    def lose(self, lease_id: int, error: AgentEnvError) -> None:
        """It has ended, and its trajectory has not released it. No effect on one that is not held."""
        lease = self._held.pop(lease_id, None)
        if lease is not None:
            self._tally.lost += 1
            self._tally.faults[error.code] += 1
            lease.end(error)

    def give_back(self, lease: SlotLease) -> None:
        """Release it, without waiting. May be repeated."""
        if self._held.pop(lease.id, None) is None:
            return
        lease.released = True
        self._tally.released += 1
        if (reset := self._keeper.give_back(lease)) is not None:
            self._resets[lease.id] = reset
            reset.add_done_callback(lambda _: self._resets.pop(lease.id, None))

    def leave(self, lease: SlotLease) -> None:
        """For :meth:`SlotLease.leave`. May be repeated."""
        if self._held.pop(lease.id, None) is not None:
            lease.released = True
            self._keeper.left(lease)

    async def release(self, lease: SlotLease) -> None:
        """For :meth:`SlotLease.release`."""
        self.give_back(lease)
        reset = self._resets.get(lease.id)
        if reset is not None and lease.lost is None:
            # Cancelling wait() leaves the task alone. A slow reset is the pool's problem, not the rollout's.
            await asyncio.wait({reset}, timeout=self._reset_timeout_s)

    async def act(self, lease: SlotLease, action: LeaseAction) -> ActionReply:
        """For :meth:`SlotLease.act`."""
        if lease.id not in self._held:
            raise StaleLeaseError(f"{lease!r} can no longer be used")
        if isinstance(action, PauseSlot):  # that the lease ends meanwhile is what is asked for: the reply says how
            return await lease.link.control.act(lease.key, action)
        try:
            return await unless_lost(lease.link.control.act(lease.key, action), lease.wait_lost())
        except (LeaseLostError, SlotDestroyedError) as error:
            if lease.id in self._held:
                self._keeper.refused(lease, error)
            raise

    def close(self) -> None:
        """Give back what is held; its holders get LeaseLostError."""
        for lease in self:
            self.give_back(lease)
            lease.end(LeaseLostError(f"the pool was closed while {lease.trajectory!r} held its slot"))


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
