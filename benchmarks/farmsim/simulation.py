"""Plays pool, backend and containers in simulated time around the real Ledger and Scaler."""

from __future__ import annotations

import heapq
import random
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from agentenv.config import PoolSettings
from agentenv.slots.commands import Command, EndLease, Expire, Grant, HandOver, Reclaim, Retire
from agentenv.slots.ledger import Ledger
from agentenv.slots.scaler import Scaler
from agentenv.wire.leases import SlotRequest
from agentenv.wire.states import SlotState
from benchmarks.farmsim.backend import SimulatedBackend, Starts
from benchmarks.farmsim.loads import Load

_ONE = SlotRequest(("t",))
ANSWER_S = 0.003
"""From asking a container for a lease to its answer."""
RESET_S = (0.008, 0.03)
RETRY_S = 1.0
"""A trajectory whose container was lost asks again after this long."""
WAKE_MIN_S, WAKE_MAX_S = 0.01, 1.0
"""As the pool: between two looks at deadlines and scaling."""


@dataclass(frozen=True)
class Scenario:
    """One load on one farm."""

    name: str
    load: Load
    settings: PoolSettings
    starts: Starts
    lost_every_s: float | None = None
    """Mean time between two containers lost."""
    until_s: float = 1800.0
    slots: int = 10


@dataclass
class Sample:
    """The farm at one second."""

    at_s: float
    demand: int
    goal: int
    serving: int


@dataclass
class Story:
    """What happened."""

    scenario: Scenario
    samples: list[Sample] = field(default_factory=list)
    goals: list[tuple[float, int, int]] = field(default_factory=list)
    """Moves of the goal: when, to what, and the demand (slots) then."""
    waits_s: array[float] = field(default_factory=lambda: array("d"))
    took_ns: dict[str, array[int]] = field(default_factory=dict)
    """Our own CPU time of each operation."""
    leases: int = 0
    lost: int = 0
    """Leases that ended because their container was lost (killed on purpose by the scenario)."""
    lost_to_scaling: int = 0
    timed_out: int = 0
    most_containers: int = 0
    most_slots_leased: int = 0


class TimedScaler(Scaler):
    """Notes what each decision costs."""

    took_ns: array[int]

    def decide(self, ledger: Ledger, now: float) -> int:
        """See Scaler."""
        began = time.thread_time_ns()
        wanted = super().decide(ledger, now)
        self.took_ns.append(time.thread_time_ns() - began)
        return wanted


