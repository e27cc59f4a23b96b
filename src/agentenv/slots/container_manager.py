"""Keeps the containers of a pool or a farm: carries out the decisions of the ledger and of the scale policy.

Its *sink* hands the slots to trajectories: a :class:`agentenv.slots.pool.SlotPool` to futures of its own process, a
farm service to its clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import statistics
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Protocol

import aiohttp

from agentenv.background import TaskSet, report_failure
from agentenv.config import PoolSettings
from agentenv.containers.connection import open_session
from agentenv.containers.handle import ContainerHandle
from agentenv.errors import (
    AgentEnvError,
    BadImageError,
    CheckpointError,
    ConfigError,
    ConnectionLostError,
    ImageUnavailableError,
    InfraError,
    SandboxUnavailableError,
    StaleLeaseError,
)
from agentenv.image_placement.placement import DEFAULT_COPIES
from agentenv.slots.backends.base import (
    ContainerBackend,
    ContainerDraining,
    ContainerEvent,
    ContainerGone,
    ContainerStarted,
    StartFailed,
)
from agentenv.slots.commands import Command, EndLease, Expire, Fail, Fetch, Grant, HandOver, Reclaim, Retire
from agentenv.slots.container_link import ContainerLink, Ended, Liveness, RequestLimits
from agentenv.slots.ledger import Ledger
from agentenv.slots.queue_policy import QueuePolicy
from agentenv.slots.records import Holder, LeaseRecord, holder_of
from agentenv.slots.scaler import Scaler
from agentenv.slots.statistics import PoolStatistics, Tally
from agentenv.wire.leases import SlotReport
from agentenv.wire.states import SlotState

logger = logging.getLogger(__name__)

_UPKEEP_MIN_S, _UPKEEP_MAX_S = 0.01, 1.0
"""Interval between checks of deadlines and scaling: a burst of events is handled at once."""
_LINGER_S = 1.0
"""How long a container that is retired goes on: long enough for an answer that is under way."""
_HEARTBEAT = "heartbeat"
_STARTS_KEPT = 32
_MOST_REFUSALS = 4
"""How often a request may be granted a slot whose node turns out not to have its image."""


class GrantSink(Protocol):
    """Hands slots on to those who asked for them. Nothing here waits or raises."""

    def hand_over(self, granted: HandOver, link: ContainerLink) -> None:
        """A waiter has this lease; its key is at the link."""

    def fail(self, ticket: int, error: AgentEnvError) -> None:
        """A waiter gets no slot."""

    def expire(self, expired: Sequence[Expire]) -> None:
        """The deadline of these waiters has passed."""

    def lease_ended(self, lease: LeaseRecord, error: AgentEnvError) -> None:
        """A lease has ended that its holder has not released."""

    def unavailable(self, failed: StartFailed) -> AgentEnvError:
        """The error for every waiter when no container can ever serve."""


class ImageStores(Protocol):
    """The image stores of a farm's nodes."""

    def follow(
        self, handle: ContainerHandle, images: Callable[[str, Iterable[str]], None]
    ) -> Coroutine[Any, Any, None]:
        """Follow the store of a container's node until cancelled: ``images`` is told the node and all it has, whenever
        that has changed. Never raises."""

    async def fetch(self, node: str, image: str) -> None:
        """Have a node fetch an image. Raises AgentEnvError."""

    def problem(self, image: str) -> str:
        """What failed last in a fetch of the image that goes on; empty: nothing."""


