"""Leases slots to trajectories of this process."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from agentenv.background import finish
from agentenv.config import PoolSettings
from agentenv.deadlines import scaled
from agentenv.errors import AgentEnvError, PoolClosedError
from agentenv.slots.backends.base import ContainerBackend, StartFailed
from agentenv.slots.commands import Expire, HandOver
from agentenv.slots.container_link import ContainerLink
from agentenv.slots.container_manager import ContainerManager
from agentenv.slots.lease import LeaseBook, Leases, SlotLease
from agentenv.slots.pool_errors import check_arguments, check_group, timeout_error, unavailable_error
from agentenv.slots.records import LeaseRecord
from agentenv.slots.statistics import PoolStatistics
from agentenv.wire.leases import SlotRequest

_CLOSE_GRACE_S = scaled(5.0)
"""Time for containers to answer releases while closing; leases expire there anyway."""


@dataclass(eq=False)
class _Waiting:
    """Who waits for so many slots, and the leases of them so far."""

    slots: int
    granted: asyncio.Future[list[SlotLease]]
    leases: list[SlotLease] = field(default_factory=list)


class SlotPool(Leases):
    """Leases slots of a farm of containers, first come, first served.

    An async context manager that opens, scales and closes the backend it is given. One event loop. ``clock`` gives
    monotonic seconds; the pool's timers use the event loop's clock. ``guest``: a farm service may control the
    containers, and slots are leased beside it, past its queue: for operators.
    """

    def __init__(
        self,
        backend: ContainerBackend,
        settings: PoolSettings | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        guest: bool = False,
    ) -> None:
        self._settings = settings or PoolSettings()
        self._clock = clock
        link = functools.partial(ContainerLink, guest=True) if guest else ContainerLink
        self._manager = ContainerManager(backend, self._settings, self, clock=clock, link=link)
        self._waiting: dict[int, _Waiting] = {}
        self._leases = LeaseBook(self, self._manager.tally, self._settings.reset_timeout_s)
        self._closing: asyncio.Task[None] | None = None

    # -- opening and closing ------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        if self._manager.opened or self._closing is not None:
            raise PoolClosedError("a SlotPool can be opened only once", next_step="make a new one")
        try:
            await self._manager.open()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End every waiter and lease, release the slots, close the backend. May be repeated.

        Completes even when cancelled. Waiters get PoolClosedError, leases end as lost.
        """
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(), name="pool close")
        await finish(self._closing)

    async def _close(self) -> None:
        self._manager.stop_events()
        tickets, commands = self._manager.ledger.dismiss_waiters(self._clock())
        for ticket in tickets:
            self.fail(ticket, PoolClosedError("the pool was closed while waiting for a slot"))
        self._manager.perform(commands)
        self._leases.close()
        await self._manager.close(_CLOSE_GRACE_S)

    def _check_open(self) -> None:
        if not self._manager.opened or self._closing is not None:
            raise PoolClosedError("the pool is not open", next_step="use it inside `async with SlotPool(...)`")

    # -- leasing ------------------------------------------------------------------------------

    async def lease_slots(self, request: SlotRequest, *, timeout_s: float | None = None) -> list[SlotLease]:
        """See :class:`Leases`. ``timeout_s`` is ``acquire_timeout_s`` by default."""
        trajectories = request.trajectories
        self._check_open()
        for trajectory in trajectories:
            check_arguments(trajectory, timeout_s)
        check_group(trajectories, self._settings.max_containers * self._manager.slots_per_container)
        if (failed := self._manager.hopeless()) is not None:
            raise unavailable_error(failed)
        began = self._clock()
        deadline = began + (self._settings.acquire_timeout_s if timeout_s is None else timeout_s)
        ticket, commands = self._manager.ledger.enqueue(request, began, deadline)
        waiting = _Waiting(len(trajectories), asyncio.get_running_loop().create_future())
        self._waiting[ticket] = waiting
        self._manager.perform(commands)
        self._manager.wake()
        try:
            leases = await waiting.granted
        except asyncio.CancelledError:
            for lease in waiting.leases:  # handed over at the very moment of the cancellation
                self._leases.give_back(lease)
            self._manager.perform(self._manager.ledger.withdraw(ticket, self._clock()))
            raise
        finally:
            self._waiting.pop(ticket, None)
        self._manager.tally.waits.add(self._clock() - began)
        return leases

    def give_back(self, lease: SlotLease) -> asyncio.Task[None] | None:
        """See :class:`agentenv.slots.lease.LeaseKeeper`."""
        self._manager.perform(self._manager.ledger.release(lease.id, self._clock()))
        return self._manager.returning(lease.id)

    def left(self, lease: SlotLease) -> None:
        """See :class:`agentenv.slots.lease.LeaseKeeper`."""
        self.give_back(lease)  # nobody else could find it again

    def refused(self, lease: SlotLease, error: AgentEnvError) -> None:
        """See :class:`agentenv.slots.lease.LeaseKeeper`."""
        self._manager.refused(lease.id, error)

    # -- the sink of grants ----------------------------------------------------------------------

    def hand_over(self, granted: HandOver, link: ContainerLink) -> None:
        """See :class:`agentenv.slots.container_manager.GrantSink`."""
        lease = self._leases.hold(granted.lease, granted.trajectory, link.key(granted.lease), link)
        waiting = self._waiting.get(granted.ticket)
        if waiting is None or waiting.granted.done():
            self._leases.give_back(lease)
            return
        waiting.leases.append(lease)
        if len(waiting.leases) == waiting.slots:  # the leases of a group come in one go
            waiting.granted.set_result(waiting.leases)

    def expire(self, expired: Sequence[Expire]) -> None:
        """See :class:`agentenv.slots.container_manager.GrantSink`."""
        now = self.statistics()  # computed once: thousands may expire together
        for each in expired:
            self.fail(each.ticket, timeout_error(each, now, self._manager.start_failed))

    def fail(self, ticket: int, error: AgentEnvError) -> None:
        """See :class:`agentenv.slots.container_manager.GrantSink`."""
        waiting = self._waiting.get(ticket)
        if waiting is not None and not waiting.granted.done():
            self._manager.count(error)
            waiting.granted.set_exception(error)

    def lease_ended(self, lease: LeaseRecord, error: AgentEnvError) -> None:
        """See :class:`agentenv.slots.container_manager.GrantSink`."""
        self._leases.lose(lease.id, error)

    def unavailable(self, failed: StartFailed) -> AgentEnvError:
        """See :class:`agentenv.slots.container_manager.GrantSink`."""
        return unavailable_error(failed)

    # -- views --------------------------------------------------------------------------------

    def statistics(self) -> PoolStatistics:
        """A snapshot of the pool."""
        return self._manager.statistics()

    def __repr__(self) -> str:
        if self._closing is not None:
            return "<SlotPool closed>"
        return f"<SlotPool {self.statistics()}>"
