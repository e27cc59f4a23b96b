"""State machines of slots, containers and leases: which state may follow which. Pure, standard library only.

Three components track a slot, each with a table of its own: the pool (``POOL_SLOT_MOVES``), the supervisor
(``SLOT_PHASE_MOVES``) and the sandbox server (``sandbox/server/slot_states.py``). The tables differ where the
components' knowledge differs.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar


class SlotState(StrEnum):
    """States of a slot, as the server reports them and the pool keeps them."""

    free = "free"
    leased = "leased"
    resetting = "resetting"
    quarantined = "quarantined"
    gone = "gone"


class SlotPhase(StrEnum):
    """The supervisor's state of a slot."""

    absent = "absent"
    starting = "starting"
    ready = "ready"
    resetting = "resetting"
    sealing = "sealing"
    rerooting = "rerooting"
    """It gets the root of an image that its lease requested."""
    freezing = "freezing"
    """What it has written is kept as a checkpoint."""
    quarantined = "quarantined"


class ContainerState(StrEnum):
    """States of a container, as the pool sees them."""

    starting = "starting"
    ready = "ready"
    suspect = "suspect"
    draining = "draining"
    gone = "gone"


class LeaseState(StrEnum):
    """States of a lease: requested, held by its trajectory, ended."""

    requested = "requested"
    granted = "granted"
    released = "released"
    lost = "lost"


POOL_SLOT_MOVES: Mapping[SlotState, frozenset[SlotState]] = {
    # free -> resetting: the container found the slot broken by itself, or another client holds it.
    SlotState.free: frozenset({SlotState.leased, SlotState.resetting, SlotState.gone}),
    SlotState.leased: frozenset({SlotState.resetting, SlotState.gone}),
    # resetting -> leased: another client leased it before its release was reported.
    SlotState.resetting: frozenset({SlotState.free, SlotState.leased, SlotState.quarantined, SlotState.gone}),
    SlotState.quarantined: frozenset({SlotState.gone}),
    SlotState.gone: frozenset(),
}
SLOT_PHASE_MOVES: Mapping[SlotPhase, frozenset[SlotPhase]] = {
    SlotPhase.absent: frozenset({SlotPhase.starting}),
    # starting -> resetting: a start that failed cleanly and is retried.
    SlotPhase.starting: frozenset({SlotPhase.ready, SlotPhase.resetting, SlotPhase.quarantined}),
    SlotPhase.ready: frozenset(
        {SlotPhase.resetting, SlotPhase.sealing, SlotPhase.rerooting, SlotPhase.freezing, SlotPhase.quarantined}
    ),
    SlotPhase.resetting: frozenset({SlotPhase.starting, SlotPhase.quarantined}),
    SlotPhase.sealing: frozenset({SlotPhase.starting, SlotPhase.quarantined}),
    SlotPhase.rerooting: frozenset({SlotPhase.starting, SlotPhase.quarantined}),
    SlotPhase.freezing: frozenset({SlotPhase.starting, SlotPhase.quarantined}),
    # A slot that could not be verified clean is never used again.
    SlotPhase.quarantined: frozenset(),
}
CONTAINER_MOVES: Mapping[ContainerState, frozenset[ContainerState]] = {
    ContainerState.starting: frozenset({ContainerState.ready, ContainerState.draining, ContainerState.gone}),
    ContainerState.ready: frozenset({ContainerState.suspect, ContainerState.draining, ContainerState.gone}),
    ContainerState.suspect: frozenset({ContainerState.ready, ContainerState.draining, ContainerState.gone}),
    ContainerState.draining: frozenset({ContainerState.gone}),
    ContainerState.gone: frozenset(),
}
LEASE_MOVES: Mapping[LeaseState, frozenset[LeaseState]] = {
    LeaseState.requested: frozenset({LeaseState.granted, LeaseState.released, LeaseState.lost}),
    LeaseState.granted: frozenset({LeaseState.released, LeaseState.lost}),
    LeaseState.released: frozenset(),
    LeaseState.lost: frozenset(),
}

State = TypeVar("State", SlotState, SlotPhase, ContainerState, LeaseState)


class IllegalMoveError(RuntimeError):
    """A bug in agentenv: the table has no such move. Nothing was changed."""


def move(table: Mapping[State, frozenset[State]], state: State, to: State, what: object = "it") -> State:
    """``to``, if the table allows it after ``state``. Raises IllegalMoveError, which names ``what``."""
    if to not in table[state]:
        raise IllegalMoveError(f"{what!r} cannot go from {state.value} to {to.value}")
    return to