class Simulation:
    """One scenario, from an empty farm to its end. ``run()`` once."""

    def __init__(self, scenario: Scenario, seed: int = 0) -> None:
        self.scenario = scenario
        self.story = Story(scenario)
        self.now = 0.0
        self.ledger = Ledger()
        self._chance = random.Random(seed)
        self._agenda: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = 0
        self._backend = SimulatedBackend(scenario.starts, self._chance, self.at, self._started, self._gone)
        self._scaler = TimedScaler(self._backend, scenario.settings, 0.0)
        self._scaler.took_ns = self.story.took_ns["decide"] = array("q")
        self._stays: dict[int, tuple[float, float]] = {}
        """Ticket → when it asked, how long it will stay."""
        self._running: dict[int, float] = {}
        self._upkeep_at = float("inf")
        self._upkeep_last = -1.0
        self._unfinished = 0

    # -- time ---------------------------------------------------------------------------------

    def at(self, delay_s: float, do: Callable[..., None], *what: Any) -> None:
        """Do it after so many seconds."""
        self._number += 1
        heapq.heappush(self._agenda, (self.now + delay_s, self._number, do, what))

    def run(self) -> Story:
        """Play it to the end."""
        arrivals = self.scenario.load.arrivals(self._chance)
        self._next_arrival(arrivals)
        self._sample()
        if self.scenario.lost_every_s is not None:
            self.at(self._chance.expovariate(1 / self.scenario.lost_every_s), self._lose_one)
        _finish(self._scaler.start(self.now))
        self._wake()
        while self._agenda and self._agenda[0][0] <= self.scenario.until_s:
            self.now, _, do, what = heapq.heappop(self._agenda)
            do(*what)
        return self.story

    def _next_arrival(self, arrivals: Any) -> None:
        found = next(arrivals, None)
        if found is not None:
            when, stay_s = found
            self.at(when - self.now, self._arrive_and_go_on, stay_s, arrivals)

    def _arrive_and_go_on(self, stay_s: float, arrivals: Any) -> None:
        self._arrive(stay_s)
        self._next_arrival(arrivals)

    def _sample(self) -> None:
        load = self.ledger.load(self.now)
        self.story.samples.append(Sample(self.now, load.demand, self._scaler.goal, load.serving))
        self.at(1.0, self._sample)

    # -- trajectories -------------------------------------------------------------------------

    def _arrive(self, stay_s: float) -> None:
        self._unfinished += 1
        self._ask(stay_s)

    def _ask(self, stay_s: float) -> None:
        deadline = self.now + self.scenario.settings.acquire_timeout_s
        ticket, commands = self._timed("ask", self.ledger.enqueue, _ONE, self.now, deadline)
        self._stays[ticket] = (self.now, stay_s)
        self._perform(commands)
        self._wake()

    def _end(self, lease: int) -> None:
        if self._running.pop(lease, None) is None:
            return  # its container was lost meanwhile
        self._perform(self._timed("release", self.ledger.release, lease, self.now))
        self._over()

    def _over(self) -> None:
        self._unfinished -= 1
        for when, stay_s in self.scenario.load.after(self.now, self._unfinished, self._chance):
            self.at(when - self.now, self._arrive, stay_s)

    # -- the pool's part ----------------------------------------------------------------------

    def _timed(self, name: str, do: Callable[..., Any], *what: Any) -> Any:
        began = time.thread_time_ns()
        result = do(*what)
        took = time.thread_time_ns() - began
        self.story.took_ns.setdefault(name, array("q")).append(took)
        return result

    def _perform(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case Grant(lease):
                    self.at(ANSWER_S, self._confirm, lease)
                case HandOver(ticket, lease):
                    asked, stay_s = self._stays.pop(ticket)
                    self.story.waits_s.append(self.now - asked)
                    self.story.leases += 1
                    self._running[lease] = stay_s
                    self.at(stay_s, self._end, lease)
                case Reclaim(container, slot):
                    self.at(self._chance.uniform(*RESET_S), self._freed, container, slot)
                case EndLease(lease):
                    self.at(RETRY_S, self._ask, self._running.pop(lease))
                case Expire(ticket):
                    del self._stays[ticket]
                    self.story.timed_out += 1
                    self._over()
                case Retire():
                    raise AssertionError("no slot is quarantined here")

    def _confirm(self, lease: int) -> None:
        self._perform(self._timed("confirm", self.ledger.confirm, lease, self.now))

    def _freed(self, container: str, slot: int) -> None:
        self._perform(self._timed("freed", self.ledger.freed, container, slot, self.now))

    def _wake(self) -> None:
        when = max(self.now, self._upkeep_last + WAKE_MIN_S)
        if when < self._upkeep_at:
            self._upkeep_at = when
            self.at(when - self.now, self._keep_up, when)

    def _keep_up(self, when: float) -> None:
        if when != self._upkeep_at:
            return  # another look was asked for earlier than this one
        self._perform(self._timed("tick", self.ledger.tick, self.now))
        before = self._scaler.goal
        _finish(self._scaler.follow(self.ledger, self.now))
        if self._scaler.goal != before:
            self.story.goals.append((self.now, self._scaler.goal, self.ledger.load(self.now).demand))
        self._note_extremes()
        due = self._timed("next_deadline", self.ledger.next_deadline)
        pause_s = WAKE_MAX_S if due is None else max(WAKE_MIN_S, min(WAKE_MAX_S, due - self.now))
        self._upkeep_last = self.now
        self._upkeep_at = self.now + pause_s
        self.at(pause_s, self._keep_up, self._upkeep_at)

    def _note_extremes(self) -> None:
        self.story.most_containers = max(self.story.most_containers, self._backend.there)
        leased = self.ledger.load(self.now).leased
        self.story.most_slots_leased = max(self.story.most_slots_leased, leased)

    # -- the backend's events -----------------------------------------------------------------

    def _started(self, container: str, index: int) -> None:
        self._scaler.slots_per_container = self.scenario.slots
        self.ledger.started(container, index)
        free = [SlotState.free] * self.scenario.slots
        self._perform(self._timed("inventory", self.ledger.inventory, container, free, self.now))
        self._wake()

    def _gone(self, container: str, scaled_down: bool) -> None:
        commands = self._timed("lose", self.ledger.lose, container, "lost", self.now)
        ended = sum(isinstance(command, EndLease) for command in commands)
        if scaled_down:
            self.story.lost_to_scaling += ended
        self.story.lost += ended
        self._perform(commands)
        self._wake()

    def _lose_one(self) -> None:
        self._backend.lose_one()
        assert self.scenario.lost_every_s is not None
        self.at(self._chance.expovariate(1 / self.scenario.lost_every_s), self._lose_one)


def _finish(coroutine: Any) -> None:
    """Run what never waits: the simulated backend answers at once."""
    try:
        coroutine.send(None)
    except StopIteration:
        return
    raise AssertionError("it waited")
