"""The queue of a farm service: clients' asks, and the leases granted for them. No HTTP, and no rights: callers have
checked that the run is theirs to name.

What is kept here may be lost at any time: clients repeat their asks, and leases are at the containers.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from agentenv.api.farm_server.audit import BY_FARM, FarmAudit
from agentenv.api.farm_server.lost_names import LostNames
from agentenv.api.farm_server.news import NewsHub
from agentenv.api.farm_server.open_ask import OpenAsk
from agentenv.api.farm_server.run_labels import RunCounts
from agentenv.api.farm_server.settings import LeaseLimits
from agentenv.errors import (
    AgentEnvError,
    LeaseLostError,
    LeaseReclaimedError,
    PoolClosedError,
    ProtocolError,
    QuotaError,
    StaleLeaseError,
    TooManyRequestsError,
    UnauthorizedError,
)
from agentenv.slots.backends.base import StartFailed
from agentenv.slots.commands import Expire, Grant, HandOver
from agentenv.slots.container_link import ContainerLink
from agentenv.slots.container_manager import ContainerManager
from agentenv.slots.counts import Load
from agentenv.slots.eta import FreedRate, eta_s
from agentenv.slots.pool_errors import check_group, unavailable_error
from agentenv.slots.records import LeaseRecord
from agentenv.slots.sharing import FairShare
from agentenv.slots.watched_link import WatchedLink
from agentenv.wire import farm as wire
from agentenv.wire.leases import SlotRequest, Tags, TokenTag
from agentenv.wire.passes import make_pass
from agentenv.wire.server import ErrorReply

_REMEMBERED_S = 60.0
"""How long an ask is remembered after its last lease has ended, or it was refused or cancelled."""
_PLACES_EVERY_S = 2.0
MAX_WAITING_SLOTS = 20_000
"""Slots that one run may wait for: each takes some 8 KiB of memory."""
MAX_CANCELLED = MAX_WAITING_SLOTS
"""Cancelled asks of one run that are remembered."""
_FORECAST_S = 0.5
_FULL_RETRY_S = 5.0
_CANCELLED = "the request was cancelled"
_REVOKED = "the token by which it was leased was revoked"


@dataclass(frozen=True)
class QueueForecast:
    """What places depend on, computed once for many of them. ``upcoming``: slots ahead, by ticket."""

    now: float
    load: Load
    total: int
    growth: int
    upcoming: Mapping[int, int]
    fair: Mapping[str, float]
    freed_per_s: float | None


class RequestQueue:
    """The asks of a farm's clients, and what they were granted. Implements
    :class:`agentenv.slots.container_manager.GrantSink`. The farm sets ``manager`` before the first ask."""

    manager: ContainerManager

    def __init__(
        self,
        queue_policy: FairShare,
        news: NewsHub,
        audit: FarmAudit,
        clock: Callable[[], float],
        *,
        slots_per_container: int,
        relay_url: str = "",
        comes_from: Callable[[str, str], None] | None = None,
    ) -> None:
        """``comes_from`` is called with the digest and reference of each requested image."""
        self.queue_policy = queue_policy
        self.granted_to: dict[str, int] = {}
        """Slots granted to each run by this process."""
        self.grants = RunCounts()
        """The same, for metrics."""
        self._news = news
        self._audit = audit
        self._clock = clock
        self._slots_per_container = slots_per_container
        self._relay_url = relay_url
        self._comes_from = comes_from
        self._asks: dict[tuple[str, str], OpenAsk] = {}
        self._cancelled: dict[str, OrderedDict[str, float]] = {}
        """When these asks of each run were cancelled, the oldest first: an ask may arrive after its own cancellation,
        on another connection."""
        self._by_ticket: dict[int, OpenAsk] = {}
        self._by_lease: dict[int, OpenAsk] = {}
        self._freed = FreedRate(clock())
        self.limits = LeaseLimits()
        """What an ask may be for."""
        self.lost_names = LostNames(clock)
        """Of the leases that the farm holds itself."""
        self.on_ended: Callable[[int, AgentEnvError], None] = lambda _, __: None
        """Called with every lease that has ended."""
        self.denied: frozenset[str] = frozenset()
        """Ids of tokens that were revoked."""
        self._not_renewed: set[int] = set()
        """Leases of such tokens whose containers were notified."""
        self.closed = False
        """No asks are taken any more."""
        self._places_at = -math.inf
        self._forecast: QueueForecast | None = None
        self._turn = asyncio.Lock()
        """Answers that were held back are made one in each round of the event loop: thousands may be due at once."""

    # -- asking ----------------------------------------------------------------------------------

    async def ask(
        self, request: wire.AsksRequest, run: str, tokens: tuple[TokenTag, ...] = (), until_unix_s: float = math.inf
    ) -> wire.AsksReply:
        """See :class:`agentenv.wire.farm.AsksRequest`. ``tokens``: the token that asks, and those that it was made by;
        the slots count to the caps of all of them. ``until_unix_s``: when it expires, and its asks are withdrawn.

        Raises ProtocolError when a ``request_id`` was used for another request, TooManyRequestsError when the run waits
        for too many slots, PoolClosedError when closing.
        """
        if self.closed:
            raise PoolClosedError("the farm service is shutting down", next_step="retry: its replacement will answer")
        self._check_room(request.asks, run)
        mine = [await self._opened(ask, run, request.client, tokens, until_unix_s) for ask in request.asks]
        if request.wait_s > 0 and not any(one.decided.is_set() for one in mine):
            waiting = {asyncio.ensure_future(one.decided.wait()) for one in mine}
            await asyncio.wait(waiting, timeout=request.wait_s, return_when=asyncio.FIRST_COMPLETED)
            for task in waiting:
                task.cancel()
            async with self._turn:
                await asyncio.sleep(0)
        return wire.AsksReply(asks=tuple(map(self.state_of, mine)))

    def _check_room(self, asks: Sequence[wire.Ask], run: str) -> None:
        more = sum(len(ask.trajectories) for ask in asks if (run, ask.request_id) not in self._asks)
        waiting = self.queue_policy.waiting(run) + self.manager.ledger.aside_slots(run)
        if more and waiting + more > MAX_WAITING_SLOTS:
            raise TooManyRequestsError(
                f"run {run!r} waits for {waiting:,} slots; at most {MAX_WAITING_SLOTS:,} may be waited for",
                next_step="retry when some have been granted",
                retry_after_s=_FULL_RETRY_S,
            )

    async def _opened(
        self, ask: wire.Ask, run: str, client: str, tokens: tuple[TokenTag, ...], until_unix_s: float
    ) -> OpenAsk:
        now, key = self._clock(), (run, ask.request_id)
        known = self._asks.get(key)
        if known is not None:
            if known.ask != ask and not _finds(ask, known.ask):
                raise ProtocolError(
                    f"request_id {ask.request_id!r} was used for another request", next_step="use a new one for each"
                )
            known.last_seen, known.client = now, client or known.client
            known.tokens, known.until_unix_s = tokens, until_unix_s
            if ask.existing and known.ask.root is not None:
                known.held = {
                    id_: grant.model_copy(update={"root": known.ask.root}) for id_, grant in known.held.items()
                }
            return known
        opened = OpenAsk(ask, run, client, tokens, now, now, until_unix_s)
        if ask.request_id in self._cancelled.get(run, ()):
            opened.refuse(LeaseLostError(_CANCELLED), now)
            return opened
        self._asks[key] = opened
        if self._comes_from is not None and ask.root is not None and ask.image_reference:
            self._comes_from(ask.root.image, ask.image_reference)
        if (refused := self._never(opened)) is not None:
            self._refuse(opened, refused)
        elif not await self._recovered(opened) and not opened.decided.is_set():
            if ask.existing:
                self._refuse(opened, StaleLeaseError("there is no such lease (any more)"))
            else:
                self._enqueue(opened)
        return opened

    def _never(self, opened: OpenAsk) -> AgentEnvError | None:
        """Why waiting cannot help; None if it can."""
        if (failed := self.manager.hopeless()) is not None:
            return unavailable_error(failed)
        slots = len(opened.ask.trajectories)
        cap = self._cap(opened)
        if cap is not None and slots > cap:
            return QuotaError(
                "farm_run",
                f"{slots} slots were requested at once, but this token limits run {opened.run!r} to {cap}",
                next_step="request fewer at once, or raise the cap of the run or of the token",
            )
        try:
            check_group(opened.ask.trajectories, self.max_slots)
        except QuotaError as error:
            return error
        if slots > self.max_group:
            return QuotaError(
                "farm",
                f"a group of {slots} was requested, but this farm grants at most {self.max_group} slots at once",
                next_step="request smaller groups, or raise leases.max_group_share of the farm",
            )
        return None

    def check_ttl(self, ttl_s: float) -> None:
        """Raises QuotaError when a client may not have leases that last so long without a renewal."""
        if ttl_s > self.limits.max_ttl_s:
            raise QuotaError(
                "lease_ttl_s",
                f"leases of {ttl_s:g} s were asked for, and this farm gives at most {self.limits.max_ttl_s:g}",
                next_step="set a lower lease_ttl_s: leases in use are renewed; or raise leases.max_ttl_s of the farm",
            )

    @property
    def max_group(self) -> int:
        """Most slots of one ask."""
        return max(int(self.max_slots * self.limits.max_group_share), self.slots_per_container)

    def _cap(self, opened: OpenAsk) -> int | None:
        """Most slots that the run, and each of the tokens, may hold."""
        caps = [self.queue_policy.share_of(opened.run).cap, *(token.cap for token in opened.tokens)]
        return min((cap for cap in caps if cap is not None), default=None)

    @property
    def max_slots(self) -> int:
        """Slots of the farm at its largest."""
        return self.manager.settings.max_containers * self.slots_per_container

    @property
    def slots_per_container(self) -> int:
        """As the last container had, or as it is to have."""
        return self.manager.slots_per_container if self.manager.links else self._slots_per_container

    def _enqueue(self, opened: OpenAsk) -> None:
        request = SlotRequest(
            opened.ask.trajectories,
            opened.ask.tags.of(opened.run, opened.tokens),
            opened.ask.request_id,
            opened.ask.ttl_s,
            opened.ask.root,
            opened.ask.container,
        )
        ticket, commands = self.manager.ledger.enqueue(request, self._clock(), math.inf)
        opened.ticket = ticket
        self._by_ticket[ticket] = opened
        self.manager.perform(commands)
        self.manager.wake()

    async def _recovered(self, opened: OpenAsk) -> bool:
        """Whether the ask was granted before by a process that died since: its leases are known by tags and
        trajectory, and the container answers a repeated request with the same lease."""
        tags = opened.ask.tags.of(opened.run)
        leases = [self._unclaimed(tags, trajectory) for trajectory in opened.ask.trajectories]
        if not any(leases):
            return False
        mine = [await self._again(opened, number, lease) for number, lease in enumerate(leases) if lease is not None]
        kept = [lease for lease in mine if lease is not None]
        cancelled = opened.decided.is_set()
        if len(kept) == len(leases) and not cancelled:
            for lease in kept:
                self._keep(opened, lease)
            self._grant(opened)
            return True
        reason = _CANCELLED if cancelled else "another lease of its group was lost"  # all or none
        for lease in kept:
            self.end(lease.id, LeaseLostError(reason))
        return False

    def _unclaimed(self, tags: Tags, trajectory: str) -> LeaseRecord | None:
        lease = self.manager.ledger.adopted(tags, trajectory)
        return lease if lease is not None and lease.id not in self._by_lease else None

    async def _again(self, opened: OpenAsk, number: int, lease: LeaseRecord) -> LeaseRecord | None:
        link = self.manager.links.get(lease.container)
        if link is None:
            return None
        request_id = f"{opened.ask.request_id}-{number}"
        tags = opened.ask.tags.of(opened.run)
        try:
            await link.lease(Grant(lease.id, lease.container, lease.slot, lease.trajectory, math.inf, tags, request_id))
        except AgentEnvError:  # it was made by another request
            return None
        return lease

    # -- the sink of grants -------------------------------------------------------------------------

    def hand_over(self, granted: HandOver, link: ContainerLink) -> None:  # noqa: ARG002 - the port's
        """See :class:`agentenv.slots.container_manager.GrantSink`. The leases of a group come in one go."""
        opened = self._by_ticket.get(granted.ticket)
        lease = self.manager.ledger.lease(granted.lease)
        if lease is None:
            return
        if opened is None:
            self.manager.perform(self.manager.ledger.release(granted.lease, self._clock()))
            return
        self._keep(opened, lease)
        if len(opened.held) == len(opened.ask.trajectories):
            del self._by_ticket[granted.ticket]
            self._grant(opened)

    def _keep(self, opened: OpenAsk, lease: LeaseRecord) -> None:
        link = self.manager.links[lease.container]
        key = link.key(lease.id)
        opened.held[lease.id] = wire.Grant(
            lease=f"{lease.container}/{key.slot}/{key.epoch}",
            trajectory=lease.trajectory,
            base_url=link.handle.base_url,
            token=make_pass(link.handle.token, opened.run),
            key=key,
            ttl_s=opened.ask.ttl_s,
            index=link.handle.index,
            slots=link.handle.slots,
            relay_url=f"{self._relay_url}/c/{lease.container}" if self._relay_url else "",
        )
        self._by_lease[lease.id] = opened

    def _grant(self, opened: OpenAsk) -> None:
        opened.ticket, opened.granted, opened.last_sent_place = None, True, None
        opened.decided.set()
        slots = len(opened.held)
        self.granted_to[opened.run] = self.granted_to.get(opened.run, 0) + slots
        self.grants.add(opened.run, slots)
        self.manager.tally.granted += slots
        self.manager.tally.waits.add(self._clock() - opened.since)
        self._audit.ask_granted(opened.by, opened.run, opened.ask, tuple(opened.held.values()))
        self._tell(opened)

    def fail(self, ticket: int, error: AgentEnvError) -> None:
        """See :class:`agentenv.slots.container_manager.GrantSink`."""
        opened = self._by_ticket.pop(ticket, None)
        if opened is not None:
            self._refuse(opened, error)
            self._tell(opened)

    def _refuse(self, opened: OpenAsk, error: AgentEnvError) -> None:
        opened.refuse(error, self._clock())
        self._audit.ask_refused(opened.by, opened.run, opened.ask, error)

    def expire(self, expired: Sequence[Expire]) -> None:
        """See :class:`agentenv.slots.container_manager.GrantSink`: never, because asks have no deadline here."""

    def lease_ended(self, lease: LeaseRecord, error: AgentEnvError) -> None:
        """See :class:`agentenv.slots.container_manager.GrantSink`. The holder is notified, unless its container
        reported the end."""
        self._freed.freed(self._clock())
        self.lost_names.ended(lease, error)
        opened = self._by_lease.pop(lease.id, None)
        if opened is not None:
            grant = opened.held.pop(lease.id)
            if opened.client and not isinstance(error, StaleLeaseError):
                lost = wire.NewsLost(lease=grant.lease, error=ErrorReply.of(error))
                self._news.tell(opened.run, opened.client, lost)
            if not opened.held:
                opened.ended = self._clock()
        self.on_ended(lease.id, error)

    def unavailable(self, failed: StartFailed) -> AgentEnvError:
        """See :class:`agentenv.slots.container_manager.GrantSink`."""
        return unavailable_error(failed)

    # -- what has become of an ask ---------------------------------------------------------------

    def find(self, request_id: str, run: str) -> OpenAsk | None:
        """The ask of a run; reading it keeps it alive."""
        opened = self._asks.get((run, request_id))
        if opened is not None:
            opened.last_seen = self._clock()
        return opened

    def knows(self, request_id: str, run: str) -> bool:
        """Whether there is such an ask of the run."""
        return (run, request_id) in self._asks

    def state_of(self, opened: OpenAsk) -> wire.AskState:
        """What has become of it."""
        name = opened.ask.request_id
        if opened.error is not None:
            return wire.AskState(request_id=name, state="refused", error=ErrorReply.of(opened.error))
        if opened.granted:
            return wire.AskState(request_id=name, state="granted", leases=tuple(opened.held.values()))
        opened.last_sent_place = self.place(opened, self.forecast())
        return wire.AskState(request_id=name, state="waiting", place=opened.last_sent_place)

    def forecast(self) -> QueueForecast:
        """The state of the whole farm, as far as places depend on it, at most ``_FORECAST_S`` old: it takes a few ms
        when thousands wait."""
        ledger, now = self.manager.ledger, self._clock()
        if self._forecast is not None and now - self._forecast.now < _FORECAST_S:
            return self._forecast
        load, total = ledger.load(now), sum(ledger.slot_counts().values())
        self._forecast = QueueForecast(
            now=now,
            load=load,
            total=total,
            growth=max(0, self.max_slots - total),
            upcoming=self.queue_policy.upcoming(),
            fair=self.queue_policy.fair_shares(total),
            freed_per_s=self._freed.per_s(now),
        )
        return self._forecast

    def place(self, opened: OpenAsk, forecast: QueueForecast) -> wire.Place:
        """Why it waits, and for how long."""
        ticket, load = opened.ticket or 0, forecast.load
        ahead = forecast.upcoming.get(ticket)
        root = opened.ask.root
        why, detail = self._why(opened, load, "" if root is None else root.image)
        missing = None if ahead is None else ahead + len(opened.ask.trajectories) - load.free
        return wire.Place(
            why=why,
            detail=detail,
            position=self.manager.ledger.position(ticket),
            slots_ahead=ahead,
            eta_s=eta_s(missing, forecast.freed_per_s, forecast.growth, self.manager.start_s),
            waited_s=self._clock() - opened.since,
            run_held=self.queue_policy.held(opened.run),
            run_cap=self._cap(opened),
            run_fair_share=forecast.fair.get(opened.run, 0.0),
            free=load.free,
            total=forecast.total,
        )

    def _why(self, opened: OpenAsk, load: Load, image: str) -> tuple[wire.WaitingFor, str]:
        ticket = opened.ticket or 0
        held_back = self.queue_policy.why(ticket)
        if held_back == "paused":
            return held_back, ""
        if held_back == "cap":
            return held_back, self._cap_reached(opened)
        failed = self.manager.start_failed
        starting = load.serving + load.lingering(self.manager.goal) < self.manager.goal
        if failed is not None and starting:
            return "no_capacity", f"{failed.reason} {failed.next_step}".strip()
        if self.manager.ledger.aside(ticket):
            return "image", self.manager.image_problem(image)
        return ("starting" if starting else "queue"), ""

    def _cap_reached(self, opened: OpenAsk) -> str:
        """Which token holds all it may; empty: it is the run."""
        slots = len(opened.ask.trajectories)
        for token in opened.tokens:
            if token.cap is not None and (held := self.queue_policy.held_by(token.id)) + slots > token.cap:
                return f"the token {token.id} holds {held} slots of at most {token.cap}, with those that it made"
        return ""

    # -- ending ----------------------------------------------------------------------------------

    def cancel(self, request_id: str, run: str) -> bool:
        """Withdraw an ask; its leases end if it was granted. False: there is no such ask; one that arrives later is
        refused."""
        key = (run, request_id)
        self._remember_cancelled(run, request_id)
        opened = self._asks.pop(key, None)
        if opened is None:
            return False
        self._withdraw(opened)
        for lease in tuple(opened.held):
            self.end(lease, LeaseLostError(_CANCELLED))
        return True

    def _remember_cancelled(self, run: str, request_id: str) -> None:
        mine = self._cancelled.setdefault(run, OrderedDict())
        mine[request_id] = self._clock()
        mine.move_to_end(request_id)
        if len(mine) > MAX_CANCELLED:
            mine.popitem(last=False)

    def _forget_cancelled(self, now: float) -> None:
        for run, mine in list(self._cancelled.items()):
            while mine and now - next(iter(mine.values())) > _REMEMBERED_S:
                mine.popitem(last=False)
            if not mine:
                del self._cancelled[run]

    def end(self, lease_id: int, error: AgentEnvError | None, by: str = BY_FARM) -> bool:
        """End a lease at its container, for the token ``by``; its holder gets ``error`` (None: it asked for it).
        False: it has ended."""
        lease = self.manager.ledger.lease(lease_id)
        if lease is None or not lease.held or lease.epoch is None:
            return False
        link = self.manager.links.get(lease.container)
        if isinstance(link, WatchedLink) and error is not None:
            link.end_with(lease.slot, lease.epoch, error)
        self._audit.lease_ended(by, lease.tags.run, lease.name, str(error or "released"))
        self.manager.perform(self.manager.ledger.stale(lease_id, self._clock(), error))
        if error is None:
            self.lost_names.released(lease)
        return True

    def withdraw_run(self, run: str) -> None:
        """Withdraw every ask of a run that waits."""
        for key, opened in list(self._asks.items()):
            if opened.run == run and opened.ticket is not None:
                del self._asks[key]
                self._withdraw(opened)

    def deny(self, denied: frozenset[str], *, end_of: str = "") -> tuple[int, int]:
        """The tokens with these ids are revoked: what was asked for by them, or by tokens that they made, is withdrawn,
        and their leases are not renewed; those of the token ``end_of`` end now. How many asks and leases that were."""
        self.denied = denied
        asks, leases = self._withdraw_denied(), 0
        if not denied:
            return asks, leases
        self._not_renewed.intersection_update(lease.id for lease in self.manager.ledger.leases())
        for lease in self.leases(lambda one: bool(one.tags.tokens)):
            ids = {token.id for token in lease.tags.tokens}
            if end_of in ids:
                leases += self.end(lease.id, LeaseLostError(_REVOKED))
            elif lease.id not in self._not_renewed and not denied.isdisjoint(ids):
                leases += 1
                self._not_renewed.add(lease.id)
                self.manager.end_at_renewal(lease, LeaseLostError(_REVOKED))
        return asks, leases

    def _withdraw_denied(self) -> int:
        """Withdraw the asks that wait by tokens that were revoked or have expired. How many."""
        now = time.time()
        over = [
            (key, one)
            for key, one in self._asks.items()
            if one.ticket is not None and one.is_disallowed(self.denied, now)
        ]
        for key, opened in over:
            del self._asks[key]
            self._withdraw(opened)
            error = UnauthorizedError("farm_token", f"the token ({opened.by}) was revoked, or has expired")
            opened.refuse(error, self._clock())
        return len(over)

    def leases(self, chosen: Callable[[LeaseRecord], bool]) -> Iterator[LeaseRecord]:
        """Leases that are held."""
        return (lease for lease in list(self.manager.ledger.leases()) if lease.held and chosen(lease))

    def now_s(self) -> float:
        """The time that leases are held since, by the pool's clock."""
        return self._clock()

    def _withdraw(self, opened: OpenAsk) -> None:
        if opened.ticket is not None:
            self._by_ticket.pop(opened.ticket, None)
            self.manager.perform(self.manager.ledger.withdraw(opened.ticket, self._clock()))
            opened.ticket = None
        opened.decided.set()

    # -- upkeep ----------------------------------------------------------------------------------

    def tick(self, reclaim_after_s: float | None) -> None:
        """Once a second: drop asks without a client, refuse those that can never be served, reclaim for guarantees,
        and send places."""
        now = self._clock()
        for key, opened in list(self._asks.items()):
            if opened.ticket is not None:
                if opened.client and self._news.listens(opened.run, opened.client):
                    opened.last_seen = now
                elif now - opened.last_seen > wire.ASK_TTL_S:
                    del self._asks[key]
                    self._withdraw(opened)
            elif opened.ended is not None and now - opened.ended > _REMEMBERED_S:
                del self._asks[key]
        self._forget_cancelled(now)
        self.deny(self.denied)  # tokens may have expired since, and containers have reported leases
        for ticket in self.queue_policy.too_large(self.max_slots):
            error = QuotaError("farm_run", "the run's cap was lowered below the number of slots requested at once")
            self.fail(ticket, error)
            self.manager.perform(self.manager.ledger.withdraw(ticket, now))
        if reclaim_after_s is not None:
            self._reclaim(reclaim_after_s, now)
        if now - self._places_at >= _PLACES_EVERY_S:
            self._places_at = now
            self._tell_places()

    def _reclaim(self, after_s: float, now: float) -> None:
        old = [ticket for ticket, opened in self._by_ticket.items() if now - opened.since >= after_s]
        if not old:
            return
        load = self.manager.ledger.load(now)
        for run, kind in self.queue_policy.to_reclaim(load.free + load.freeing, max(old)):
            mine = self.leases(lambda lease: lease.tags.run == run and lease.tags.kind == kind)  # noqa: B023
            youngest = max(mine, key=lambda lease: lease.id, default=None)
            if youngest is not None:
                reason = f"the slot was reclaimed from run {run!r} for a run below its guarantee"
                self.manager.tally.faults[LeaseReclaimedError.code] += 1
                self.end(youngest.id, LeaseReclaimedError(reason))

    def _tell_places(self) -> None:
        for opened in self._by_ticket.values():
            if opened.client and self._news.listens(opened.run, opened.client):
                before, state = opened.last_sent_place, self.state_of(opened)
                if _differs(before, state.place):
                    self._news.tell(opened.run, opened.client, wire.NewsAsk(ask=state))

    def _tell(self, opened: OpenAsk) -> None:
        if opened.client:
            self._news.tell(opened.run, opened.client, wire.NewsAsk(ask=self.state_of(opened)))

    def close(self) -> None:
        """No asks any more; leases stay with their holders."""
        self.closed = True
        tickets, commands = self.manager.ledger.dismiss_waiters(self._clock())
        self.manager.perform(commands)
        for ticket in tickets:
            if (opened := self._by_ticket.pop(ticket, None)) is not None:
                opened.decided.set()

    def since(self, ticket: int) -> float | None:
        """When the ask with this ticket came; None if it does not wait."""
        opened = self._by_ticket.get(ticket)
        return None if opened is None else opened.since

    def waiting(self) -> Iterable[OpenAsk]:
        """Asks that wait."""
        return self._by_ticket.values()


def _differs(before: wire.Place | None, now: wire.Place | None) -> bool:
    """Whether a client should hear of its new place."""
    if before is None or now is None:
        return before is not now
    moved = (before.why, before.detail, before.position, before.slots_ahead)
    return moved != (now.why, now.detail, now.position, now.slots_ahead)


def _finds(ask: wire.Ask, known: wire.Ask) -> bool:
    """Whether the ask is for what the known one was granted."""
    return ask.existing and (ask.trajectories, ask.tags) == (known.trajectories, known.tags)
