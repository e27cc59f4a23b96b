"""The queue of a farm that several runs share: who is served next. Pure: no I/O, no clock.

The next slots go to the run that is lowest in this order:

- runs that stay within what is guaranteed to them come before all others;
- then the team that holds least for its weight, then the one served longest ago; within it the run that holds least for
  its weight; then the one served longest ago; then the oldest ask. A run without a team (``team/run``) is a team of
  its own, of the run's weight.

Slots that are being reset count as held by the run that had them. A group that is withdrawn while it gathers has cost
others what stood idle: until they were granted as many slots, its team counts as holding them.

Within a run the same order applies to its kinds (train, eval, interactive) by their weights; within a kind, first
come, first served. A run that is paused, or that the ask in turn would take over its cap, is not served; nor is an ask
that would take a token over its cap, and others of its run are served before it.

The order depends on what runs hold at this moment and not on what they held before, so it can be rebuilt at any time
from the leases of the containers; only which run was served longest ago is then unknown. Slots are held for minutes:
what is shared fairly is slots at every moment, and thereby slot-seconds.

The ask in turn gathers: until it fits, nobody else is served. So a group of any size gets its slots, and a run that
holds nothing waits for at most one ask of each other run beyond their guarantees, whatever they do.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter
from typing import Literal

from agentenv.slots.queue_policy import Ask, Caps, FirstCome
from agentenv.wire.leases import RunKind

KIND_WEIGHTS: Mapping[RunKind, float] = {"train": 3.0, "eval": 1.0, "interactive": 1.0}
RECLAIM_ORDER: tuple[RunKind, ...] = ("eval", "train", "interactive")
"""Kinds in the order in which a run gives up slots: a rollout is simply tried again, a person's session cannot be."""

_key = attrgetter("key")
_ticket = attrgetter("ticket")


@dataclass(frozen=True, slots=True)
class Share:
    """What a run may have of the farm.

    Slots beyond the guarantees are divided in proportion to ``weight`` (> 0). Up to ``guaranteed`` slots the run is
    served before all that are above their guarantee; what it does not use is lent. It is never given more than
    ``cap`` slots (None: no limit), and none while ``paused``; it keeps those it has.

    Raises ValueError if a number is outside its range.
    """

    weight: float = 1.0
    guaranteed: int = 0
    cap: int | None = None
    paused: bool = False

    def __post_init__(self) -> None:
        if not self.weight > 0:
            raise ValueError(f"weight must be positive, not {self.weight}")
        if self.guaranteed < 0 or (self.cap is not None and self.cap < 0):
            raise ValueError(f"guaranteed ({self.guaranteed}) and cap ({self.cap}) must not be negative")


@dataclass(frozen=True, slots=True)
class RunView:
    """A run at this moment. ``held``: slots by kind; ``asks``, ``slots_waiting``: in the queue; ``oldest``: the
    ticket of its oldest ask, None if none waits; ``held_back``: of ``slots_waiting``, those that caps of tokens do not
    allow now."""

    share: Share
    held: Mapping[RunKind, int]
    asks: int
    slots_waiting: int
    oldest: int | None
    held_back: int = 0

    @property
    def slots_held(self) -> int:
        """Of all kinds."""
        return sum(self.held.values())


_Held = Counter[str]
"""Slots by token, of tokens with a cap."""
_Place = tuple[bool, float, int, float, int, int]
"""Of a run among runs: see :meth:`_Run.rekey`."""


def _allowed(ask: Ask, tokens: _Held) -> bool:
    return all(tokens[token] + ask.slots <= cap for token, cap in ask.caps)


@dataclass(slots=True)
class _Kind:
    served: int
    """Number of the pick that served it last."""
    held: int = 0
    lines: dict[Caps, FirstCome] = field(default_factory=dict)
    """Those who wait, by the caps that they have in common: who is held back by one holds up nobody else."""

    def push(self, ask: Ask) -> None:
        self.lines.setdefault(ask.caps, FirstCome()).push(ask)

    def remove(self, ask: Ask) -> None:
        line = self.lines[ask.caps]
        line.withdraw(ask.ticket)
        if not line:
            del self.lines[ask.caps]

    def head(self, tokens: _Held) -> Ask | None:
        """The oldest that no token's cap holds back."""
        heads = (line.head for line in self.lines.values())
        return min((ask for ask in heads if ask is not None and _allowed(ask, tokens)), key=_ticket, default=None)

    def position(self, ticket: int) -> int:
        return 1 + sum(line.older(ticket) for line in self.lines.values())

    @property
    def asks(self) -> int:
        return sum(map(len, self.lines.values()))

    @property
    def oldest(self) -> int | None:
        return min((line.head.ticket for line in self.lines.values() if line.head is not None), default=None)

    @property
    def slots_wanted(self) -> int:
        return sum(line.slots_wanted for line in self.lines.values())

    def copy(self) -> _Kind:
        return _Kind(self.served, self.held, {caps: line.copy() for caps, line in self.lines.items()})


