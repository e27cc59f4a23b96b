"""The farm: the manager of its containers, the queue of requests for their slots, and their upkeep."""

from __future__ import annotations

import asyncio
import functools
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from agentenv._version import __version__
from agentenv.api.farm_server.activity import Activity
from agentenv.api.farm_server.audit import FarmAudit
from agentenv.api.farm_server.images import ImageService
from agentenv.api.farm_server.news import NewsHub
from agentenv.api.farm_server.plain_sessions import PlainSessions
from agentenv.api.farm_server.request_queue import RequestQueue
from agentenv.api.farm_server.settings import PlainSettings
from agentenv.background import report_failure
from agentenv.config import ContainerSettings, PoolSettings
from agentenv.deadlines import scaled
from agentenv.errors import AgentEnvError, FencedError, PoolClosedError
from agentenv.image_placement.keepers import Keepers
from agentenv.image_placement.placement import DEFAULT_COPIES
from agentenv.slots.backends.base import ContainerBackend
from agentenv.slots.container_manager import ContainerManager
from agentenv.slots.sharing import FairShare, RunView, Share
from agentenv.slots.watched_link import WatchedLink
from agentenv.wire import farm as wire
from agentenv.wire.leases import RunKind

logger = logging.getLogger(__name__)

_TICK_S = 1.0
_SETTLE_S = scaled(5.0)
"""How long opening waits for the inventory of containers that run already, so that what was granted before is known
when the first client asks again."""
_CLOSE_GRACE_S = scaled(2.0)


