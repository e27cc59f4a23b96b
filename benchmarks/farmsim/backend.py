"""A cluster in simulated time: containers take a while to start and to stop, and some are lost."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from agentenv.slots.backends.base import ContainerEvent


@dataclass(frozen=True)
class Starts:
    """How long a start takes (drawn evenly), how many may be under way, and how long a stop takes."""

    between_s: tuple[float, float] = (1.0, 3.0)
    at_once: int = 50
    stop_s: float = 2.0


class NowhereBackend:
    """Starts nothing and tells nothing."""

    name = "nowhere"
    found = 0
    generation = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing is left behind."""

    async def scale(self, count: int) -> None:
        """See ContainerBackend."""

    async def events(self) -> AsyncIterator[ContainerEvent]:
        """There are none."""
        return
        yield

    async def replace(self, container_id: str, reason: str) -> None:
        """No container breaks here."""
        raise AssertionError(f"{container_id}: {reason}")


class SimulatedBackend(NowhereBackend):
    """Keeps the asked-for number of containers, as Nomad does: a stop and the start that follows overlap.

    ``at(delay_s, do, *what)`` is the simulation's agenda; ``started(id, index)`` and
    ``gone(id, scaled_down)`` are told what happens.
    """

    name = "simulated"

    def __init__(
        self,
        starts: Starts,
        chance: random.Random,
        at: Callable[..., None],
        started: Callable[[str, int], None],
        gone: Callable[[str, bool], None],
    ) -> None:
        self._starts = starts
        self._chance = chance
        self._at = at
        self._started = started
        self._gone = gone
        self._goal = 0
        self._number = 0
        self._queue: list[int] = []
        self._starting: dict[int, str] = {}
        self._running: dict[int, str] = {}
        self._stopping: set[str] = set()

    @property
    def there(self) -> int:
        """Containers that exist: starting, running or being stopped (those queued for a start do not)."""
        return len(self._starting) + len(self._running) + len(self._stopping)

    async def scale(self, count: int) -> None:
        """See ContainerBackend."""
        for index in range(count, self._goal):
            self._starting.pop(index, None)
            if (container := self._running.pop(index, None)) is not None:
                self._stopping.add(container)
                self._at(self._starts.stop_s, self._stopped, container)
        self._queue = [index for index in self._queue if index < count]
        self._queue += range(self._goal, count)
        self._goal = count
        self._start_some()

    def lose_one(self) -> None:
        """One running container dies; its place is filled again."""
        if not self._running:
            return
        index = self._chance.choice(list(self._running))
        container = self._running.pop(index)
        self._gone(container, False)
        if index < self._goal:
            self._queue.append(index)
            self._start_some()

    def _start_some(self) -> None:
        while self._queue and len(self._starting) < self._starts.at_once:
            index = self._queue.pop(0)
            self._number += 1
            container = self._starting[index] = f"c{index}-{self._number}"
            self._at(self._chance.uniform(*self._starts.between_s), self._ready, index, container)

    def _ready(self, index: int, container: str) -> None:
        if self._starting.get(index) == container:  # else it was scaled away while it started
            del self._starting[index]
            self._running[index] = container
            self._started(container, index)
        self._start_some()

    def _stopped(self, container: str) -> None:
        self._stopping.discard(container)
        self._gone(container, True)