@dataclass(slots=True)
class _Team:
    """Runs that share. ``held``: slots of all, with those in reset; ``owed``: see :meth:`FairShare.withdraw`."""

    weight: float
    served: int
    held: int = 0
    owed: int = 0
    runs: dict[str, _Run] = field(default_factory=dict)

    @property
    def load(self) -> float:
        """What it holds, for its weight."""
        return (self.held + self.owed) / self.weight

    def rekey(self) -> None:
        """Bring its runs' places up to date."""
        for run in self.runs.values():
            run.rekey()

    def copy(self, tokens: _Held) -> _Team:
        copied = _Team(self.weight, self.served, self.held, self.owed)
        copied.runs = {name: run.copy(copied, tokens) for name, run in self.runs.items()}
        return copied


@dataclass(slots=True)
class _Run:
    """What it holds and waits for, and what follows from that: to be brought up to date after each change."""

    name: str
    team: _Team
    share: Share
    weights: Mapping[RunKind, float]
    served: int
    tokens: _Held
    """Of all runs: a token may be for several."""
    held: int = 0
    resetting: int = 0
    kinds: dict[RunKind, _Kind] = field(default_factory=dict)
    first: Ask | None = None
    """The one to be served when it is the run's turn; None if nobody of it may be served."""
    key: _Place = (True, 0.0, 0, 0.0, 0, 0)
    """Its place among runs; valid if ``first`` is."""
    slots_wanted: int = 0

    def kind(self, name: RunKind, now: int) -> _Kind:
        found = self.kinds.get(name)
        if found is None:
            found = self.kinds[name] = _Kind(now)
        return found

    def hold(self, name: RunKind, slots: int, now: int, caps: Caps) -> None:
        self.kind(name, now).held += slots
        self.held += slots
        self.team.held += slots
        for token, _ in caps:
            self.tokens[token] += slots
            if not self.tokens[token]:
                del self.tokens[token]

    def serve(self, now: int) -> Ask:
        """Grant the ask in turn, by pick number ``now``."""
        ask = self.first
        assert ask is not None
        kind = self.kinds[ask.kind]
        kind.remove(ask)
        self.served = kind.served = self.team.served = now
        self.hold(ask.kind, ask.slots, now, ask.caps)
        self.update()
        self.team.rekey()
        return ask

    def update(self) -> None:
        share, held = self.share, self.held
        first, best = None, (0.0, 0, 0)
        for name, kind in self.kinds.items():
            head = kind.head(self.tokens)
            if head is not None:
                rank = (kind.held / self.weights[name], kind.served, head.ticket)
                if first is None or rank < best:
                    first, best = head, rank
        if first is None or share.paused or (share.cap is not None and held + first.slots > share.cap):
            self.first, self.slots_wanted = None, 0
            return
        self.first = first
        self.rekey()
        room = None if share.cap is None else share.cap - held
        self.slots_wanted = 0 if self.capped else self._within(room)

    @property
    def capped(self) -> bool:
        """Whether tokens with a cap wait. What they may have depends on other runs: see :meth:`wanted`."""
        return any(caps for kind in self.kinds.values() for caps in kind.lines)

    def wanted(self, left: dict[str, int]) -> int:
        """Slots it would get if there were enough; they are taken from what is ``left`` to each token."""
        if self.first is None:
            return 0
        share, total = self.share, 0
        for kind in self.kinds.values():
            for caps, line in kind.lines.items():
                assert line.head is not None
                room = line.slots_wanted if share.cap is None else share.cap - self.held - total
                for token, cap in caps:
                    room = min(room, left.setdefault(token, cap - self.tokens[token]))
                slots = line.slots_wanted if room >= line.slots_wanted else max(0, room - room % line.head.slots)
                total += slots
                for token, _ in caps:
                    left[token] -= slots
        return total

    def rekey(self) -> None:
        """Bring its place among runs up to date."""
        if self.first is None:
            return
        team, charged = self.team, self.held + self.resetting
        beyond = charged + team.owed + self.first.slots > self.share.guaranteed
        own = charged / self.share.weight
        self.key = (beyond, team.load, team.served, own, self.served, self.first.ticket)

    def _within(self, room: int | None) -> int:
        """Slots it would get if it could have ``room`` more: whole groups, as if all were as large as the first."""
        assert self.first is not None
        waiting = self.slots_waiting
        return waiting if room is None or room >= waiting else room - room % self.first.slots

    @property
    def slots_waiting(self) -> int:
        return sum(kind.slots_wanted for kind in self.kinds.values())

    @property
    def idle(self) -> bool:
        return not (self.held or self.resetting or any(kind.lines for kind in self.kinds.values()))

    def copy(self, team: _Team, tokens: _Held) -> _Run:
        copied = _Run(self.name, team, self.share, self.weights, self.served, tokens, self.held, self.resetting)
        copied.kinds = {name: kind.copy() for name, kind in self.kinds.items()}
        copied.first, copied.key, copied.slots_wanted = self.first, self.key, self.slots_wanted
        return copied

    def view(self) -> RunView:
        oldest = [kind.oldest for kind in self.kinds.values()]
        return RunView(
            self.share,
            {name: kind.held for name, kind in self.kinds.items() if kind.held},
            sum(kind.asks for kind in self.kinds.values()),
            self.slots_waiting,
            min((ticket for ticket in oldest if ticket is not None), default=None),
            self.slots_waiting - self.wanted({}) if self.capped else 0,
        )