class Farm:
    """An open farm without HTTP. An async context manager; leaving it leaves the leases with their holders, and the
    containers to the backend.

    ``ended`` is set when the farm must end, because another controls its containers: what was frozen or cut off for a
    while must not go on (``fenced`` says who).
    """

    def __init__(
        self,
        backend: ContainerBackend,
        pool: PoolSettings | None = None,
        containers: ContainerSettings | None = None,
        *,
        name: str = "default",
        relay_url: str = "",
        audit: FarmAudit | None = None,
        plain: PlainSettings | None = None,
        keepers: Keepers | None = None,
        copies_per_image: int = DEFAULT_COPIES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.boot = secrets.token_hex(8)
        self.queue_policy = FairShare()
        self.reclaim_after_s: float | None = None
        """When a run has waited this long within its guarantee, others' leases above theirs are ended for it."""
        self.audit = audit or FarmAudit(None)
        self.leads = False
        """Whether asks are taken: it is open, and its containers are its own to control."""
        self.leader_url = ""
        """While another farm has the containers: where it is, if that is known."""
        self.fenced: AgentEnvError | None = None
        self.ended = asyncio.Event()
        self.containers = containers or ContainerSettings()
        self.relay_url = relay_url
        self.news = NewsHub(wire.NewsHello(boot=self.boot, generation=0))
        self.queue = RequestQueue(
            self.queue_policy,
            self.news,
            self.audit,
            clock,
            slots_per_container=self.containers.slots_per_container,
            relay_url=relay_url,
            comes_from=None if keepers is None else keepers.remember,
        )
        self.manager = ContainerManager(
            backend,
            pool or PoolSettings(),
            self.queue,
            clock=clock,
            queue_policy=self.queue_policy,
            link=functools.partial(WatchedLink, fenced=self._lost),
            stores=keepers,
            copies_per_image=copies_per_image,
        )
        self.images = ImageService(self.manager, keepers)
        self._keepers = keepers
        self.queue.manager = self.manager
        self.plain = PlainSessions(self.queue, self.images, plain or PlainSettings(), clock)
        self.activity = Activity()
        """What happens in the containers."""
        self.clock = clock
        self._backend = backend
        self._stack = AsyncExitStack()

    @property
    def generation(self) -> int:
        """Larger than that of any farm that had these containers before."""
        return self._backend.generation

    @property
    def backend_name(self) -> str:
        """What runs the containers."""
        return self._backend.name

    async def __aenter__(self) -> Self:
        if self.manager.opened:
            raise PoolClosedError("a Farm can be opened only once", next_step="make a new one")
        try:
            if self._keepers is not None:
                await self._keepers.__aenter__()
            await self.manager.open()
            self.news.hello = wire.NewsHello(boot=self.boot, generation=self.generation)
            await self._settle()
        except BaseException:
            await self._close(0)
            raise
        self.leads = True
        ticking = asyncio.create_task(self._keep_up(), name="farm upkeep")
        ticking.add_done_callback(report_failure)
        self._stack.callback(ticking.cancel)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()
        await self.plain.aclose()
        await self._stack.aclose()
        await self._close(_CLOSE_GRACE_S)

    async def _close(self, grace_s: float) -> None:
        try:
            await self.manager.close(grace_s)
        finally:
            if self._keepers is not None:
                await self._keepers.__aexit__(None, None, None)

    def leave(self) -> None:
        """Take no more asks, and tell the clients that a successor will. May be repeated."""
        self.leads = False
        self.queue.close()
        self.news.close()
        self.plain.leave()

    async def _settle(self) -> None:
        until = self.clock() + _SETTLE_S
        while self.clock() < until and self._listed() < self._backend.found:  # noqa: ASYNC110 - several tasks list
            await asyncio.sleep(0.01)

    def _listed(self) -> int:
        return sum(link.listed for link in self.manager.links.values())

    def stand_by(self, leader_url: str, description: str) -> None:
        """Another farm has the containers. One that had them before itself ends."""
        self.leader_url = leader_url
        if self.leads:
            self._lost(FencedError(f"another farm has taken the containers: {description}"))
        else:
            logger.warning("standing by: %s has the containers", description)

    def _lost(self, error: FencedError) -> None:
        if self.fenced is None:
            logger.error("the farm service ends: it no longer controls its containers: %s", error)
            self.fenced, self.leads = error, False
            self.ended.set()

    async def _keep_up(self) -> None:
        while True:
            try:
                self.queue.tick(self.reclaim_after_s)
                self.plain.tick()
                self._note_activity()
            except Exception:  # asks would be kept for ever
                logger.exception("a round of the farm's upkeep failed")
            await asyncio.sleep(_TICK_S)

    def drain(self, container: str, by: str) -> int | None:
        """No new leases on a container, for the token ``by``; it is replaced when it has no leases any more. How many
        it has; None if there is no such container."""
        if container not in self.manager.links:
            return None
        leases = sum(lease.container == container for lease in self.manager.ledger.leases())
        self.audit.container_drained(by, container, leases)
        self.manager.retire(container, "it was drained by an operator")
        return leases

    def _note_activity(self) -> None:
        self.activity.read(self.manager.links)
        self.activity.sample(self.clock(), self.manager.tally.granted, self.manager.tally.faults)
        self.queue.grants.forget(self.queue_policy.runs(), self.clock())

    # -- views -----------------------------------------------------------------------------------

    def load(self) -> wire.FarmLoad:
        """Slots and containers by state."""
        ledger = self.manager.ledger
        return wire.FarmLoad(
            slots={state.value: count for state, count in ledger.slot_counts().items()},
            containers={state.value: count for state, count in ledger.container_counts().items()},
            waiting=ledger.waiting,
            goal_containers=self.manager.goal,
            max_containers=self.manager.settings.max_containers,
        )

    def info(self, run: str = "") -> wire.FarmInfo:
        """See :class:`agentenv.wire.farm.FarmInfo`."""
        asked = self.containers
        failed = self.manager.start_failed
        return wire.FarmInfo(
            farm=self.name,
            version=__version__,
            boot=self.boot,
            generation=self.generation,
            state="leader" if self.leads else "standby",
            slots_per_container=asked.slots_per_container,
            max_slots=self.manager.settings.max_containers * asked.slots_per_container,
            isolation=asked.isolation,
            require_sandbox=asked.require_sandbox,
            allow_network=asked.allow_network,
            limits=dict(vars(asked.limits)),
            relay_url=self.relay_url,
            images="client" if self._keepers is None else "farm",
            load=self.load(),
            run=self.run(run) if run else None,
            problem=f"{failed.reason} {failed.next_step}".strip() if failed is not None else "",
        )

    def containers_seen(self) -> tuple[wire.ContainerSeen, ...]:
        """Every container, by index."""
        found = []
        for container in self.manager.ledger.containers():
            if (link := self.manager.links.get(container.id)) is not None:
                found.append(
                    wire.ContainerSeen(
                        id=container.id,
                        index=container.index,
                        base_url=link.handle.base_url,
                        state=container.state,
                        slots=Counter(slot.state.value for slot in container.slots),
                        supervisor_silent_s=link.supervisor_silent_s,
                    )
                )
        return tuple(found)

    def run(self, name: str) -> wire.RunStatus:
        """One run, whether it has anything or not."""
        return next((one for one in self.runs() if one.run == name), self._status(name, None, {}))

    def runs(self) -> tuple[wire.RunStatus, ...]:
        """Every run that holds or waits for slots, by name."""
        total = sum(self.manager.ledger.slot_counts().values())
        fair = self.queue_policy.fair_shares(total)
        return tuple(self._status(name, view, fair) for name, view in sorted(self.queue_policy.runs().items()))

    def _status(self, name: str, view: RunView | None, fair: dict[str, float]) -> wire.RunStatus:
        share = view.share if view is not None else self.queue_policy.share_of(name)
        oldest = self.queue.since(view.oldest) if view is not None and view.oldest is not None else None
        return wire.RunStatus(
            run=name,
            share=share_on_the_wire(share),
            held=dict[RunKind, int](view.held) if view is not None else {},
            waiting=view.slots_waiting if view is not None else 0,
            oldest_wait_s=self.clock() - oldest if oldest is not None else None,
            fair_share=fair.get(name, 0.0),
            granted=self.queue.granted_to.get(name, 0),
        )


def share_on_the_wire(share: Share) -> wire.RunShare:
    """The same for clients."""
    return wire.RunShare(weight=share.weight, guaranteed=share.guaranteed, cap=share.cap, paused=share.paused)