class ContainerManager:
    """The containers, and the ledger of their slots. One event loop."""

    def __init__(
        self,
        backend: ContainerBackend,
        settings: PoolSettings,
        sink: GrantSink,
        *,
        clock: Callable[[], float],
        queue_policy: QueuePolicy | None = None,
        link: Callable[..., ContainerLink] = ContainerLink,
        stores: ImageStores | None = None,
        copies_per_image: int = DEFAULT_COPIES,
    ) -> None:
        """``clock`` gives monotonic seconds; timers use the event loop's. ``link`` makes the link to a container.
        ``stores``: of the nodes; without them whoever asks for slots has seen to it that its image is there.
        ``copies_per_image``: see :class:`agentenv.image_placement.placement.Placement`."""
        self.settings = settings
        self.ledger = Ledger(queue_policy, copies_per_image=copies_per_image)
        self._stores = stores
        self.tally = Tally()
        self.links: dict[str, ContainerLink] = {}
        self.start_failed: StartFailed | None = None
        """Why the last container did not start; None once another has started."""
        self._backend = backend
        self._sink = sink
        self._clock = clock
        self._make_link = link
        self._scaler = Scaler(backend, settings, clock())
        self._request_limits = RequestLimits()
        self._tasks = TaskSet()
        """By container: its heartbeat, and the requests that are under way to it."""
        self._following = TaskSet()
        """By node: who follows its image store, and the fetches that are under way."""
        self._reclaiming: dict[int, asyncio.Task[None]] = {}
        self._wake = asyncio.Event()
        self._upkeep: list[asyncio.Task[None]] = []
        self._replacing = TaskSet()
        self._session: aiohttp.ClientSession | None = None
        self._closing = False
        self._missing_since: float | None = None
        """Since when there have been fewer containers than wanted."""
        self._starts_s: deque[float] = deque(maxlen=_STARTS_KEPT)

    # -- opening and closing ------------------------------------------------------------------

    @property
    def opened(self) -> bool:
        """Whether it was opened before."""
        return self._session is not None

    async def open(self) -> None:
        """Open the backend and begin. Raises AgentEnvError; then it has to be closed all the same."""
        self._session = open_session()
        await self._backend.__aenter__()
        self._upkeep = [
            asyncio.create_task(self._read_events(), name="pool events"),
            asyncio.create_task(self._keep_up(), name="pool upkeep"),
        ]
        for task in self._upkeep:
            task.add_done_callback(report_failure)
        await self._scaler.start(self._clock())

    def stop_events(self) -> None:
        """Closing has begun: containers that appear from now on are not used."""
        self._closing = True

    async def close(self, grace_s: float) -> None:
        """Wait for requests that are under way, at most ``grace_s``; then close the backend."""
        self.stop_events()
        until = self._clock() + grace_s
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
            await self._following.aclose()
            await self._replacing.aclose()
            if self._session is not None:
                await self._session.close()

    def _unfinished(self) -> set[asyncio.Task[None]]:
        return {task for task in self._tasks if not task.get_name().startswith(_HEARTBEAT)}

    # -- performing ---------------------------------------------------------------------------

    def wake(self) -> None:
        """Something changed: decide again about deadlines and scaling."""
        self._wake.set()

    def perform(self, commands: Iterable[Command]) -> None:
        """Carry out the ledger's commands. Never waits: what takes time becomes a task."""
        expired: list[Expire] = []
        for command in commands:
            match command:
                case Grant():
                    self._tasks.start(command.container, self._request_lease(command), "lease")
                case HandOver():
                    self._sink.hand_over(command, self.links[command.container])
                case Expire():
                    expired.append(command)
                case Fail():
                    self.count(command.error)
                    self._sink.fail(command.ticket, command.error)
                case EndLease():
                    self._sink.lease_ended(command.record, command.error)
                case Reclaim():
                    self._start_reclaim(command)
                case Retire():
                    self._replacing.start(command.container, self._retire(command), "retirement")
                case Fetch():
                    self._following.start(command.node, self._fetch(command), "fetch")
        if expired:
            self._sink.expire(expired)

    def returning(self, lease: int) -> asyncio.Task[None] | None:
        """The task that has the slot of this lease reset; None if there is none."""
        return self._reclaiming.get(lease)

    def refused(self, lease: int, error: AgentEnvError) -> None:
        """The container of a lease has answered its holder with this: it has ended."""
        why = None if isinstance(error, StaleLeaseError) else error
        self.perform(self.ledger.stale(lease, self._clock(), why))

    def count(self, error: AgentEnvError) -> None:
        """Count an error by its code."""
        self.tally.faults[error.code] += 1

    async def _request_lease(self, grant: Grant) -> None:
        link = self.links[grant.container]
        try:
            epoch = await link.lease(grant)
        except (
            BadImageError,
            CheckpointError,
            ImageUnavailableError,
        ) as error:  # another slot could not have that root either
            self.count(error)
            if not isinstance(error, ImageUnavailableError) or not self._fetch_again(grant, error):
                self._refuse_for_good(grant, error)
        except AgentEnvError as error:
            self.count(error)
            if error.code == ConfigError.code:  # no slot of such containers can have the root: waiting cannot help
                self._refuse_for_good(grant, error)
                return
            if isinstance(error, ConnectionLostError):
                self.ledger.suspect(grant.container)
                link.hurry()
            elif isinstance(error, SandboxUnavailableError):
                self.ledger.drain(grant.container)
            self.perform(self.ledger.refuse(grant.lease, self._clock()))
        except Exception as error:
            # A bug of ours, or a request that cannot be encoded: every other slot would fail the same way.
            logger.exception("slot %d of %s could not be requested", grant.slot, grant.container)
            self._refuse_for_good(
                grant, InfraError(f"the lease of {grant.trajectory!r} could not be requested: {error!r}")
            )
        else:
            self.perform(self.ledger.confirm(grant.lease, self._clock(), epoch))
            if (report := link.latest(grant.slot)) is not None:  # it may have come before the answer
                self._reported(grant.container, report)

    def _fetch_again(self, grant: Grant, error: ImageUnavailableError) -> bool:
        """The image is not where it was seen: another node, or this one again, is to have it. False where nobody can
        be asked for that, or it has happened too often."""
        ticket = self.ledger.ticket_of(grant.lease)
        waiter = None if ticket is None else self.ledger.waiter(ticket)
        node = self.links[grant.container].handle.node
        if self._stores is None or not node or grant.root is None or waiter is None:
            return False
        waiter.refused += 1
        if waiter.refused > _MOST_REFUSALS:
            return False
        self.perform(self.ledger.fetch_failed(node, grant.root.image, error, self._clock()))
        self.perform(self.ledger.refuse(grant.lease, self._clock()))
        return True

    async def _fetch(self, fetch: Fetch) -> None:
        assert self._stores is not None, "only containers whose node is known have images fetched"
        try:
            await self._stores.fetch(fetch.node, fetch.image)
        except AgentEnvError as error:
            self.count(error)
            self.perform(self.ledger.fetch_failed(fetch.node, fetch.image, error, self._clock()))
        else:
            self.perform(self.ledger.fetched(fetch.node, fetch.image, self._clock()))
        self._wake.set()

    def _refuse_for_good(self, grant: Grant, error: AgentEnvError) -> None:
        # The waiter leaves first: put back in the queue, it would have another slot asked for the same.
        if (ticket := self.ledger.ticket_of(grant.lease)) is not None:
            self._sink.fail(ticket, error)
            self.perform(self.ledger.withdraw(ticket, self._clock()))
        self.perform(self.ledger.refuse(grant.lease, self._clock()))

    def _start_reclaim(self, command: Reclaim) -> None:
        task = self._tasks.start(command.container, self._reclaim(command), "reclaim")
        if (lease := command.lease) is not None:
            self._reclaiming[lease] = task
            task.add_done_callback(lambda _: self._reclaiming.pop(lease, None))

    async def _reclaim(self, command: Reclaim) -> None:
        began = self._clock()
        container, slot = command.container, command.slot
        reason = f"the reset of slot {slot} takes longer than {self.settings.reset_timeout_s:g} s"
        late = functools.partial(self._stuck, container, reason)
        found = await self.links[container].reclaim(command, late)
        self.tally.resets.add(self._clock() - began)
        if isinstance(found, Holder):
            self.perform(self.ledger.taken(container, slot, found, self._clock()))
            return
        done = self.ledger.freed if found is SlotState.free else self.ledger.quarantined
        self.perform(done(container, slot, self._clock()))

    def _stuck(self, container: str, reason: str) -> None:
        self.perform(self.ledger.stuck(container, reason))

    def retire(self, container: str, reason: str) -> None:
        """No new leases on it; it is replaced when its last lease has ended. May be repeated."""
        self.perform(self.ledger.retire(container, reason))

    def end_at_renewal(self, lease: LeaseRecord, why: AgentEnvError) -> None:
        """The lease is not to be renewed any more: its holder gets ``why`` instead."""
        link = self.links.get(lease.container)
        if link is not None and lease.epoch is not None:
            self._tasks.start(lease.container, link.end_at_renewal(lease.slot, lease.epoch, why), "end at renewal")

    # -- containers ---------------------------------------------------------------------------

    async def _read_events(self) -> None:
        async for event in self._backend.events():
            if not self._closing or isinstance(event, ContainerGone):
                try:
                    self._on_event(event)
                except Exception:  # the next event must be processed whatever happened with this one
                    logger.exception("an event of the backend could not be processed: %r", event)
                self._wake.set()

    def _on_event(self, event: ContainerEvent) -> None:
        match event:
            case ContainerStarted(handle):
                self._container_started(handle)
            case ContainerDraining(container):
                self.ledger.drain(container)
            case ContainerGone(container, reason):
                self._lose(container, reason)
            case StartFailed():
                logger.warning("a container did not start: %s", event.reason)
                self.tally.faults["start_failed"] += 1
                self.start_failed = event
        if (failed := self.hopeless()) is not None:
            tickets, commands = self.ledger.dismiss_waiters(self._clock())
            for ticket in tickets:
                self._sink.fail(ticket, self._sink.unavailable(failed))
            self.perform(commands)

    def _container_started(self, handle: ContainerHandle) -> None:
        self.start_failed = None
        self._scaler.slots_per_container = handle.slots
        if self._missing_since is not None:
            self._starts_s.append(self._clock() - self._missing_since)
        link = self._make_link(
            handle,
            self._session,
            self.settings,
            self._request_limits,
            self._clock,
            generation=self._backend.generation,
        )
        self.links[handle.id] = link
        node = handle.node if self._stores is not None else ""
        self.ledger.started(handle.id, handle.index, node)
        self._tasks.start(handle.id, self._attend(link), _HEARTBEAT)
        if self._stores is not None and node:
            self._tasks.start(handle.id, self._stores.follow(handle, self._has_images), _HEARTBEAT)

    def _has_images(self, node: str, images: Iterable[str]) -> None:
        self.perform(self.ledger.images(node, images, self._clock()))

    def stored(self, node: str, image: str) -> None:
        """A node has this image now."""
        self.perform(self.ledger.fetched(node, image, self._clock()))

    def image_problem(self, image: str) -> str:
        """Why an image that is being fetched is not there yet; empty: nothing has failed."""
        return "" if self._stores is None else self._stores.problem(image)

    def prefetch(self, images: Iterable[str]) -> None:
        """These images are wanted soon."""
        self.perform(self.ledger.prefetch(images, self._clock()))

    def want_node(self) -> None:
        """A node is needed soon, to fetch an image: until it is idle there should be a container."""
        self._scaler.want_one(self._clock() + self.settings.start_timeout_s)
        self._wake.set()

    def hopeless(self) -> StartFailed | None:
        """Why no container can ever serve; None while there is hope."""
        failed = self.start_failed
        return failed if failed is not None and failed.permanent and not self.links else None

    async def _attend(self, link: ContainerLink) -> None:
        """Read the inventory, then follow the container until its end."""
        container = link.handle.id
        try:
            states, holders = await link.inventory()
        except AgentEnvError as error:
            self.count(error)
            self._give_up(container, f"its slots could not be listed: {error}")
            return
        self.perform(self.ledger.inventory(container, states, self._clock(), holders))
        link.listed = True
        try:
            await link.keep_in_touch(
                lambda ended: self._heard(container, ended),
                lambda liveness: self._silent(container, liveness),
                lambda report: self._reported(container, report),
            )
        except Exception as error:  # nobody would renew its leases any more
            logger.exception("the heartbeat of %s failed", container)
            self._give_up(container, f"its heartbeat failed: {error!r}")

    def _heard(self, container: str, ended: Ended) -> None:
        now = self._clock()
        for lease, why in ended.items():
            self.perform(self.ledger.stale(lease, now, why))
        self.perform(self.ledger.recovered(container, now))
        link = self.links.get(container)
        if link is not None and link.supervisor_silent_s > self.settings.reset_timeout_s:
            self._stuck(container, f"its supervisor has not responded for {link.supervisor_silent_s:.0f} s")

    def _reported(self, container: str, report: SlotReport) -> None:
        holder = holder_of(report)
        now = self._clock()
        self.perform(self.ledger.reported(container, report.slot, report.state, report.epoch, holder, now))

    def _silent(self, container: str, liveness: Liveness) -> None:
        if liveness is Liveness.gone:
            self._give_up(container, f"it has not responded for {self.settings.gone_after_s:g} s")
        else:
            self.ledger.suspect(container)

    async def _retire(self, command: Retire) -> None:
        """Replace a container without leases, once those who have just released one were answered by it."""
        await asyncio.sleep(_LINGER_S)
        if command.container in self.links:
            self._give_up(command.container, command.reason)

    def _give_up(self, container: str, reason: str) -> None:
        """Replace a container: its leases end, the backend starts another."""
        logger.warning("container %s is replaced: %s", container, reason)
        self._lose(container, reason)
        self._replacing.start(container, self._backend.replace(container, reason), "replacement")

    def _lose(self, container: str, reason: str) -> None:
        self._drop(container)
        self.perform(self.ledger.lose(container, reason, self._clock()))

    def _drop(self, container: str) -> None:
        self.links.pop(container, None)
        self._tasks.cancel(container)

    # -- upkeep -------------------------------------------------------------------------------

    async def _keep_up(self) -> None:
        while True:
            self._wake.clear()
            try:
                self.perform(self.ledger.tick(self._clock()))
                await self._scaler.follow(self.ledger, self._clock())
                self._note_missing()
            except AgentEnvError:
                pass  # logged there, retried in the next round
            except Exception:  # without this task no waiter's deadline would pass
                logger.exception("a round of the pool's upkeep failed")
                await asyncio.sleep(_UPKEEP_MAX_S)
            await asyncio.sleep(_UPKEEP_MIN_S)
            due = self.ledger.next_deadline()
            left_s = _UPKEEP_MAX_S if due is None else min(_UPKEEP_MAX_S, due - self._clock())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, left_s)):
                    await self._wake.wait()

    def _note_missing(self) -> None:
        if len(self.links) >= self.goal:
            self._missing_since = None
        elif self._missing_since is None:
            self._missing_since = self._clock()

    # -- views --------------------------------------------------------------------------------

    @property
    def goal(self) -> int:
        """How many containers are wanted now."""
        return self._scaler.goal

    @property
    def slots_per_container(self) -> int:
        """As the last container had; before the first, a large number."""
        return self._scaler.slots_per_container

    @property
    def start_s(self) -> float | None:
        """Median time from wanting another container until it ran, of the last starts; None before the first."""
        return statistics.median(self._starts_s) if self._starts_s else None

    def statistics(self) -> PoolStatistics:
        """A snapshot."""
        return self.tally.statistics(self.ledger, self._scaler.goal, self.settings.max_containers)
