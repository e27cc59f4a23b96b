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
from dataclasses import dataclass, field
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
    LeaseLostError,
    PoolClosedError,
    SlotDestroyedError,
    StaleLeaseError,
    TooManyRequestsError,
)
from agentenv.farm_client.access import FarmAccess
from agentenv.farm_client.asks import FarmAsks, retries
from agentenv.farm_client.client import FarmClient, reachable
from agentenv.farm_client.images import FarmImages
from agentenv.slots.container_link import ContainerLink, Ended, Liveness, RequestLimits
from agentenv.slots.lease import Leases, SlotLease
from agentenv.slots.pool_errors import check_arguments
from agentenv.slots.statistics import PoolStatistics, Tally
from agentenv.wire import farm as wire
from agentenv.wire.leases import NO_TAGS, ActionReply, LeaseAction, SlotRequest, Tags
from agentenv.wire.states import ContainerState, SlotState

logger = logging.getLogger(__name__)


_CLOSE_GRACE_S: Final = scaled(5.0)
_INFO_S: Final = scaled(5.0)
_PROBE_S: Final = scaled(2.0)


@dataclass(eq=False)
class _Container:
    """A container with leases of ours."""

    link: ContainerLink
    leases: dict[int, SlotLease] = field(default_factory=dict)


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
        self._containers: dict[str, _Container] = {}
        self._routes: dict[str, asyncio.Task[bool]] = {}
        self._reached = False
        """Whether a container was reached without a relay."""
        self._numbers = itertools.count(1)
        self._releasing: dict[str, asyncio.Task[None]] = {}
        self._tasks = TaskSet()
        self._tally = Tally()
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
        for held in list(self._containers.values()):
            for lease in list(held.leases.values()):
                self._give_back(lease)
                lease.end(LeaseLostError(f"the pool was closed while {lease.trajectory!r} held its slot"))
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
                leases.append(await self._hold(grant))
        except (asyncio.CancelledError, ConfigError):
            for lease in leases:
                self._give_back(lease)
            self._asks.withdraw(wanted)
            raise
        finally:
            self._asks.forget(wanted)
        self._tally.granted += len(leases)
        self._tally.waits.add(self._clock() - wanted.since)
        return leases

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
            # The farm has just leased it. Once one container was reached, another that cannot be is a lost one.
            if not self._reached and not await self._reaches(grant.base_url):
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

    async def act(self, lease: SlotLease, action: LeaseAction) -> ActionReply:
        """For :meth:`SlotLease.act`."""
        held = self._containers.get(lease.container.id)
        if lease.released or held is None or lease.id not in held.leases:
            raise StaleLeaseError(f"{lease!r} can no longer be used")
        try:
            return await unless_lost(held.link.control.act(lease.key, action), lease.wait_lost())
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
        task = self._tasks.start("farm", self._released(held.link, lease), "release")
        self._releasing[_name_of(lease)] = task
        task.add_done_callback(lambda _: self._releasing.pop(_name_of(lease), None))
        self._leave(lease.container.id, held)

    async def _released(self, link: ContainerLink, lease: SlotLease) -> None:
        """Release it, unless nothing listens at the container any more: it would be asked until the timeout."""
        try:
            await unless_lost(self._release(link, lease), self._until_gone(link))
        except ContainerLostError as error:
            logger.info("%r is left to expire: %s", lease, error)

    async def _until_gone(self, link: ContainerLink) -> ContainerLostError:
        """Return when nothing has listened there for ``gone_after_s``."""
        silent_s = 0.0
        while silent_s < self._settings.gone_after_s:
            await asyncio.sleep(_PROBE_S)
            silent_s = 0.0 if await reachable(link.handle.base_url, _PROBE_S) else silent_s + _PROBE_S
        return ContainerLostError(f"nothing has listened at {link.handle.id} for {silent_s:g} s")

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
            waiting=len(self._asks),
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
