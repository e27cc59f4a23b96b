"""Running counts of a ledger's slots and containers, so that a farm of 10,000 slots is never scanned."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from agentenv.slots.records import ContainerRecord, SlotRecord
from agentenv.wire.states import ContainerState, SlotState

FREEING_S = 2.0
"""A slot whose reset began less than this long ago counts as about to be free, after that as stuck. Where resets turn
out to take longer, the time is doubled, up to LONGEST_FREEING_S, so that the farm does not grow for their sake; each
timely reset takes a tenth of it back."""
LONGEST_FREEING_S = 30.0


@dataclass(frozen=True)
class Load:
    """Usage and capacity at one moment.

    ``free``: slots that can be leased now. ``freeing``: slots whose reset began a short time ago (FREEING_S), on
    containers that lease. ``leased``: of all containers. ``stuck``: resets that take longer. ``serving``,
    ``draining``: containers. ``held_up``: indexes of those of ``draining`` whose slots are not all back: nothing takes
    their place yet.
    """

    waiting: int = 0
    free: int = 0
    freeing: int = 0
    leased: int = 0
    stuck: int = 0
    serving: int = 0
    draining: int = 0
    held_up: tuple[int, ...] = ()

    def lingering(self, goal: int) -> int:
        """How many of the first ``goal`` containers take no leases, and are not replaced yet."""
        return sum(index < goal for index in self.held_up)

    @property
    def demand(self) -> int:
        """Slots needed now: requested, leased, or stuck in their reset."""
        return self.waiting + self.leased + self.stuck


class Counts:
    """Moves slots and containers between states and keeps the counts. Methods raise IllegalMoveError as these do."""

    def __init__(self) -> None:
        self.slots: Counter[SlotState] = Counter()
        self.containers: Counter[ContainerState] = Counter()
        self._free = 0
        self._freeing: OrderedDict[SlotRecord, float] = OrderedDict()
        self._late: set[SlotRecord] = set()
        self._freeing_s = FREEING_S
        self._draining: set[ContainerRecord] = set()

    def started(self, container: ContainerRecord) -> None:
        """Add a new container."""
        self.containers[container.state] += 1

    def fill(self, container: ContainerRecord, states: Iterable[SlotState], now: float) -> None:
        """Add its slots; it had none before."""
        container.fill(states, now)
        self.slots.update(slot.state for slot in container.slots)

    def move_container(self, container: ContainerRecord, to: ContainerState) -> None:
        """Move a container along its table."""
        before, free = container.state, container.free
        container.move(to)
        self.containers[before] -= 1
        self.containers[to] += 1
        self._free += container.free - free
        self._draining.discard(container)
        if to is ContainerState.draining:
            self._draining.add(container)
        if to is not ContainerState.ready:
            for slot in container.slots:
                self._freeing.pop(slot, None)
                self._late.discard(slot)

    def move_slot(self, container: ContainerRecord, slot: SlotRecord, to: SlotState, now: float) -> None:
        """Move a slot along its table."""
        before, free = slot.state, container.free
        container.move_slot(slot, to, now)
        self.slots[before] -= 1
        self.slots[to] += 1
        self._free += container.free - free
        if before is SlotState.resetting:
            if self._freeing.pop(slot, None) is not None:
                self._freeing_s = max(0.9 * self._freeing_s, FREEING_S)
            elif slot in self._late:
                self._late.remove(slot)
                self._freeing_s = min(2.0 * self._freeing_s, LONGEST_FREEING_S)
        elif to is SlotState.resetting and container.state is ContainerState.ready:
            self._freeing[slot] = now

    def forget_gone(self) -> None:
        """Drop the counts of what is gone."""
        del self.containers[ContainerState.gone]
        del self.slots[SlotState.gone]

    @property
    def free(self) -> int:
        """Slots that can be leased now."""
        return self._free

    def load(self, waiting: int, now: float) -> Load:
        """The current load, given the number of waiters."""
        while self._freeing and now - next(iter(self._freeing.values())) >= self._freeing_s:
            self._late.add(self._freeing.popitem(last=False)[0])
        freeing = len(self._freeing)
        return Load(
            waiting=waiting,
            free=self._free,
            freeing=freeing,
            leased=self.slots[SlotState.leased],
            stuck=self.slots[SlotState.resetting] - freeing,
            serving=self.containers[ContainerState.ready] + self.containers[ContainerState.suspect],
            draining=self.containers[ContainerState.draining],
            held_up=tuple(container.index for container in self._draining if container.busy),
        )
