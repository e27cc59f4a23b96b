"""A pool whose slots belong to a farm service: it asks for them there, and uses them at their containers.

The farm grants; it is not needed for anything else. Leases are kept alive, sealed and released at the containers, so a
farm that is away delays new slots and nothing more.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack
from types import MappingProxyType, TracebackType
from typing import Final, Self

import aiohttp

from agentenv.background import TaskSet, finish, unless_lost
from agentenv.config import PoolSettings
from agentenv.containers.connection import open_session
from agentenv.containers.handle import ContainerHandle
from agentenv.deadlines import scaled
from agentenv.errors import (
    AgentEnvError,
    ConfigError,
    ConnectionLostError,
    ContainerLostError,
    FarmUnreachableError,
    PoolClosedError,
    StaleLeaseError,
    TooManyRequestsError,
)
from agentenv.farm_client.access import FarmAccess
from agentenv.farm_client.asks import FarmAsks, retries
from agentenv.farm_client.client import FarmClient, reachable
from agentenv.farm_client.images import FarmImages
from agentenv.slots.container_link import ContainerLink, Ended, Liveness, RequestLimits
from agentenv.slots.lease import LeaseBook, Leases, SlotLease
from agentenv.slots.pool_errors import check_arguments
from agentenv.slots.statistics import PoolStatistics, Tally
from agentenv.wire import farm as wire
from agentenv.wire.leases import NO_TAGS, SlotRequest, Tags
from agentenv.wire.states import ContainerState, SlotState

logger = logging.getLogger(__name__)


_CLOSE_GRACE_S: Final = scaled(5.0)
_INFO_S: Final = scaled(5.0)
_PROBE_S: Final = scaled(2.0)


class FarmPool(Leases):
    """Leases slots of a farm service. An async context manager.

    ``access`` names the farm and the run (:func:`agentenv.farm_client.access.farm_access`). Waiting for a slot of a
    full farm is healthy and takes as long as it takes: ``acquire_timeout_s`` counts only while the farm cannot be
    reached or has no capacity. Opening raises FarmUnreachableError, or the farm's refusal.
    """

    def __init__(
        self,
        access: FarmAccess,
        *,
        tags: Tags = NO_TAGS,
        settings: PoolSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = FarmClient(access.urls, access.token, run=access.run, renew=access.renew)
        self._tags = tags
        self._settings = settings or PoolSettings()
        self._route = access.route
        self._clock = clock
        self._limits = RequestLimits()
        self._links: dict[str, ContainerLink] = {}
        """To the containers with leases of ours."""
        self._routes: dict[str, asyncio.Task[bool]] = {}
        self._reached = False
        """Whether a container was reached without a relay."""
        self._numbers = itertools.count(1)
        self._tasks = TaskSet()
        self._tally = Tally()
        self._leases = LeaseBook(self, self._tally, self._settings.reset_timeout_s)
        self._asks = FarmAsks(self._client, self._settings, self._tally, self._tasks, clock, lost=self._end)
        self.images = FarmImages(self._client, self._tasks)
        """The images of this run, if the farm fetches them (``info.images``)."""
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
        self._asks.start()
        self._tasks.start("farm", self._refresh(), "view")
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
        backoff, until = retries(), self._clock() + self._settings.acquire_timeout_s
        while True:
            try:
                return await self._client.info()
            except (FarmUnreachableError, TooManyRequestsError):
                if self._clock() >= until:
                    raise
                await asyncio.sleep(backoff.next_s())

    async def _close(self) -> None:
        self._asks.dismiss(PoolClosedError("the pool was closed while waiting for a slot"))
        self._leases.close()
        last = {task for task in self._tasks if task.get_name().startswith(("release", "cancel"))}
        if last:
            await asyncio.wait(last, timeout=_CLOSE_GRACE_S)
        await self._tasks.aclose()
        await self.images.aclose()
        await self._stack.aclose()

    def _check_open(self) -> None:
        if self._session is None or self._closing is not None:
            raise PoolClosedError("the pool is not open", next_step="use it inside `async with FarmPool(...)`")

    # -- leasing ---------------------------------------------------------------------------------

    async def lease_slots(self, request: SlotRequest, *, timeout_s: float | None = None) -> list[SlotLease]:
        """See :class:`Leases`. With ``timeout_s`` they are had within that time, or AcquireTimeoutError is raised;
        without, see the class."""
        trajectories, tags = request.trajectories, request.tags
        self._check_open()
        for trajectory in trajectories:
            check_arguments(trajectory, timeout_s)
        if not 1 <= len(trajectories) <= wire.MAX_GROUP:
            raise ConfigError(
                "trajectories", f"has {len(trajectories)}", next_step=f"allowed: 1 to {wire.MAX_GROUP} at once"
            )
        named = wire.AskTags(
            environment=tags.environment or self._tags.environment, kind=tags.kind, group=tags.group, item=tags.item
        )
        reference = "" if request.root is None else self.images.reference(request.root.image)
        wanted = self._asks.want(request, timeout_s, named, reference)
        leases: list[SlotLease] = []
        try:
            for grant in await wanted.granted:
                leases.append(await self._hold(grant, request.ttl_s))
        except (asyncio.CancelledError, ConfigError):
            for lease in leases:
                (self._leases.leave if request.existing else self._leases.give_back)(lease)
            self._asks.withdraw(wanted)
            raise
        finally:
            self._asks.forget(wanted)
        self._tally.waits.add(self._clock() - wanted.since)
        return leases

    async def leases_of(self, environment: str) -> tuple[wire.LeaseView, ...]:
        """The leases of this run, whoever holds them, that have this tag. Raises what the farm answers."""
        self._check_open()
        return (await self._client.leases(self._client.run, [f"environment:{environment}"])).leases

    async def paused_of(self, environment: str) -> tuple[wire.PausedView, ...]:
        """What was paused of this run, with this tag. Raises what the farm answers."""
        self._check_open()
        listed = await self._client.paused(self._client.run)
        return tuple(one for one in listed.paused if one.tags.environment == environment)

    async def end_by_name(self, trajectory: str, environment: str) -> int:
        """End the leases of this run with this trajectory and tag, and drop what was paused of it. How many there were.
        Raises what the farm answers."""
        ended = 0
        for lease in await self.leases_of(environment):
            if lease.trajectory == trajectory:
                tags = [f"environment:{environment}", f"item:{lease.tags.item}"]
                ended += (await self._client.end_leases(lease.tags.run, tags)).ended
        return ended + (await self._client.drop_paused(trajectory, self._client.run)).dropped

    def place(self, trajectory: str) -> wire.Place | None:
        """Why a trajectory waits, as the farm last told; None if it does not, or that is unknown yet."""
        return self._asks.place(trajectory)

    async def _refresh(self) -> None:
        while True:
            await asyncio.sleep(_INFO_S)
            try:
                self.info = await self._client.info()
            except AgentEnvError as error:
                logger.debug("the farm's state is unknown: %s", error)

    # -- leases at their containers --------------------------------------------------------------

    async def _hold(self, grant: wire.Grant, ttl_s: float | None) -> SlotLease:
        name = grant.lease.split("/", 1)[0]
        if name not in self._links:
            base_url = await self._base_url(grant)
            if name not in self._links:
                handle = ContainerHandle(name, grant.index, base_url, grant.token, grant.slots)
                link = ContainerLink(handle, self._session, self._settings, self._limits, self._clock)
                self._links[name] = link
                self._tasks.start(name, self._keep(link), "heartbeat")
        link, number = self._links[name], next(self._numbers)
        link.hold(number, grant.key, ttl_s)
        lease = self._leases.hold(number, grant.trajectory, grant.key, link)
        lease.root = grant.root
        return lease

    async def _base_url(self, grant: wire.Grant) -> str:
        if not grant.relay_url or self._route == "direct":
            # The farm has just leased it. Once one container was reached, another that cannot be is a lost one.
            if not self._reached and not await self._reaches(grant.base_url):
                self._routes.pop(grant.base_url, None)  # the next lease may reach it
                raise ConfigError(
                    "farm_route",
                    f"containers of the farm cannot be reached from here (tried {grant.base_url})",
                    next_step="route auto or relay, with a relay at the farm (agentenv farm relay)"
                    if not grant.relay_url
                    else "route auto, or relay",
                )
            self._reached = True
            return grant.base_url
        if self._route == "relay":
            return grant.relay_url
        return grant.base_url if await self._reaches(grant.base_url) else grant.relay_url

    async def _reaches(self, base_url: str) -> bool:
        probe = self._routes.get(base_url)
        if probe is None:
            probe = self._routes[base_url] = asyncio.create_task(reachable(base_url, _PROBE_S))
        return await asyncio.shield(probe)

    async def _keep(self, link: ContainerLink) -> None:
        """Renew the leases in a container until it is lost or none is left."""
        await link.keep_in_touch(self._ended, lambda liveness: self._silent(link, liveness))

    def _ended(self, ended: Ended) -> None:
        for number, why in ended.items():
            if (lease := self._leases.get(number)) is not None:
                stale = StaleLeaseError(
                    f"slot {lease.key.slot} of {lease.container.id} is no longer leased to {lease.trajectory!r}",
                    next_step="start the rollout again on a new slot",
                )
                self.refused(lease, why or stale)

    def _end(self, name: str, error: AgentEnvError) -> None:
        """The farm says that a lease has ended."""
        self._tasks.cancel(name)  # a release: its container may be gone, and would be asked until the timeout
        for lease in self._leases_at(self._links.get(name.rsplit("/", 2)[0])):
            if lease.name == name:
                self.refused(lease, error)

    def _silent(self, link: ContainerLink, liveness: Liveness) -> None:
        if liveness is not Liveness.gone:
            return
        name = link.handle.id
        self._links.pop(name, None)
        reason = f"it has not responded for {self._settings.gone_after_s:g} s"
        for lease in self._leases_at(link):
            self.refused(
                lease,
                ContainerLostError(
                    f"container {name} is gone, with slot {lease.key.slot} of {lease.trajectory!r}: {reason}",
                    next_step="start the rollout again on a new slot",
                ),
            )

    def _leases_at(self, link: ContainerLink | None) -> list[SlotLease]:
        numbers = () if link is None else link.held
        return [lease for number in numbers if (lease := self._leases.get(number)) is not None]

    def refused(self, lease: SlotLease, error: AgentEnvError) -> None:
        """See :class:`agentenv.slots.lease.LeaseKeeper`."""
        self._leases.lose(lease.id, error)
        self._let_go(lease)

    def left(self, lease: SlotLease) -> None:
        """See :class:`agentenv.slots.lease.LeaseKeeper`."""
        self._let_go(lease)

    def give_back(self, lease: SlotLease) -> asyncio.Task[None]:
        """See :class:`agentenv.slots.lease.LeaseKeeper`."""
        self._let_go(lease)
        return self._tasks.start(lease.name, self._released(lease), "release")

    def _let_go(self, lease: SlotLease) -> None:
        """Renew it no longer. Without leases a container needs no heartbeats."""
        link, name = lease.link, lease.container.id
        link.let_go(lease.id)
        if not link.held and self._links.get(name) is link:
            del self._links[name]
            asyncio.get_running_loop().call_soon(self._stop_heartbeat, name)

    def _stop_heartbeat(self, name: str) -> None:
        if name not in self._links:
            self._tasks.cancel(name)

    async def _released(self, lease: SlotLease) -> None:
        """Release it, unless nothing listens at the container any more: it would be asked until the timeout."""
        try:
            await unless_lost(self._release(lease), self._until_gone(lease.link))
        except ContainerLostError as error:
            logger.info("%r is left to expire: %s", lease, error)

    async def _until_gone(self, link: ContainerLink) -> ContainerLostError:
        """Return when nothing has listened there for ``gone_after_s``."""
        silent_s = 0.0
        while silent_s < self._settings.gone_after_s:
            await asyncio.sleep(_PROBE_S)
            silent_s = 0.0 if await reachable(link.handle.base_url, _PROBE_S) else silent_s + _PROBE_S
        return ContainerLostError(f"nothing has listened at {link.handle.id} for {silent_s:g} s")

    async def _release(self, lease: SlotLease) -> None:
        began = self._clock()
        while True:
            try:
                reply = await lease.link.control.release(lease.key, timeout_s=lease_timeout_s(self._settings))
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
            waiting=len(self._asks),
            goal_containers=load.goal_containers if load else 0,
            max_containers=load.max_containers if load else 0,
            **tally.counts(),
        )

    def held(self) -> Iterable[SlotLease]:
        """Leases that have not ended."""
        return iter(self._leases)

    def __repr__(self) -> str:
        if self._closing is not None:
            return f"<{type(self).__name__} closed>"
        return f"<{type(self).__name__} of {self._client.url}: {self.statistics()}>"


def lease_timeout_s(settings: PoolSettings) -> float:
    """How long a release is repeated: afterwards the lease has expired anyway."""
    return max(settings.lease_ttl_s, settings.reset_timeout_s)
