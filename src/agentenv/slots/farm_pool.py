"""A pool whose slots belong to a farm service: it asks for them there, and uses them at their containers.

The farm grants; it is not needed for anything else. Leases are kept alive, sealed and released at the containers, so a
farm that is away delays new slots and nothing more.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from types import MappingProxyType, TracebackType
from typing import Final, Self

import aiohttp

from agentenv.backoff import Backoff
from agentenv.config import PoolSettings
from agentenv.containers.handle import ContainerHandle
from agentenv.containers.http import open_session
from agentenv.errors import (
    AgentEnvError,
    ConfigError,
    ConnectionLostError,
    ContainerLostError,
    FarmUnreachableError,
    LeaseLostError,
    PoolClosedError,
    ProtocolError,
    SlotDestroyedError,
    StaleLeaseError,
    TooManyRequestsError,
    from_wire,
)
from agentenv.slots.container_link import ContainerLink, Ended, Liveness, RequestLimits
from agentenv.slots.farm_access import FarmAccess
from agentenv.slots.farm_client import FarmClient, reachable
from agentenv.slots.lease import SlotLease
from agentenv.slots.pool_errors import acquire_timeout_error, check_arguments
from agentenv.slots.statistics import PoolStatistics, Tally
from agentenv.tasks import TaskSet, finish, unless_lost
from agentenv.wire import farm as wire
from agentenv.wire.leases import NO_TAGS, Tags
from agentenv.wire.states import ContainerState, SlotState

logger = logging.getLogger(__name__)

_SEAL_TIMEOUT_S: Final = 75.0
"""Longer than the sandbox server itself waits."""
_CLOSE_GRACE_S: Final = 5.0
_ASK_WAIT_S: Final = 0.25
"""How long the farm holds back the answer to an ask: most slots are granted by then, and the others come as news."""
_REQUESTS_AT_ONCE: Final = 16
_CHECK_S: Final = 0.25
_INFO_S: Final = 5.0
_PROBE_S: Final = 2.0
_RETRY_MIN_S, _RETRY_MAX_S = 0.1, 0.5
"""A farm that was restarted is back within a second or two; waiting asks are stated again with the next connection."""


@dataclass(eq=False)
class _Wanted:
    """An ask without an answer. ``deadline``: at which it fails in any case; ``patience_s``: for how long, without a
    break, it may be that the farm cannot be reached or has no capacity."""

    ask: wire.Ask
    deadline: float | None
    patience_s: float
    since: float
    granted: asyncio.Future[tuple[wire.Grant, ...]]
    place: wire.Place | None = None
    hopeless_s: float = 0.0


@dataclass(eq=False)
class _Container:
    """A container with leases of ours."""

    link: ContainerLink
    leases: dict[int, SlotLease] = field(default_factory=dict)


class FarmPool:
    """Leases slots of a farm service. An async context manager.

    ``access`` names the farm and the run (:func:`agentenv.slots.farm_access.farm_access`). Waiting for a slot of a full
    farm is healthy and takes as long as it takes: ``acquire_timeout_s`` counts only while the farm cannot be reached or
    has no capacity. Opening raises FarmUnreachableError, or the farm's refusal.
    """

    def __init__(
        self,
        access: FarmAccess,
        *,
        tags: Tags = NO_TAGS,
        settings: PoolSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = FarmClient(access.urls, access.token, run=access.run)
        self._tags = tags
        self._settings = settings or PoolSettings()
        self._route = access.route
        self._clock = clock
        self._limits = RequestLimits()
        self._wanted: dict[str, _Wanted] = {}
        self._outbox: list[_Wanted] = []
        self._outgoing = asyncio.Event()
        self._sending = asyncio.Semaphore(_REQUESTS_AT_ONCE)
        self._containers: dict[str, _Container] = {}
        self._routes: dict[str, asyncio.Task[bool]] = {}
        self._numbers = itertools.count(1)
        self._releasing: dict[str, asyncio.Task[None]] = {}
        self._tasks = TaskSet()
        self._tally = Tally()
        self._connected = False
        self._why_not = ""
        self._session: aiohttp.ClientSession | None = None
        self._stack = AsyncExitStack()
        self._closing: asyncio.Task[None] | None = None
        self.info: wire.FarmInfo | None = None
        """The farm as last seen."""

    # -- opening and closing ---------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        if self._session is not None or self._closing is not None:
            raise PoolClosedError("a FarmPool can be opened only once", next_step="make a new one")
        self._session = await self._stack.enter_async_context(open_session())
        try:
            await self._stack.enter_async_context(self._client)
            self.info = await self._handshake()
        except BaseException:
            await self.aclose()
            raise
        for work, name in (
            (self._send(), "asks"),
            (self._follow_news(), "news"),
            (self._check(), "upkeep"),
            (self._refresh(), "view"),
        ):
            self._tasks.start("farm", work, name)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End every wait and lease, and release the slots. May be repeated; completes even when cancelled."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(), name="farm pool close")
        await finish(self._closing)

    async def _handshake(self) -> wire.FarmInfo:
        """Farms restart: one that cannot be reached is tried again for a while."""
        backoff, until = Backoff(_RETRY_MIN_S, _RETRY_MAX_S), self._clock() + self._settings.acquire_timeout_s
        while True:
            try:
                return await self._client.info()
            except (FarmUnreachableError, TooManyRequestsError):
                if self._clock() >= until:
                    raise
                await asyncio.sleep(backoff.next_s())

    async def _close(self) -> None:
        for wanted in list(self._wanted.values()):
            self._answer(wanted, PoolClosedError("the pool was closed while waiting for a slot"))
            self._withdraw(wanted)
        for held in list(self._containers.values()):
            for lease in list(held.leases.values()):
                self._give_back(lease)
                lease.end(LeaseLostError(f"the pool was closed while {lease.trajectory!r} held its slot"))
        last = {task for task in self._tasks if task.get_name().startswith(("release", "cancel"))}
        if last:
            await asyncio.wait(last, timeout=_CLOSE_GRACE_S)
        await self._tasks.aclose()
        await self._stack.aclose()

    def _check_open(self) -> None:
        if self._session is None or self._closing is not None:
            raise PoolClosedError("the pool is not open", next_step="use it inside `async with FarmPool(...)`")

    # -- leasing ---------------------------------------------------------------------------------

    async def lease(self, trajectory: str, *, timeout_s: float | None = None, tags: Tags = NO_TAGS) -> SlotLease:
        """Lease a slot, when it is this run's turn. Release it, or use it as a context manager.

        With ``timeout_s`` it is had within that time or AcquireTimeoutError is raised; without, see the class. Raises
        FarmUnreachableError, QuotaError, SandboxUnavailableError as soon as the farm has no container and can have
        none, PoolClosedError, ConfigError. Cancelling this never leaks a slot.
        """
        (lease,) = await self.lease_group([trajectory], timeout_s=timeout_s, tags=tags)
        return lease

    async def lease_group(
        self, trajectories: Sequence[str], *, timeout_s: float | None = None, tags: Tags = NO_TAGS
    ) -> list[SlotLease]:
        """Lease a slot for each trajectory, all of them together or none; otherwise as :meth:`lease`."""
        self._check_open()
        for trajectory in trajectories:
            check_arguments(trajectory, timeout_s)
        if not 1 <= len(trajectories) <= wire.MAX_GROUP:
            raise ConfigError(
                "trajectories", f"has {len(trajectories)}", next_step=f"allowed: 1 to {wire.MAX_GROUP} at once"
            )
        wanted = self._want(trajectories, timeout_s, tags)
        try:
            grants = await wanted.granted
        except asyncio.CancelledError:
            self._withdraw(wanted)
            raise
        finally:
            self._wanted.pop(wanted.ask.request_id, None)
        leases = [await self._hold(grant) for grant in grants]
        self._tally.granted += len(leases)
        self._tally.waits.add(self._clock() - wanted.since)
        return leases

    def place(self, trajectory: str) -> wire.Place | None:
        """Why a trajectory waits, as the farm last told; None if it does not, or that is unknown yet."""
        found = (wanted.place for wanted in self._wanted.values() if trajectory in wanted.ask.trajectories)
        return next(found, None)

    def _want(self, trajectories: Sequence[str], timeout_s: float | None, tags: Tags) -> _Wanted:
        named = wire.AskTags(
            environment=tags.environment or self._tags.environment, kind=tags.kind, group=tags.group, item=tags.item
        )
        ask = wire.Ask(
            request_id=secrets.token_hex(16),
            trajectories=tuple(trajectories),
            tags=named,
            ttl_s=self._settings.lease_ttl_s,
        )
        now = self._clock()
        wanted = _Wanted(
            ask,
            deadline=None if timeout_s is None else now + timeout_s,
            patience_s=self._settings.acquire_timeout_s,
            since=now,
            granted=asyncio.get_running_loop().create_future(),
        )
        self._wanted[ask.request_id] = wanted
        self._outbox.append(wanted)
        self._outgoing.set()
        return wanted

    def _answer(self, wanted: _Wanted, error: AgentEnvError) -> None:
        if not wanted.granted.done():
            self._tally.faults[error.code] += 1
            wanted.granted.set_exception(error)

    def _withdraw(self, wanted: _Wanted) -> None:
        """The farm withdraws the ask, or ends its leases if it was granted."""
        self._tasks.start("farm", self._cancel(wanted.ask.request_id), "cancel")

    async def _cancel(self, request_id: str) -> None:
        backoff, until = Backoff(_RETRY_MIN_S, _RETRY_MAX_S), self._clock() + wire.ASK_TTL_S
        while self._clock() < until:  # later the farm has dropped it, and the TTL has ended its leases
            try:
                await self._client.cancel(request_id)
                return
            except (FarmUnreachableError, TooManyRequestsError):
                await asyncio.sleep(backoff.next_s())
            except AgentEnvError as error:
                logger.debug("ask %s is not withdrawn: %s", request_id, error)
                return

    # -- the farm --------------------------------------------------------------------------------

    async def _send(self) -> None:
        """Post new asks, those of one moment together."""
        while True:
            await self._outgoing.wait()
            await asyncio.sleep(0)  # a group's members ask one after the other
            self._outgoing.clear()
            while self._outbox:
                batch, self._outbox = self._outbox[: wire.MAX_ASKS], self._outbox[wire.MAX_ASKS :]
                open_ones = [wanted for wanted in batch if not wanted.granted.done()]
                if open_ones:
                    await self._sending.acquire()
                    task = self._tasks.start("farm", self._post(open_ones), "post")
                    task.add_done_callback(lambda _: self._sending.release())

    async def _post(self, batch: list[_Wanted]) -> None:
        try:
            reply = await self._client.ask([wanted.ask for wanted in batch], wait_s=_ASK_WAIT_S)
        except (FarmUnreachableError, TooManyRequestsError) as error:
            self._why_not = str(error)
            await asyncio.sleep(error.retry_after_s if isinstance(error, TooManyRequestsError) else _RETRY_MIN_S)
            if not self._connected:
                return  # they are asked again with the next hello
            self._outbox += [wanted for wanted in batch if not wanted.granted.done()]
            self._outgoing.set()
        except AgentEnvError as error:
            for wanted in batch:
                self._answer(wanted, error)
        else:
            for state in reply.asks:
                self._learn(state)

    async def _follow_news(self) -> None:
        backoff = Backoff(_RETRY_MIN_S, _RETRY_MAX_S)
        while True:
            try:
                async with aclosing(self._client.news()) as news:
                    async for line in news:
                        backoff.reset()
                        self._hear(line)
            except (FarmUnreachableError, TooManyRequestsError) as error:
                self._why_not = str(error)
            except AgentEnvError as error:  # the token has expired, say: whoever waits has to know
                self._why_not = str(error)
                for wanted in list(self._wanted.values()):
                    self._answer(wanted, error)
            self._connected = False
            await asyncio.sleep(backoff.next_s())

    def _hear(self, line: wire.NewsLine) -> None:
        match line:
            case wire.NewsHello():
                self._connected, self._why_not = True, ""
                self._outbox = list(self._wanted.values())
                self._outgoing.set()
            case wire.NewsAsk(ask=state):
                self._learn(state)
            case wire.NewsLost(lease=name, error=said):
                self._end(name, from_wire(said.error, said.message, said.next_step))
            case wire.NewsLeaving():
                self._connected, self._why_not = False, "the farm is ending"

    def _learn(self, state: wire.AskState) -> None:
        wanted = self._wanted.get(state.request_id)
        if wanted is None or wanted.granted.done():
            return  # withdrawn meanwhile: the withdrawal ends the leases
        match state.state:
            case "granted" if len(state.leases) == len(wanted.ask.trajectories):
                wanted.granted.set_result(state.leases)
            case "granted":  # ended before they were taken
                self._answer(wanted, LeaseLostError("the slot was lost before it was used"))
            case "waiting":
                wanted.place = state.place
            case "refused":
                said = state.error
                error = from_wire(said.error, said.message, said.next_step) if said else ProtocolError("no reason")
                self._answer(wanted, error)

    async def _refresh(self) -> None:
        while True:
            await asyncio.sleep(_INFO_S)
            try:
                self.info = await self._client.info()
            except AgentEnvError as error:
                logger.debug("the farm's state is unknown: %s", error)

    async def _check(self) -> None:
        """End waits that have become hopeless."""
        last = self._clock()
        while True:
            await asyncio.sleep(_CHECK_S)
            now = self._clock()
            passed_s, last = min(now - last, 4 * _CHECK_S), now
            for wanted in list(self._wanted.values()):
                self._judge(wanted, now, passed_s)

    def _judge(self, wanted: _Wanted, now: float, passed_s: float) -> None:
        no_capacity = wanted.place is not None and wanted.place.why == "no_capacity"
        hopeless = not self._connected or no_capacity
        wanted.hopeless_s = wanted.hopeless_s + passed_s if hopeless else 0.0
        late = wanted.deadline is not None and now >= wanted.deadline
        if wanted.granted.done() or not (late or wanted.hopeless_s >= wanted.patience_s):
            return
        waited_s = now - wanted.since
        if not self._connected:
            error: AgentEnvError = FarmUnreachableError(
                f"no slot within {waited_s:.1f} s: {self._why_not or 'the farm does not answer'}",
                next_step="is farm_url right, and is the farm running?",
            )
        else:
            error = acquire_timeout_error(waited_s, wanted.place)
        self._answer(wanted, error)
        self._withdraw(wanted)

    # -- leases at their containers --------------------------------------------------------------

    async def _hold(self, grant: wire.Grant) -> SlotLease:
        name = grant.lease.split("/", 1)[0]
        held = self._containers.get(name)
        if held is None:
            base_url = await self._base_url(grant)
            held = self._containers.get(name)
        if held is None:
            handle = ContainerHandle(name, grant.index, base_url, grant.token, grant.slots)
            link = ContainerLink(handle, self._session, self._settings, self._limits, self._clock)
            held = self._containers[name] = _Container(link)
            self._tasks.start(name, self._keep(name, held), "heartbeat")
        number = next(self._numbers)
        lease = SlotLease(number, grant.trajectory, grant.key, held.link.handle, self)
        held.leases[number] = lease
        held.link.hold(number, grant.key)
        return lease

    async def _base_url(self, grant: wire.Grant) -> str:
        if not grant.relay_url or self._route == "direct":
            return grant.base_url
        if self._route == "relay":
            return grant.relay_url
        probe = self._routes.get(grant.base_url)
        if probe is None:
            probe = self._routes[grant.base_url] = asyncio.create_task(reachable(grant.base_url, _PROBE_S))
        return grant.base_url if await asyncio.shield(probe) else grant.relay_url

    async def _keep(self, name: str, held: _Container) -> None:
        """Renew the leases in a container until it is lost or none is left."""
        await held.link.keep_in_touch(
            lambda ended: self._ended(held, ended),
            lambda liveness: self._silent(name, held, liveness),
        )

    def _ended(self, held: _Container, ended: Ended) -> None:
        for number, why in ended.items():
            lease = held.leases.get(number)
            if lease is not None:
                self._lose(
                    held,
                    lease,
                    why
                    or StaleLeaseError(
                        f"slot {lease.key.slot} of {lease.container.id} is no longer leased to {lease.trajectory!r}",
                        next_step="start the rollout again on a new slot",
                    ),
                )

    def _end(self, name: str, error: AgentEnvError) -> None:
        """The farm says that a lease has ended."""
        if (release := self._releasing.get(name)) is not None:
            release.cancel()  # its container may be gone, and would be asked until the timeout
        if (held := self._containers.get(name.rsplit("/", 2)[0])) is not None:
            for lease in list(held.leases.values()):
                if _name_of(lease) == name:
                    self._lose(held, lease, error)

    def _silent(self, name: str, held: _Container, liveness: Liveness) -> None:
        if liveness is not Liveness.gone:
            return
        self._containers.pop(name, None)
        reason = f"it has not responded for {self._settings.gone_after_s:g} s"
        for lease in list(held.leases.values()):
            self._lose(
                held,
                lease,
                ContainerLostError(
                    f"container {name} is gone, with slot {lease.key.slot} of {lease.trajectory!r}: {reason}",
                    next_step="start the rollout again on a new slot",
                ),
            )

    def _lose(self, held: _Container, lease: SlotLease, error: AgentEnvError) -> None:
        held.leases.pop(lease.id, None)
        held.link.let_go(lease.id)
        self._tally.lost += 1
        self._tally.faults[error.code] += 1
        lease.end(error)
        self._leave(lease.container.id, held)

    def _leave(self, name: str, held: _Container) -> None:
        """Without leases a container needs no heartbeats."""
        if not held.leases and self._containers.get(name) is held:
            del self._containers[name]
            asyncio.get_running_loop().call_soon(self._stop_heartbeat, name)

    def _stop_heartbeat(self, name: str) -> None:
        if name not in self._containers:
            for task in self._tasks:
                if task.get_name() == f"heartbeat of {name}":
                    task.cancel()

    async def seal_lease(self, lease: SlotLease) -> None:
        """For :meth:`SlotLease.seal`."""
        held = self._containers.get(lease.container.id)
        if lease.released or held is None or lease.id not in held.leases:
            raise StaleLeaseError(f"{lease!r} can no longer be sealed")
        try:
            await unless_lost(held.link.control.seal(lease.key, timeout_s=_SEAL_TIMEOUT_S), lease.wait_lost())
        except (LeaseLostError, SlotDestroyedError) as error:
            if lease.id in held.leases:
                self._lose(held, lease, error)
            raise

    async def release_lease(self, lease: SlotLease) -> None:
        """For :meth:`SlotLease.release`."""
        self._give_back(lease)
        returning = self._releasing.get(_name_of(lease))
        if returning is not None and lease.lost is None:
            await asyncio.wait({returning}, timeout=self._settings.reset_timeout_s)

    def _give_back(self, lease: SlotLease) -> None:
        held = self._containers.get(lease.container.id)
        if held is None or held.leases.pop(lease.id, None) is None:
            return
        held.link.let_go(lease.id)
        lease.released = True
        self._tally.released += 1
        task = self._tasks.start("farm", self._release(held.link, lease), "release")
        self._releasing[_name_of(lease)] = task
        task.add_done_callback(lambda _: self._releasing.pop(_name_of(lease), None))
        self._leave(lease.container.id, held)

    async def _release(self, link: ContainerLink, lease: SlotLease) -> None:
        began = self._clock()
        while True:
            try:
                reply = await link.control.release(lease.key, timeout_s=lease_timeout_s(self._settings))
            except ConnectionLostError as error:  # the TTL ends it
                logger.info("%r is left to expire: %s", lease, error)
                return
            except AgentEnvError as error:
                logger.debug("%r is not ours to release: %s", lease, error)
                return
            if reply.state is not SlotState.resetting:
                self._tally.resets.add(self._clock() - began)
                return
            if self._clock() - began > self._settings.reset_timeout_s:
                return

    # -- views -----------------------------------------------------------------------------------

    def statistics(self) -> PoolStatistics:
        """Leases and waits of this pool; slots and containers of the whole farm as last seen."""
        tally = self._tally
        load = self.info.load if self.info is not None else None
        containers = Counter({ContainerState(name): n for name, n in load.containers.items()} if load else {})
        slots = Counter({SlotState(name): n for name, n in load.slots.items()} if load else {})
        return PoolStatistics(
            containers=MappingProxyType(dict(containers)),
            slots=MappingProxyType(dict(slots)),
            waiting=len(self._wanted),
            goal_containers=load.goal_containers if load else 0,
            max_containers=load.max_containers if load else 0,
            **tally.counts(),
        )

    def held(self) -> Iterable[SlotLease]:
        """Leases that have not ended."""
        return [lease for held in self._containers.values() for lease in held.leases.values()]

    def __repr__(self) -> str:
        if self._closing is not None:
            return f"<{type(self).__name__} closed>"
        return f"<{type(self).__name__} of {self._client.url}: {self.statistics()}>"


def _name_of(lease: SlotLease) -> str:
    """As the farm names it (:data:`agentenv.wire.farm.LeaseId`)."""
    return f"{lease.container.id}/{lease.key.slot}/{lease.key.epoch}"


def lease_timeout_s(settings: PoolSettings) -> float:
    """How long a release is repeated: afterwards the lease has expired anyway."""
    return max(settings.lease_ttl_s, settings.reset_timeout_s)