class FairShare:
    """See the module. Implements :class:`agentenv.slots.queue_policy.QueuePolicy`.

    A run exists while it holds or waits for slots, and is forgotten then; its share is kept with the settings.
    """

    def __init__(self, default: Share | None = None, runs: Mapping[str, Share] | None = None) -> None:
        self._runs: dict[str, _Run] = {}
        self._teams: dict[str, _Team] = {}
        """Those of runs, and those that owe."""
        self._debtors: dict[str, _Team] = {}
        self._team_weights: Mapping[str, float] = {}
        self._asks: dict[int, Ask] = {}
        self._ready: dict[str, _Run] = {}
        """Runs with somebody who may be served."""
        self._capped: dict[str, _Run] = {}
        """Runs with somebody who waits by a token with a cap."""
        self._tokens: _Held = Counter()
        self._picks = 0
        self._slots_wanted = 0
        self.set_shares(default or Share(), runs or {}, KIND_WEIGHTS)

    def set_shares(
        self,
        default: Share,
        runs: Mapping[str, Share],
        kinds: Mapping[RunKind, float] | None = None,
        teams: Mapping[str, float] | None = None,
    ) -> None:
        """The shares from now on: of the runs named, and of all others; leases are not ended for it.

        ``kinds``: weight of every kind within its run, ``teams``: of teams, by name, 1 if it is not named (None: as
        before). Asks that are now larger than their run's
        cap are in :meth:`too_large`.
        """
        if kinds is not None:
            if set(kinds) != set(KIND_WEIGHTS) or not all(weight > 0 for weight in kinds.values()):
                raise ValueError(f"each of {', '.join(KIND_WEIGHTS)} needs a positive weight")
            self._kind_weights = dict(kinds)
        if teams is not None:
            if not all(weight > 0 for weight in teams.values()):
                raise ValueError("each team needs a positive weight")
            self._team_weights = dict(teams)
        self._default, self._shares = default, dict(runs)
        for name, team in self._teams.items():  # also those that have no run now, and owe
            team.weight = self._team_weight(name)
        for name, run in list(self._runs.items()):
            run.share, run.weights = self._shares.get(name, default), self._kind_weights
            self._changed(name, run)

    # -- the line -----------------------------------------------------------------------------

    def push(self, ask: Ask) -> None:
        """See QueuePolicy."""
        self._asks[ask.ticket] = ask
        run = self._run(ask.run)
        run.kind(ask.kind, self._picks).push(ask)
        self._changed(ask.run, run)

    def withdraw(self, ticket: int, *, aside: bool = False) -> None:
        """See QueuePolicy. If the ask was in turn, no other was served while it gathered: its team owes the slots that
        may have been idle for it, until so many were granted to others."""
        ask = self._asks.pop(ticket, None)
        if ask is not None:
            run = self._runs[ask.run]
            if not aside and self._ready and min(self._ready.values(), key=_key).first is ask:
                self._owe(team_of(ask.run), run.team, ask.slots - 1)
                self._picks += 1
                run.served = run.team.served = self._picks
            run.kinds[ask.kind].remove(ask)
            self._changed(ask.run, run)

    def pick(self, free: int) -> Ask | None:
        """See QueuePolicy."""
        if not self._ready:
            return None
        run = min(self._ready.values(), key=_key)
        assert run.first is not None
        if run.first.slots > free:
            return None
        self._picks += 1
        before = run.slots_wanted
        ask = run.serve(self._picks)
        for name, team in _settle(self._debtors, run.team, ask.slots).items():
            self._forget_team(name, team)
        self._slots_wanted += run.slots_wanted - before
        if run.first is None:
            del self._ready[ask.run]
        del self._asks[ask.ticket]
        self._tokens_changed(ask.caps)
        return ask

    def took(self, run: str, kind: RunKind, slots: int = 1, caps: Caps = ()) -> None:
        """See QueuePolicy. It may exceed the run's cap, and those of tokens."""
        found = self._run(run)
        found.hold(kind, slots, self._picks, caps)
        self._changed(run, found)
        self._tokens_changed(caps)

    def gave(self, run: str, kind: RunKind, slots: int = 1, caps: Caps = ()) -> None:
        """See QueuePolicy."""
        found = self._runs.get(run)
        held = found.kinds[kind].held if found is not None and kind in found.kinds else 0
        if found is None or slots > held:
            raise ValueError(f"run {run!r} cannot return {slots} slots of {kind}: it holds {held}")
        found.hold(kind, -slots, self._picks, caps)
        self._changed(run, found)
        self._tokens_changed(caps)

    def resetting(self, run: str, slots: int) -> None:
        """See QueuePolicy."""
        found = self._run(run)
        found.resetting += slots
        found.team.held += slots
        self._changed(run, found)

    def position(self, ticket: int) -> int:
        """See QueuePolicy: the place among the asks of the same run and kind. What is served before it of others is in
        :meth:`slots_ahead`."""
        ask = self._asks.get(ticket)
        return 0 if ask is None else self._runs[ask.run].kinds[ask.kind].position(ticket)

    @property
    def slots_wanted(self) -> int:
        """See QueuePolicy: without those of paused runs; of others, what their caps and those of tokens allow."""
        left: dict[str, int] = {}
        return self._slots_wanted + sum(run.wanted(left) for run in self._capped.values())

    def __len__(self) -> int:
        return len(self._asks)

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._asks))

    # -- views --------------------------------------------------------------------------------

    def share_of(self, run: str) -> Share:
        """What the run may have."""
        return self._shares.get(run, self._default)

    def held(self, run: str) -> int:
        """Number of slots the run holds."""
        found = self._runs.get(run)
        return 0 if found is None else found.held

    def waiting(self, run: str) -> int:
        """Number of slots the run waits for."""
        found = self._runs.get(run)
        return 0 if found is None else found.slots_waiting

    def runs(self) -> dict[str, RunView]:
        """Every run that holds or waits for slots."""
        return {name: run.view() for name, run in self._runs.items() if run.held or run.slots_waiting}

    def upcoming(self, limit: int = 1000) -> dict[int, int]:
        """The tickets that would be served next if slots became free and nothing else changed, in order, each with
        the number of slots granted before it, which is at most ``limit``. It copies
        the queues: a few ms with 10,000 asks."""
        tokens = self._tokens.copy()
        copies = {name: team.copy(tokens) for name, team in self._teams.items()}
        debtors = {name: copies[name] for name in self._debtors}
        heap = _heap(copies.values())
        found: dict[int, int] = {}
        ahead, picks = 0, self._picks
        while heap and ahead <= limit:
            key, run = heap[0]
            if run.capped:  # what others got since may count to its tokens
                run.update()
                if run.first is None:
                    heapq.heappop(heap)
                    continue
            if key != run.key:  # another run of its team was served
                heapq.heapreplace(heap, (run.key, run))
                continue
            picks += 1
            ask = run.serve(picks)
            found[ask.ticket] = ahead
            ahead += ask.slots
            if _settle(debtors, run.team, ask.slots):  # their runs are served earlier than the heap has them
                heap = _heap(copies.values())
            elif run.first is None:
                heapq.heappop(heap)
            else:
                heapq.heapreplace(heap, (run.key, run))  # tickets make keys unique: runs are never compared
        return found

    def slots_ahead(self, ticket: int, limit: int = 1000) -> int | None:
        """Number of slots granted before this ask's, see :meth:`upcoming`; None if more than ``limit``, or if it
        could not be served at all as things are. For many tickets call upcoming once."""
        return self.upcoming(limit).get(ticket)

    def why(self, ticket: int) -> Literal["queue", "cap", "paused"] | None:
        """What the ask waits for: its turn (or enough slots, in its turn), slots of its own run or token to come back,
        or the run to be resumed. None if it is not in the line."""
        ask = self._asks.get(ticket)
        if ask is None:
            return None
        run = self._runs[ask.run]
        if run.share.paused:
            return "paused"
        return "queue" if run.first is not None and _allowed(ask, self._tokens) else "cap"

    def held_by(self, token: str) -> int:
        """Number of slots that count to a token with a cap."""
        return self._tokens[token]

    def too_large(self, total_slots: int) -> list[int]:
        """Tickets of asks that can never be served, in order: larger than their run's cap or than the farm at its
        largest. One of them blocks those behind it: the caller should refuse them. (A cap of 0 is a pause.)"""

        def most(name: str) -> int:
            cap = self._runs[name].share.cap
            return total_slots if cap is None else min(cap, total_slots)

        return sorted(ask.ticket for ask in self._asks.values() if ask.slots > most(ask.run) > 0)

    # -- decisions about shares ---------------------------------------------------------------

    def to_reclaim(self, free: int, until: int | None = None) -> list[tuple[str, RunKind]]:
        """Whose leases should be ended for the sake of guarantees: a run and kind, whose youngest lease is meant, for
        each slot; empty if none should.

        Slots are reclaimed while asks (of tickets up to ``until``) within their runs' guarantees wait for more than
        are ``free`` or about to be, from the run that is most above its own guarantee for its weight. Nobody falls
        below a guarantee by it, so no slot is reclaimed to and fro.
        """
        missing = sum(_owed(run, until) for run in self._runs.values()) - free
        spare = heapq.merge(*(_spare(name, run) for name, run in self._runs.items()))
        return [(name, kind) for _, name, kind in islice(spare, max(0, missing))]

    def fair_shares(self, total_slots: int) -> dict[str, float]:
        """The number of slots each run would hold if all were divided by the rules, given what it holds and waits
        for."""
        return fair_shares(self.runs(), total_slots, self._team_weights)

    def __repr__(self) -> str:
        return f"<FairShare {len(self)} waiting, {len(self._runs)} runs>"

    # -- upkeep -------------------------------------------------------------------------------

    def _run(self, name: str) -> _Run:
        run = self._runs.get(name)
        if run is None:
            # It counts as just served. Otherwise one that comes and goes would always be before those that stay.
            team = self._teams.get(team_of(name))
            if team is None:
                team = self._teams[team_of(name)] = _Team(self._team_weight(name), self._picks)
            share = self._shares.get(name, self._default)
            run = _Run(name, team, share, self._kind_weights, self._picks, self._tokens)
            self._runs[name] = team.runs[name] = run
        return run

    def _team_weight(self, run: str) -> float:
        return team_weight(run, self._shares.get(run, self._default), self._team_weights)

    def _changed(self, name: str, run: _Run) -> None:
        before = run.slots_wanted
        run.update()
        run.team.rekey()
        self._slots_wanted += run.slots_wanted - before
        if run.capped:
            self._capped[name] = run
        else:
            self._capped.pop(name, None)
        if run.first is not None:
            self._ready[name] = run
            return
        self._ready.pop(name, None)
        if run.idle:
            del self._runs[name], run.team.runs[name]
            self._forget_team(team_of(name), run.team)

    def _forget_team(self, name: str, team: _Team) -> None:
        if not team.runs and not team.owed:
            self._teams.pop(name, None)

    def _owe(self, name: str, team: _Team, slots: int) -> None:
        if slots:
            team.owed += slots
            self._debtors[name] = team

    def _tokens_changed(self, caps: Caps) -> None:
        """Slots that count to these tokens were taken or given back: that matters to every run that waits by them."""
        if caps:
            for name, run in list(self._capped.items()):
                self._changed(name, run)


