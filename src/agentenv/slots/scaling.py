"""Decides how many containers there should be, from a state and a time. Pure.

Up: immediately, by what is missing. Down: the containers of highest index, once they have been empty for a while,
the number of containers has not changed for a while, and the remaining ones would have met the recent peak of
demand. So a step down is followed by a step up only if demand exceeds its maximum within ``idle_after_s``.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from agentenv.slots.counts import Load

DEAD_BAND = 20
"""Hysteresis: do not scale down to reclaim less than 1/20 of the farm's slots (unless the step reaches the minimum)."""
LONGEST_STEP = 250
"""A step down removes at most this many containers, so that any decision takes well under 1 ms."""
_PEAK_STEPS = 32
"""Number of parts of a peak window: a peak is remembered for up to one part longer than the window."""


class ContainerLoad(Protocol):
    """The facts about one container that scaling uses; :class:`agentenv.slots.records.ContainerRecord` is one."""

    @property
    def index(self) -> int:
        """Its index: scaling down removes the highest first."""

    @property
    def serving(self) -> bool:
        """It has its slots and is not leaving."""

    @property
    def leaving(self) -> bool:
        """It is leaving."""

    @property
    def free(self) -> int:
        """Number of slots that could be leased now."""

    @property
    def busy(self) -> int:
        """Number of slots that are leased or being reset."""

    @property
    def idle_since(self) -> float | None:
        """Time since which no slot is busy; None while one is, or its slots are unknown."""


@dataclass(frozen=True)
class ScaleState:
    """The input of a decision.

    ``containers`` is in order of index; only the containers to remove, at its end, are inspected; ``peak`` is the
    largest ``load.demand`` of the last ``idle_after_s``; ``changed_at`` is when ``goal`` last changed.
    """

    goal: int
    load: Load
    containers: Sequence[ContainerLoad]
    slots_per_container: int
    changed_at: float
    peak: int


@dataclass(frozen=True)
class ScalePolicy:
    """Keeps the number of containers between ``min_containers``, kept warm, and ``max_containers``, which counts
    all existing ones.

    ``target_idle_slots`` are kept free beyond the demand. A container is removed when it and all above it have been
    empty for ``idle_after_s``, and ``cooldown_s`` have passed since the goal last changed.
    """

    min_containers: int
    max_containers: int
    idle_after_s: float
    target_idle_slots: int = 0
    cooldown_s: float = 5.0

    def decide(self, state: ScaleState, now: float) -> int:
        """The number of containers there should be, within min and max."""
        goal = max(self.min_containers, min(self.max_containers, state.goal))
        missing = self._missing(state, goal)
        if missing > 0:
            wanted = goal + -(-missing // state.slots_per_container)
            # Leaving containers still exist: their replacements wait until they are gone. One that keeps its index
            # for its last leases is among the goal's.
            leaving = state.load.draining - state.load.lingering(goal)
            return max(goal, min(wanted, self.max_containers - leaving))
        if state.load.waiting or now - state.changed_at < self.cooldown_s:
            return goal
        return self._shrunk(state, goal, now)

    def _missing(self, state: ScaleState, goal: int) -> int:
        """Slots needed beyond those that exist, are about to be free, or are being started."""
        load = state.load
        coming = max(0, goal - load.serving - load.lingering(goal)) * state.slots_per_container
        return load.waiting + self.target_idle_slots - load.free - load.freeing - coming

    def _shrunk(self, state: ScaleState, goal: int, now: float) -> int:
        load, lowest = state.load, goal
        spare = load.free + load.freeing - self.target_idle_slots - (state.peak - load.demand)
        left = spare
        for given in self._removable(state, goal, now):
            left -= given
            if left < 0:
                break
            lowest -= 1
        worth_it = lowest == self.min_containers or spare >= self._dead_band(state, goal)
        return lowest if worth_it else goal

    def _dead_band(self, state: ScaleState, goal: int) -> int:
        """Number of spare slots too small to scale down for."""
        slots = state.slots_per_container
        # The demand of n independent trajectories fluctuates by √n: twice that is not significant.
        noise = math.ceil(2 * math.sqrt(state.peak) / slots)
        return max(goal // DEAD_BAND, noise) * slots

    def _removable(self, state: ScaleState, goal: int, now: float) -> Iterator[int]:
        """From the highest container down to the first that must stay: the free slots removed with each."""
        containers = state.containers
        asked_long_ago = now - state.changed_at >= self.idle_after_s
        empty_since = now - self.idle_after_s
        at = bisect_left(containers, goal, key=lambda one: one.index)  # those above are leaving anyway
        for index in range(goal - 1, max(self.min_containers, goal - LONGEST_STEP) - 1, -1):
            given, seen = 0, False
            while at and containers[at - 1].index == index:
                at -= 1
                one = containers[at]
                if one.busy or (one.serving and (one.idle_since is None or one.idle_since > empty_since)):
                    return
                given += one.free
                seen = seen or one.serving or one.leaving
            if not seen and not asked_long_ago:
                return  # requested and still starting: counts as in use
            yield given


class Peak:
    """The largest value of the last ``window_s``. Uses little memory however many values are added."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._step_s = window_s / _PEAK_STEPS
        self._falling: deque[tuple[float, int]] = deque()
        """Times and values; each value is larger than all later ones."""

    def add(self, value: int, now: float) -> int:
        """Add a value; return the peak including it."""
        falling = self._falling
        while falling and falling[-1][1] <= value:
            falling.pop()
        # A value below another of the same moment becomes the peak only if nothing came after it, so it is kept then.
        if not falling or now - falling[-1][0] >= self._step_s:
            falling.append((now, value))
        while falling[0][0] < now - self._window_s - self._step_s:
            falling.popleft()
        return falling[0][1]
