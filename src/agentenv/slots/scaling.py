"""How many containers there should be. Pure: decides from a state and a time, does nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class ContainerLoad(Protocol):
    """What scaling looks at in one container; :class:`agentenv.slots.slot.Container` is one."""

    @property
    def index(self) -> int:
        """Its place: scaling down takes the highest."""

    @property
    def serving(self) -> bool:
        """It has its slots and is not on its way out."""

    @property
    def free(self) -> int:
        """Slots that could be leased now."""

    @property
    def busy(self) -> int:
        """Slots that are leased or being reset."""

    @property
    def idle_since(self) -> float | None:
        """Since when nothing is busy, None while something is."""


@dataclass(frozen=True)
class ScaleState:
    """All a decision rests on. ``containers`` is in order of index; ``changed_at`` is when ``goal`` last moved."""

    goal: int
    waiting: int
    containers: Sequence[ContainerLoad]
    slots_per_container: int
    changed_at: float


@dataclass(frozen=True)
class ScalePolicy:
    """Up at once by demand; down, later, by taking containers of highest index that stand empty.

    ``target_idle_slots`` are kept free beyond what is asked for. A container is taken away when it
    has been empty for ``idle_after_s``, ``cooldown_s`` have passed since the goal last moved, and what
    remains still has the target free: so a decision down is never followed by one up unless demand grew.
    """

    min_containers: int
    max_containers: int
    idle_after_s: float
    target_idle_slots: int = 0
    cooldown_s: float = 5.0

    def decide(self, state: ScaleState, now: float) -> int:
        """The number of containers there should be, within min and max."""
        goal = max(self.min_containers, min(self.max_containers, state.goal))
        free = sum(container.free for container in state.containers)
        missing = state.waiting + self.target_idle_slots - free - self._coming(state, goal)
        if missing > 0:
            return min(self.max_containers, goal + -(-missing // state.slots_per_container))
        if state.waiting or now - state.changed_at < self.cooldown_s:
            return goal
        return self._shrunk(state, goal, free, now)

    def _coming(self, state: ScaleState, goal: int) -> int:
        """Slots that were asked for and do not serve yet."""
        serving = sum(container.serving for container in state.containers)
        return max(0, goal - serving) * state.slots_per_container

    def _shrunk(self, state: ScaleState, goal: int, free: int, now: float) -> int:
        containers, tail = state.containers, len(state.containers)
        while goal > self.min_containers:
            first, given = tail, 0
            while first and containers[first - 1].index >= goal - 1:
                first -= 1
                if not self._removable(containers[first], now):
                    return goal
                given += containers[first].free
            if first == tail and now - state.changed_at < self.idle_after_s:
                return goal  # asked for and still starting: as good as in use
            free -= given
            if free < self.target_idle_slots:
                return goal
            tail, goal = first, goal - 1
        return goal

    def _removable(self, container: ContainerLoad, now: float) -> bool:
        if not container.serving:
            return not container.busy
        return container.idle_since is not None and now - container.idle_since >= self.idle_after_s
