"""A trajectory's right to one slot, as its holder sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Final, Protocol, Self, TypeVar

from agentenv.containers.control import ContainerControl
from agentenv.containers.handle import ContainerHandle
from agentenv.deadlines import scaled
from agentenv.errors import AgentEnvError
from agentenv.wire.leases import LeaseKey
from agentenv.wire.network import NetworkPolicy

T = TypeVar("T")
_RECREATED_S: Final = scaled(75.0)
"""For what makes a slot anew: longer than the sandbox server itself waits (its ``SEAL_S``), so that its answer arrives
before this side gives up the connection."""


class LeaseOwner(Protocol):
    """The pool, as far as a lease needs it."""

    async def ask_container(self, lease: SlotLease, ask: Callable[[ContainerControl], Coroutine[Any, Any, T]]) -> T:
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

    async def seal(self) -> None:
        """Kill everything running in the slot, keeping workspace and lease.

        Raises the lease's own error when it has ended (see :meth:`wait_lost`), ConnectionLostError when the
        container did not answer in time (the lease stays valid).
        """
        await self._ask(lambda control: control.seal(self.key, timeout_s=_RECREATED_S))

    async def checkpoint(self) -> str:
        """Keep the slot's files, and no process: everything running in it is killed. The checkpoint's name is good for
        :meth:`restore`, and for leases of the same container whose root names it.

        Raises as :meth:`seal`, and CheckpointError when there is no room for the files.
        """
        return await self._ask(lambda control: control.checkpoint(self.key, timeout_s=_RECREATED_S))

    async def restore(self, checkpoint: str) -> None:
        """Give the slot the files of a checkpoint of its container in place of its own, and no process: everything
        running in it is killed. Raises as :meth:`checkpoint`; when there is no such checkpoint the lease is lost."""
        await self._ask(lambda control: control.restore(self.key, checkpoint, timeout_s=_RECREATED_S))

    async def drop(self, checkpoint: str) -> None:
        """Forget a checkpoint of the slot's container. Slots that began with it keep its files. Raises as
        :meth:`seal`."""
        await self._ask(lambda control: control.drop(self.key, checkpoint))

    async def set_network(self, network: NetworkPolicy) -> None:
        """Change what an image slot may reach; its processes go on. Raises as :meth:`seal`, and
        SandboxUnavailableError when it cannot be had: then the slot has no network."""
        await self._ask(lambda control: control.set_network(self.key, network, timeout_s=_RECREATED_S))

    async def _ask(self, ask: Callable[[ContainerControl], Coroutine[Any, Any, T]]) -> T:
        if self.lost is not None:
            raise self.lost
        return await self._landlord.ask_container(self, ask)

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
