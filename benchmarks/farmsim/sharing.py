"""Runs that share a farm, in simulated time, around the real fair queue. Containers are left out: a slot that is
returned is free at once."""

from __future__ import annotations

import heapq
import math
import random
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from agentenv.slots.eta import FreedRate, eta_s
from agentenv.slots.queue_policy import Ask
from agentenv.slots.sharing import FairShare, Share

SIGMA = 0.8
"""Of the lognormal stays: one in twenty lasts four times the median."""
UPKEEP_S = 1.0
"""Between two looks at what to reclaim."""
SAMPLES = 300


@dataclass(frozen=True)
class Run:
    """A run that wants ``wants`` slots at any time, in groups of ``group``; when the last of a group has ended it asks
    for the next. ``stay_s`` is the median of a lease. It asks only during ``spells`` (from, until)."""

    name: str
    stay_s: float
    share: Share
    group: int = 1
    wants: int = 1000
    spells: tuple[tuple[float, float], ...] = ((0.0, math.inf),)

    @property
    def mean_stay_s(self) -> float:
        """Of its leases."""
        return self.stay_s * math.exp(SIGMA**2 / 2)


@dataclass(frozen=True)
class Shared:
    """One farm and its runs. Shares are measured from ``measured_from_s`` on; ``watched`` are sampled for the plot."""

    name: str
    slots: int
    runs: tuple[Run, ...]
    until_s: float
    measured_from_s: float = 0.0
    watched: tuple[str, ...] = ()
    reclaim_after_s: float | None = None


@dataclass
class Sample:
    """One run at one moment, and the slots that are idle although somebody waits."""

    at_s: float
    held: int
    fair: float
    idle: int


@dataclass
class SharedStory:
    """What happened. Seconds are of simulated time."""

    shared: Shared
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    slot_s: Counter[str] = field(default_factory=Counter)
    fair_slot_s: Counter[str] = field(default_factory=Counter)
    idle_slot_s: float = 0.0
    """While somebody waited."""
    leases: int = 0
    longest_wait_s: Counter[str] = field(default_factory=Counter)
    reached_s: dict[str, list[float]] = field(default_factory=dict)
    """By run, for each spell: from its first ask until it had 90 % of its fair share."""
    reclaimed: list[tuple[float, str]] = field(default_factory=list)
    """When, and whose lease."""
    estimates: list[tuple[float, float]] = field(default_factory=list)
    """Of an ask at random at each sample: how long it was said to wait yet, and how long it did."""
    pick_ns: array[int] = field(default_factory=lambda: array("q"))
    """Our own CPU time of each pick."""

    @property
    def off_by(self) -> dict[str, float]:
        """By run: how far its slot-seconds were above (below: negative) its fair share, as a share of it."""
        return {name: self.slot_s[name] / fair - 1 for name, fair in self.fair_slot_s.items() if fair}

    @property
    def idle(self) -> float:
        """The share of the farm that was idle while somebody waited."""
        shared = self.shared
        return self.idle_slot_s / (shared.slots * (shared.until_s - shared.measured_from_s))


@dataclass(eq=False)
class _Group:
    run: Run
    left: int