def _heap(teams: Iterable[_Team]) -> list[tuple[_Place, _Run]]:
    """Runs with somebody who may be served, by their places."""
    heap = [(run.key, run) for team in teams for run in team.runs.values() if run.first is not None]
    heapq.heapify(heap)
    return heap


def _settle(debtors: dict[str, _Team], served: _Team, slots: int) -> dict[str, _Team]:
    """Slots were granted to a team. Returns the others that owed; who owes nothing now is no debtor any more."""
    settled = {name: team for name, team in debtors.items() if team is not served}
    for name, team in settled.items():
        team.owed = max(0, team.owed - slots)
        team.rekey()
        if not team.owed:
            del debtors[name]
    return settled


def team_of(run: str) -> str:
    """The team of a run (``team/run``), with its slash; one without is its own."""
    team, slash, _ = run.partition("/")
    return team + slash


def team_weight(run: str, share: Share, teams: Mapping[str, float]) -> float:
    """The weight of the team of a run with this share."""
    team, slash, _ = run.partition("/")
    return teams.get(team, 1.0) if slash else share.weight


def fair_shares(
    runs: Mapping[str, RunView], total_slots: int, teams: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Weighted max-min shares, of teams and then of their runs: each gets ``weight * level`` slots, but at least its
    guarantee, at most its cap, and not more than it holds and waits for (a paused one: than it holds); the level is
    what makes use of all. ``teams``: their weights.

    If the guarantees alone exceed ``total_slots``, that is divided by weight up to the guarantees.
    """
    most = {name: _usable(view) for name, view in runs.items()}
    least = {name: min(view.share.guaranteed, most[name]) for name, view in runs.items()}
    if sum(least.values()) > total_slots:
        least, most = dict.fromkeys(runs, 0), least
    of_team: dict[str, list[str]] = {}
    for name in runs:
        of_team.setdefault(team_of(name), []).append(name)

    def bounds(names: Iterable[str]) -> tuple[int, int]:
        return sum(least[name] for name in names), sum(most[name] for name in names)

    weights = {team: team_weight(names[0], runs[names[0]].share, teams or {}) for team, names in of_team.items()}
    level = _level(((*bounds(names), weights[team]) for team, names in of_team.items()), total_slots)
    shares: dict[str, float] = {}
    for team, names in of_team.items():
        low, high = bounds(names)
        slots = max(low, min(high, weights[team] * level))
        within = _level(((least[name], most[name], runs[name].share.weight) for name in names), slots)
        for name in names:
            shares[name] = max(least[name], min(most[name], runs[name].share.weight * within))
    return shares


def _level(bounds: Iterable[tuple[int, int, float]], total_slots: float) -> float:
    """The level at which the shares, ``weight * level`` between least and most, amount to ``total_slots``."""
    filled, steps = 0.0, []
    for least, most, weight in bounds:
        filled += least
        steps += [(least / weight, weight), (most / weight, -weight)]  # where it begins and where it ceases to grow
    level = growth = 0.0
    for at, change in sorted(steps):
        reached = filled + growth * (at - level)
        if reached >= total_slots:
            return level + (total_slots - filled) / growth if growth else level
        filled, level, growth = reached, at, growth + change
    return level


def _usable(view: RunView) -> int:
    """Slots that the run could hold now."""
    if view.share.paused:
        return view.slots_held
    wanted = view.slots_held + view.slots_waiting - view.held_back
    return wanted if view.share.cap is None else min(wanted, view.share.cap)


def _owed(run: _Run, until: int | None) -> int:
    """Slots that the run must get within its guarantee for its asks of tickets up to ``until`` to be served."""
    if run.first is None or run.held + run.first.slots > run.share.guaranteed:
        return 0
    virtual = run.team.copy(run.tokens.copy()).runs[run.name]
    granted = owed = 0
    while virtual.first is not None and virtual.held + virtual.first.slots <= run.share.guaranteed:
        ask = virtual.serve(virtual.served + 1)
        granted += ask.slots
        if until is None or ask.ticket <= until:
            owed = granted
    return owed


def _spare(name: str, run: _Run) -> Iterator[tuple[float, str, RunKind]]:
    """The run's slots above its guarantee in the order in which it gives them up, with what they sort by among runs:
    how far above its guarantee it is, for its weight."""
    kinds = (kind for kind in RECLAIM_ORDER if kind in run.kinds for _ in range(run.kinds[kind].held))
    for above, kind in zip(range(run.held - run.share.guaranteed, 0, -1), kinds, strict=False):
        yield -above / run.share.weight, name, kind
