"""How many containers there should be. Pure: decides from a state and a time, does nothing.

Up: at once, by what is missing. Down: the containers of highest index, when they have stood empty, when
nothing has moved for a while, and when what remains would have carried the highest demand of late. So a
step down is followed by a step up only if demand exceeds everything it has been within ``idle_after_s``.
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
"""Fewer spare slots than one in so many of the farm's are kept (unless a step reaches the minimum)."""
LONGEST_STEP = 250
"""A step down takes at most so many containers, so that a decision over any number of them takes well under 1 ms."""
_PEAK_STEPS = 32
"""Parts a window of peaks is kept in: a peak is remembered up to one part longer than the window."""


class ContainerLoad(Protocol):
    """What scaling looks at in one container; :class:`agentenv.slots.records.ContainerRecord` is one."""

    @property
    def index(self) -> int:
        """Its place: scaling down takes the highest."""

    @property
    def serving(self) -> bool:
        """It has its slots and is not on its way out."""

    @property
    def leaving(self) -> bool:
        """It is on its way out."""

    @property
    def free(self) -> int:
        """Slots that could be leased now."""

    @property
    def busy(self) -> int:
        """Slots that are leased or being reset."""

    @property
    def idle_since(self) -> float | None:
        """Since when nothing is busy, None while something is or its slots are not known."""


@dataclass(frozen=True)
class ScaleState:
    """All a decision rests on.

    ``containers`` is in order of index, and only looked at from the top, as far as containers are taken
    away; ``peak`` is the largest ``load.demand`` of the last ``idle_after_s``; ``changed_at`` is when
    ``goal`` last moved.
    """

    goal: int
    load: Load
    containers: Sequence[ContainerLoad]
    slots_per_container: int
    changed_at: float
    peak: int


@dataclass(frozen=True)
class ScalePolicy:
    """Between ``min_containers``, kept warm, and ``max_containers``, which counts every container there is.

    ``target_idle_slots`` are kept free beyond what is asked for. A container is taken away when it and all
    above it have been empty for ``idle_after_s`` and ``cooldown_s`` have passed since the goal last moved.
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
            # Those on their way out are still there: what replaces them waits for its place.
            return max(goal, min(wanted, self.max_containers - state.load.draining))
        if state.load.waiting or now - state.changed_at < self.cooldown_s:
            return goal
        return self._shrunk(state, goal, now)

    def _missing(self, state: ScaleState, goal: int) -> int:
        """Slots there should be beyond those there are, will be in a moment, or are being started."""
        load = state.load
        coming = max(0, goal - load.serving) * state.slots_per_container
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
        """Spare slots that are too few to go down for."""
        slots = state.slots_per_container
        # A demand of n independent trajectories swings by √n of itself: twice that is no news.
        noise = math.ceil(2 * math.sqrt(state.peak) / slots)
        return max(goal // DEAD_BAND, noise) * slots

    def _removable(self, state: ScaleState, goal: int, now: float) -> Iterator[int]:
        """From the top down to the first that must stay: the free slots that go with each container."""
        containers = state.containers
        asked_long_ago = now - state.changed_at >= self.idle_after_s
        empty_since = now - self.idle_after_s
        at = bisect_left(containers, goal, key=lambda one: one.index)  # those above are leaving as it is
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
                return  # asked for and still starting: as good as in use
            yield given


class Peak:
    """The largest of the values of the last ``window_s``. Small whatever the number of values."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._step_s = window_s / _PEAK_STEPS
        self._falling: deque[tuple[float, int]] = deque()
        """Times and values, each value above all that came after it."""

    def add(self, value: int, now: float) -> int:
        """One more value; the peak with it."""
        falling = self._falling
        while falling and falling[-1][1] <= value:
            falling.pop()
        # A value below one of the same moment becomes the peak only if nothing came after it: it is kept then.
        if not falling or now - falling[-1][0] >= self._step_s:
            falling.append((now, value))
        while falling[0][0] < now - self._window_s - self._step_s:
            falling.popleft()
        return falling[0][1]