class SharedFarm:
    """One scenario from its start to its end. ``run()`` once."""

    def __init__(self, shared: Shared, seed: int = 0) -> None:
        self.story = SharedStory(shared, samples={name: [] for name in shared.watched})
        self._shared = shared
        self._chance = random.Random(seed)
        self._line = FairShare(runs={run.name: run.share for run in shared.runs})
        self._free = shared.slots
        self._now = self._counted_to = 0.0
        self._agenda: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = self._ticket = 0
        self._asking: set[str] = set()
        self._asked: dict[int, tuple[float, Run]] = {}
        """Tickets in the line: since when, and whose."""
        self._recent: deque[tuple[int, float]] = deque()
        """Tickets given less than ``reclaim_after_s`` ago, and when; ``_waited_long`` is the last before them."""
        self._waited_long = 0
        self._leases: dict[int, _Group] = {}
        self._by_age: dict[str, list[int]] = {run.name: [] for run in shared.runs}
        """Leases of each run, the youngest last; some may have ended."""
        self._freed = FreedRate(0.0)
        self._estimated: dict[int, tuple[float, float]] = {}
        """Tickets: when an estimate was made, and what."""
        self._climbs: dict[str, tuple[float, float]] = {}
        """Runs that have come and are not there yet: since when, and slots to reach."""

    def run(self) -> SharedStory:
        """Play it to the end."""
        for run in self._shared.runs:
            for begins, ends in run.spells:
                self._at(begins, self._come, run)
                self._at(ends, self._leave, run)
        self._at(0.0, self._sample)
        if self._shared.reclaim_after_s is not None:
            self._at(UPKEEP_S, self._reclaim)
        while self._agenda and self._agenda[0][0] <= self._shared.until_s:
            moment, _, do, what = heapq.heappop(self._agenda)
            self._count_to(moment)
            self._now = moment
            do(*what)
        return self.story

    def _at(self, moment: float, do: Callable[..., None], *what: Any) -> None:
        self._number += 1
        heapq.heappush(self._agenda, (moment, self._number, do, what))

    # -- runs ---------------------------------------------------------------------------------

    def _come(self, run: Run) -> None:
        self._asking.add(run.name)
        for _ in range(run.wants // run.group):
            self._ask(run)
        target = 0.9 * self._line.fair_shares(self._shared.slots)[run.name]
        self._climbs[run.name] = (self._now, target)
        self._serve()

    def _leave(self, run: Run) -> None:
        """It asks no more; its leases go on."""
        self._asking.discard(run.name)
        self._climbs.pop(run.name, None)
        for ticket in [ticket for ticket, (_, whose) in self._asked.items() if whose is run]:
            self._line.withdraw(ticket)
            del self._asked[ticket]
        self._serve()

    def _ask(self, run: Run) -> None:
        self._ticket += 1
        self._line.push(Ask(self._ticket, run.group, run.name))
        self._asked[self._ticket] = (self._now, run)
        if self._shared.reclaim_after_s is not None:
            self._recent.append((self._ticket, self._now))

    def _end(self, lease: int) -> None:
        if self._return(lease):
            self._serve()

    def _return(self, lease: int) -> bool:
        group = self._leases.pop(lease, None)
        if group is None:
            return False  # it was reclaimed
        self._free += 1
        self._freed.freed(self._now)
        self._line.gave(group.run.name, "train")
        group.left -= 1
        if not group.left and group.run.name in self._asking:
            self._ask(group.run)
        return True

    # -- the farm -----------------------------------------------------------------------------

    def _serve(self) -> None:
        while self._free:
            began = time.thread_time_ns()
            ask = self._line.pick(self._free)
            self.story.pick_ns.append(time.thread_time_ns() - began)
            if ask is None:
                return
            self._grant(ask)

    def _grant(self, ask: Ask) -> None:
        story = self.story
        asked_at, run = self._asked.pop(ask.ticket)
        waited_s = self._now - asked_at
        if self._now >= self._shared.measured_from_s:
            story.longest_wait_s[ask.run] = max(story.longest_wait_s[ask.run], waited_s)  # type: ignore[assignment]
        if ask.ticket in self._estimated:
            when, said_s = self._estimated.pop(ask.ticket)
            story.estimates.append((said_s, self._now - when))
        self._free -= ask.slots
        story.leases += ask.slots
        group = _Group(run, ask.slots)
        for _ in range(ask.slots):
            lease = self._number
            self._leases[lease] = group
            self._by_age[ask.run].append(lease)
            self._at(self._now + run.stay_s * self._chance.lognormvariate(0, SIGMA), self._end, lease)
        since, slots = self._climbs.get(ask.run, (0.0, math.inf))
        if self._line.held(ask.run) >= slots:
            del self._climbs[ask.run]
            story.reached_s.setdefault(ask.run, []).append(self._now - since)

    def _reclaim(self) -> None:
        after_s = self._shared.reclaim_after_s
        assert after_s is not None
        while self._recent and self._recent[0][1] <= self._now - after_s:
            self._waited_long, _ = self._recent.popleft()
        for run, _ in self._line.to_reclaim(self._free, self._waited_long):
            while not self._return(self._by_age[run].pop()):
                pass
            self.story.reclaimed.append((self._now, run))
        self._serve()
        self._at(self._now + UPKEEP_S, self._reclaim)

    # -- accounts -----------------------------------------------------------------------------

    def _count_to(self, moment: float) -> None:
        took_s = moment - max(self._counted_to, self._shared.measured_from_s)
        self._counted_to = moment
        if took_s > 0:
            for run in self._shared.runs:
                self.story.slot_s[run.name] += took_s * self._line.held(run.name)  # type: ignore[assignment]
            if len(self._line):
                self.story.idle_slot_s += took_s * self._free

    def _sample(self) -> None:
        shares = self._line.fair_shares(self._shared.slots)
        step_s = self._shared.until_s / SAMPLES
        if self._now >= self._shared.measured_from_s:
            for name, fair in shares.items():
                self.story.fair_slot_s[name] += step_s * fair  # type: ignore[assignment]
            self._estimate()
        idle = self._free if len(self._line) else 0
        for name, samples in self.story.samples.items():
            samples.append(Sample(self._now, self._line.held(name), shares.get(name, 0.0), idle))
        self._at(self._now + step_s, self._sample)

    def _estimate(self) -> None:
        upcoming = self._line.upcoming()
        tickets = [ticket for ticket in upcoming if ticket not in self._estimated]
        if tickets:
            ticket = self._chance.choice(tickets)
            missing = upcoming[ticket] + self._asked[ticket][1].group - self._free
            said_s = eta_s(missing, self._freed.per_s(self._now))
            if said_s:
                self._estimated[ticket] = (self._now, said_s)
