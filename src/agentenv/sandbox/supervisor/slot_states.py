"""The life of a slot as the supervisor sees it, as a table; standard library only."""

from __future__ import annotations

from enum import Enum


class SlotPhase(Enum):
    """What the supervisor is doing with a slot."""

    absent = "absent"
    starting = "starting"
    ready = "ready"
    resetting = "resetting"
    sealing = "sealing"
    quarantined = "quarantined"


MOVES: dict[SlotPhase, frozenset[SlotPhase]] = {
    SlotPhase.absent: frozenset({SlotPhase.starting}),
    SlotPhase.starting: frozenset({SlotPhase.ready, SlotPhase.resetting, SlotPhase.quarantined}),
    SlotPhase.ready: frozenset({SlotPhase.resetting, SlotPhase.sealing, SlotPhase.quarantined}),
    SlotPhase.resetting: frozenset({SlotPhase.starting, SlotPhase.quarantined}),
    SlotPhase.sealing: frozenset({SlotPhase.starting, SlotPhase.quarantined}),
    SlotPhase.quarantined: frozenset(),
}
"""Every legal move. ``starting → resetting`` is a start that failed cleanly and is tried again;
nothing leads out of ``quarantined``: what could not be proved clean is never used again."""


class IllegalSlotMoveError(RuntimeError):
    """A move the table does not have; nothing was changed."""


def moved(now: SlotPhase, to: SlotPhase) -> SlotPhase:
    """``to``, when the table allows it. Raises IllegalSlotMoveError otherwise."""
    if to not in MOVES[now]:
        raise IllegalSlotMoveError(f"a slot cannot go from {now.value} to {to.value}")
    return to
