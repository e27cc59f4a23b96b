"""The ledger's records of slots, containers and leases: states with their table of legal moves, and counts."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic

from agentenv.wire.leases import NO_TAGS, SlotReport, Tags
from agentenv.wire.states import (
    CONTAINER_MOVES,
    LEASE_MOVES,
    POOL_SLOT_MOVES,
    ContainerState,
    LeaseState,
    SlotState,
    State,
    move,
)

# Looked at for every container a scale decision takes away, and enum attributes are slow in Python 3.11.
_READY, _SUSPECT, _DRAINING = ContainerState.ready, ContainerState.suspect, ContainerState.draining


class _Stateful(Generic[State]):
    """Something with a state that moves only along its table."""

    __slots__ = ("_state",)
    _moves: ClassVar[Mapping[Any, frozenset[Any]]]

    def __init__(self, state: State) -> None:
        self._state: State = state

    @property
    def state(self) -> State:
        """Where it is now."""
        return self._state

    def move(self, to: State) -> None:
        """Go to ``to``. Raises IllegalMoveError, changing nothing, when the table has no such move."""
        self._state = move(self._moves, self._state, to, self)


class SlotRecord(_Stateful[SlotState]):
    """One slot of one container. ``lease`` is the id of the live lease on it, if any; ``since`` is when it came into
    its state, as far as is known; ``reset_for`` names the run whose lease left it to be reset, until it is clean."""

    __slots__ = ("container", "index", "lease", "reset_for", "since")
    _moves = POOL_SLOT_MOVES

    def __init__(self, container: str, index: int, state: SlotState = SlotState.free, since: float = 0.0) -> None:
        super().__init__(state)
        self.container = container
        self.index = index
        self.since = since
        self.lease: int | None = None
        self.reset_for: str | None = None

    def __repr__(self) -> str:
        holder = "" if self.lease is None else f" lease {self.lease}"
        return f"<Slot {self.container}/{self.index} {self._state}{holder}>"


@dataclass(frozen=True)
class Holder:
    """Whose lease a container reports."""

    trajectory: str
    tags: Tags
    epoch: int
    held_s: float = 0.0
    """For how long, as far as the container knows."""


def holder_of(report: SlotReport) -> Holder | None:
    """Whose lease a report shows; None if the slot is not leased."""
    if report.state is not SlotState.leased or report.trajectory is None or report.tags is None:
        return None
    return Holder(report.trajectory, report.tags, report.epoch, report.in_state_s or 0.0)


class LeaseRecord(_Stateful[LeaseState]):
    """One grant of a slot. ``ticket`` is the waiter it is meant for, whose trajectory at ``position`` it serves; None
    once nobody waits for it. ``epoch`` is the slot's, once a container has told it. ``held_since_s`` is the pool's
    time at which it was handed over."""

    __slots__ = ("container", "epoch", "held_since_s", "id", "position", "slot", "tags", "ticket", "trajectory")
    _moves = LEASE_MOVES

    def __init__(
        self,
        lease_id: int,
        ticket: int | None,
        trajectory: str,
        slot: SlotRecord,
        *,
        tags: Tags = NO_TAGS,
        position: int = 0,
        state: LeaseState = LeaseState.requested,
    ) -> None:
        super().__init__(state)
        self.id = lease_id
        self.ticket = ticket
        self.trajectory = trajectory
        self.tags = tags
        self.position = position
        self.container = slot.container
        self.slot = slot.index
        self.epoch: int | None = None
        self.held_since_s = 0.0

    @property
    def name(self) -> str:
        """As a farm's clients know it (:data:`agentenv.wire.farm.LeaseId`)."""
        return f"{self.container}/{self.slot}/{self.epoch}"

    @property
    def held(self) -> bool:
        """Whether a trajectory has it: granted, and not waiting for the rest of its group."""
        return self._state is LeaseState.granted and self.ticket is None

    def __repr__(self) -> str:
        return f"<Lease {self.id} {self._state} {self.container}/{self.slot} {self.trajectory!r}>"


class ContainerRecord(_Stateful[ContainerState]):
    """One container and its slots.

    ``busy`` counts slots that are leased or being reset; ``idle_since`` is when that became 0 (None
    while it is not, or before the inventory).
    ``stuck``: why its slots do not come back from their reset; empty as long as they do.
    ``unwanted``: why another is wanted in its place; empty while it is not.
    ``offered``: the ledger's heap of containers with free slots has an entry for it.
    """

    __slots__ = (
        "_free", "busy", "id", "idle_since", "index", "node", "offered", "quarantined", "slots", "stuck", "unwanted"
    )  # fmt: skip
    _moves = CONTAINER_MOVES

    def __init__(self, container_id: str, index: int, node: str = "") -> None:
        super().__init__(ContainerState.starting)
        self.id = container_id
        self.index = index
        self.node = node
        self.slots: list[SlotRecord] = []
        self._free: list[int] = []
        self.busy = 0
        self.quarantined = 0
        self.idle_since: float | None = None
        self.offered = False
        self.stuck = ""
        self.unwanted = ""

    def fill(self, states: Iterable[SlotState], now: float) -> None:
        """Take the inventory: one state per slot, in order of index."""
        self.slots = [SlotRecord(self.id, index, state, now) for index, state in enumerate(states)]
        self._free = [slot.index for slot in self.slots if slot.state is SlotState.free]
        self.quarantined = sum(slot.state is SlotState.quarantined for slot in self.slots)
        self.busy = len(self.slots) - len(self._free) - self.quarantined
        self.idle_since = None if self.busy else now

    @property
    def serving(self) -> bool:
        """Whether it has slots, regardless of whether it takes new leases at this moment."""
        return self._state is _READY or self._state is _SUSPECT

    @property
    def leaving(self) -> bool:
        """Whether it is leaving, permanently."""
        return self._state is _DRAINING

    @property
    def free(self) -> int:
        """Number of slots that could be leased now: 0 unless ready."""
        return len(self._free) if self._state is _READY else 0

    def move_slot(self, slot: SlotRecord, to: SlotState, now: float) -> None:
        """Move a slot and keep the counts. Raises IllegalMoveError, changing nothing."""
        before = slot.state
        slot.move(to)
        slot.since = now
        if before is SlotState.free:
            self._take_out(slot.index)
        if to is SlotState.free:
            heapq.heappush(self._free, slot.index)
        self.quarantined += (to is SlotState.quarantined) - (before is SlotState.quarantined)
        busy = (SlotState.leased, SlotState.resetting)
        self.busy += (to in busy) - (before in busy)
        if self.busy:
            self.idle_since = None
        elif self.idle_since is None:
            self.idle_since = now

    def _take_out(self, index: int) -> None:
        if self._free[0] == index:  # as for every lease
            heapq.heappop(self._free)
            return
        self._free.remove(index)
        heapq.heapify(self._free)

    def lowest_free(self) -> SlotRecord:
        """The free slot of lowest index. Raises IndexError if there is none."""
        return self.slots[self._free[0]]

    def __repr__(self) -> str:
        return f"<Container {self.id} #{self.index} {self._state} {self.busy}/{len(self.slots)} busy>"
