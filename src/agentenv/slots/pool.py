"""Leases slots to trajectories: carries out the decisions of the ledger and of the scale policy."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self

import aiohttp

from agentenv.config import PoolSettings
from agentenv.containers.control import ContainerControl
from agentenv.containers.http import open_session
from agentenv.errors import (
    AgentEnvError,
    ConnectionLostError,
    InfraError,
    LeaseLostError,
    PoolClosedError,
    SandboxUnavailableError,
    SlotDestroyedError,
    StaleLeaseError,
)
from agentenv.slots.backends.base import (
    ContainerBackend,
    ContainerDraining,
    ContainerEvent,
    ContainerGone,
    ContainerStarted,
    StartFailed,
)
from agentenv.slots.container_link import ContainerLink, Liveness, RequestLimits, Stale
from agentenv.slots.lease import SlotLease
from agentenv.slots.ledger import Command, EndLease, Expire, Grant, HandOver, Ledger, Reclaim, Retire
from agentenv.slots.pool_errors import check_arguments, timeout_error, unavailable_error
from agentenv.slots.scaler import Scaler
from agentenv.slots.statistics import PoolStatistics, Tally
from agentenv.tasks import TaskSet, finish, report_failure, unless_lost
from agentenv.wire.states import SlotState

logger = logging.getLogger(__name__)

_CLOSE_GRACE_S = 5.0
"""Time for containers to answer releases while closing; leases expire there anyway."""
_SEAL_TIMEOUT_S = 75.0
"""Longer than the sandbox server itself waits (its ``SEAL_S``), so that its answer arrives before this side gives
up the connection."""
_UPKEEP_MIN_S, _UPKEEP_MAX_S = 0.01, 1.0
"""Interval between checks of deadlines and scaling: a burst of events is handled at once."""
_HEARTBEAT = "heartbeat"


class SlotPool:
    """Leases slots of a farm of containers, first come, first served.

    An async context manager that opens, scales and closes the backend it is given. One event loop. ``clock`` gives
    monotonic seconds; the pool's timers use the event loop's clock.
    """

    def __init__(
        self,
        backend: ContainerBackend,
        settings: PoolSettings | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._backend = backend
        self._settings = settings or PoolSettings()
        self._clock = clock
        self._ledger = Ledger()
        self._scaler = Scaler(backend, self._settings, clock())
        self._request_limits = RequestLimits()
        self._links: dict[str, ContainerLink] = {}
        self._tasks = TaskSet()
        """By container: its heartbeat, and the requests that are under way to it."""
        self._waiting: dict[int, asyncio.Future[SlotLease]] = {}
        self._held: dict[int, SlotLease] = {}
        self._reclaiming: dict[int, asyncio.Task[None]] = {}
        self._start_failed: StartFailed | None = None
        self._tally = Tally()
        self._wake = asyncio.Event()
        self._upkeep: list[asyncio.Task[None]] = []
        self._replacing = TaskSet()
        self._session: aiohttp.ClientSession | None = None
        self._closing: asyncio.Task[None] | None = None

    # -- opening and closing ------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        if self._session is not None or self._closing is not None:
            raise PoolClosedError("a SlotPool can be opened only once", next_step="make a new one")
        self._session = open_session()
        try:
            await self._backend.__aenter__()
            self._upkeep = [
                asyncio.create_task(self._read_events(), name="pool events"),
                asyncio.create_task(self._keep_up(), name="pool upkeep"),
            ]
            for task in self._upkeep:
                task.add_done_callback(report_failure)
            await self._scaler.start()
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
        for ticket in self._ledger.dismiss_waiters():
            self._fail(ticket, PoolClosedError("the pool was closed while waiting for a slot"))
        for lease in list(self._held.values()):
            self._give_back(lease)
            lease.end(LeaseLostError(f"the pool was closed while {lease.trajectory!r} held its slot"))
        until = self._clock() + _CLOSE_GRACE_S
        while (unfinished := self._unfinished()) and (left_s := until - self._clock()) > 0:
            await asyncio.wait(unfinished, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        for container in self._tasks.keys:
            self._drop(container)
        try:
            await self._backend.__aexit__(None, None, None)
        finally:
            for task in self._upkeep:
                task.cancel()
            await asyncio.gather(*self._upkeep, return_exceptions=True)
            await self._tasks.aclose()
            await self._replacing.aclose()
            if self._session is not None:
                await self._session.close()

    def _unfinished(self) -> set[asyncio.Task[None]]:
        return {task for task in self._tasks if not task.get_name().startswith(_HEARTBEAT)}

    def _check_open(self) -> None:
        if self._session is None or self._closing is not None:
            raise PoolClosedError("the pool is not open", next_step="use it inside `async with SlotPool(...)`")

    # -- leasing ------------------------------------------------------------------------------

    async def lease(self, trajectory: str, *, timeout_s: float | None = None) -> SlotLease:
        """Lease a slot, first come, first served. Release it, or use it as a context manager.

        ``timeout_s`` (``acquire_timeout_s`` by default) covers the whole wait. Raises AcquireTimeoutError when it
        passes, SandboxUnavailableError as soon as no container can ever serve, PoolClosedError, ConfigError for
        arguments out of range. Cancelling this never leaks a slot.
        """
        self._check_open()
        check_arguments(trajectory, timeout_s)
        if (failed := self._hopeless()) is not None:
            raise unavailable_error(failed)
        began = self._clock()
        deadline = began + (self._settings.acquire_timeout_s if timeout_s is None else timeout_s)
        ticket, commands = self._ledger.enqueue(trajectory, began, deadline)
        future: asyncio.Future[SlotLease] = asyncio.get_running_loop().create_future()
        self._waiting[ticket] = future
        self._perform(commands)
        self._wake.set()
        try:
            lease = await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self._give_back(future.result())  # handed over at the very moment of the cancellation
            self._perform(self._ledger.withdraw(ticket, self._clock()))
            raise
        finally:
            self._waiting.pop(ticket, None)
        self._tally.waits.add(self._clock() - began)
        return lease

    async def seal_lease(self, lease: SlotLease) -> None:
        """For :meth:`SlotLease.seal`."""
        link = self._links.get(lease.container.id)
        if lease.released or link is None:
            raise StaleLeaseError(f"{lease!r} can no longer be sealed")
        try:
            await unless_lost(link.control.seal(lease.key, timeout_s=_SEAL_TIMEOUT_S), lease.wait_lost())
        except (LeaseLostError, SlotDestroyedError) as error:
            why = None if isinstance(error, StaleLeaseError) else error
            self._perform(self._ledger.stale(lease.id, self._clock(), why))
            raise

    async def release_lease(self, lease: SlotLease) -> None:
        """For :meth:`SlotLease.release`."""
        self._give_back(lease)
        returning = self._reclaiming.get(lease.id)
        if returning is not None and lease.lost is None:
            # Cancelling wait() leaves the task alone. A slow reset is the pool's problem, not the rollout's.
            await asyncio.wait({returning}, timeout=self._settings.reset_timeout_s)

    def _give_back(self, lease: SlotLease) -> None:
        if self._held.pop(lease.id, None) is not None:
            lease.released = True
            self._tally.released += 1
            self._perform(self._ledger.release(lease.id, self._clock()))

    # -- performing ---------------------------------------------------------------------------

    def _perform(self, commands: Iterable[Command]) -> None:
        """Carry out the ledger's commands. Never waits: what takes time becomes a task."""
        expired: list[Expire] = []
        for command in commands:
            match command:
                case Grant():
                    self._tasks.start(command.container, self._request_lease(command), "lease")
                case HandOver():
                    self._hand_over(command)
                case Expire():
                    expired.append(command)
                case EndLease():
                    self._end(command)
                case Reclaim():
                    self._start_reclaim(command)
                case Retire():
                    self._give_up(command.container, command.reason)
        if expired:
            now = self.statistics()  # computed once: thousands may expire together
            for command in expired:
                self._fail(command.ticket, timeout_error(command, now, self._start_failed))

    async def _request_lease(self, grant: Grant) -> None:
        link = self._links[grant.container]
        try:
            await link.lease(grant.lease, grant.slot, grant.trajectory, grant.deadline)
        except AgentEnvError as error:
            self._count(error)
            if isinstance(error, ConnectionLostError):
                self._ledger.suspect(grant.container)
                link.hurry()
            elif isinstance(error, SandboxUnavailableError):
                self._ledger.drain(grant.container)
            self._perform(self._ledger.refuse(grant.lease, self._clock()))
        except Exception as error:
            # A bug of ours, or a request that cannot be encoded: every other slot would fail the same way.
            logger.exception("slot %d of %s could not be requested", grant.slot, grant.container)
            self._refuse_for_good(
                grant, InfraError(f"the lease of {grant.trajectory!r} could not be requested: {error!r}")
            )
        else:
            self._perform(self._ledger.confirm(grant.lease, self._clock()))

    def _refuse_for_good(self, grant: Grant, error: AgentEnvError) -> None:
        ticket = self._ledger.ticket_of(grant.lease)
        self._perform(self._ledger.refuse(grant.lease, self._clock()))
        if ticket is not None:
            self._fail(ticket, error)
            self._perform(self._ledger.withdraw(ticket, self._clock()))

    def _hand_over(self, command: HandOver) -> None:
        link = self._links[command.container]
        lease = SlotLease(command.lease, command.trajectory, link.key(command.lease), link.handle, self)
        self._held[lease.id] = lease
        self._tally.granted += 1
        future = self._waiting.get(command.ticket)
        if future is None or future.done():
            self._give_back(lease)
        else:
            future.set_result(lease)

    def _fail(self, ticket: int, error: AgentEnvError) -> None:
        future = self._waiting.get(ticket)
        if future is not None and not future.done():
            self._count(error)
            future.set_exception(error)

    def _end(self, command: EndLease) -> None:
        lease = self._held.pop(command.lease, None)
        if lease is not None:
            self._tally.lost += 1
            self._count(command.error)
            lease.end(command.error)

    def _start_reclaim(self, command: Reclaim) -> None:
        task = self._tasks.start(command.container, self._reclaim(command), "reclaim")
        if (lease := command.lease) is not None:
            self._reclaiming[lease] = task
            task.add_done_callback(lambda _: self._reclaiming.pop(lease, None))

    async def _reclaim(self, command: Reclaim) -> None:
        began = self._clock()
        reason = f"the reset of slot {command.slot} takes longer than {self._settings.reset_timeout_s:g} s"
        late = functools.partial(self._stuck, command.container, reason)
        state = await self._links[command.container].reclaim(command.slot, command.lease, late)
        self._tally.resets.add(self._clock() - began)
        done = self._ledger.freed if state is SlotState.free else self._ledger.quarantined
        self._perform(done(command.container, command.slot, self._clock()))

    def _stuck(self, container: str, reason: str) -> None:
        self._perform(self._ledger.stuck(container, reason))

    def _count(self, error: AgentEnvError) -> None:
        self._tally.faults[error.code] += 1

    # -- containers ---------------------------------------------------------------------------

    async def _read_events(self) -> None:
        async for event in self._backend.events():
            if self._closing is None or isinstance(event, ContainerGone):
                try:
                    self._on_event(event)
                except Exception:  # the next event must be processed whatever happened with this one
                    logger.exception("an event of the backend could not be processed: %r", event)
                self._wake.set()

    def _on_event(self, event: ContainerEvent) -> None:
        match event:
            case ContainerStarted(handle):
                self._start_failed = None
                self._scaler.slots_per_container = handle.slots
                control = ContainerControl(handle, self._session)
                link = ContainerLink(control, self._settings, self._request_limits, self._clock)
                self._links[handle.id] = link
                self._ledger.started(handle.id, handle.index)
                self._tasks.start(handle.id, self._adopt(link), _HEARTBEAT)
            case ContainerDraining(container):
                self._ledger.drain(container)
            case ContainerGone(container, reason):
                self._lose(container, reason)
            case StartFailed():
                logger.warning("a container did not start: %s", event.reason)
                self._tally.faults["start_failed"] += 1
                self._start_failed = event
        if (failed := self._hopeless()) is not None:
            for ticket in self._ledger.dismiss_waiters():
                self._fail(ticket, unavailable_error(failed))

    def _hopeless(self) -> StartFailed | None:
        failed = self._start_failed
        return failed if failed is not None and failed.permanent and not self._links else None

    async def _adopt(self, link: ContainerLink) -> None:
        """Read the inventory, then send heartbeats until the container's end."""
        container = link.handle.id
        try:
            states = await link.inventory()
        except AgentEnvError as error:
            self._count(error)
            self._give_up(container, f"its slots could not be listed: {error}")
            return
        self._perform(self._ledger.inventory(container, states, self._clock()))
        try:
            await link.keep_in_touch(
                lambda stale: self._leases_ended(container, stale),
                lambda liveness: self._silent(container, liveness),
            )
        except Exception as error:  # nobody would renew its leases any more
            logger.exception("the heartbeat of %s failed", container)
            self._give_up(container, f"its heartbeat failed: {error!r}")

    def _leases_ended(self, container: str, stale: Stale) -> None:
        now = self._clock()
        for lease, why in stale.items():
            self._perform(self._ledger.stale(lease, now, why))
        self._perform(self._ledger.recovered(container, now))
        link = self._links.get(container)
        if link is not None and link.supervisor_silent_s > self._settings.reset_timeout_s:
            self._stuck(container, f"its supervisor has not responded for {link.supervisor_silent_s:.0f} s")

    def _silent(self, container: str, liveness: Liveness) -> None:
        if liveness is Liveness.gone:
            self._give_up(container, f"it has not responded for {self._settings.gone_after_s:g} s")
        else:
            self._ledger.suspect(container)

    def _give_up(self, container: str, reason: str) -> None:
        """Replace a container: its leases end, the backend starts another."""
        logger.warning("container %s is replaced: %s", container, reason)
        self._lose(container, reason)
        self._replacing.start(container, self._backend.replace(container, reason), "replacement")

    def _lose(self, container: str, reason: str) -> None:
        self._drop(container)
        self._perform(self._ledger.lose(container, reason, self._clock()))

    def _drop(self, container: str) -> None:
        self._links.pop(container, None)
        self._tasks.cancel(container)

    # -- upkeep -------------------------------------------------------------------------------

    async def _keep_up(self) -> None:
        while True:
            self._wake.clear()
            try:
                self._perform(self._ledger.tick(self._clock()))
                await self._scaler.follow(self._ledger, self._clock())
            except AgentEnvError:
                pass  # logged there, retried in the next round
            except Exception:  # without this task no waiter's deadline would pass
                logger.exception("a round of the pool's upkeep failed")
                await asyncio.sleep(_UPKEEP_MAX_S)
            await asyncio.sleep(_UPKEEP_MIN_S)
            due = self._ledger.next_deadline()
            left_s = _UPKEEP_MAX_S if due is None else min(_UPKEEP_MAX_S, due - self._clock())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, left_s)):
                    await self._wake.wait()

    # -- views --------------------------------------------------------------------------------

    def statistics(self) -> PoolStatistics:
        """A snapshot of the pool."""
        return self._tally.statistics(self._ledger, self._scaler.goal, self._settings.max_containers)

    def __repr__(self) -> str:
        if self._closing is not None:
            return "<SlotPool closed>"
        return f"<SlotPool {self.statistics()}>"
