"""The states of a slot in its server, and which event leads from which to which. Pure.

Whether something may be done with the slot now is decided by :func:`decide` from :data:`MOVES`. A change of the slot's
network is not a state: calls, seals and checkpoints may begin during it.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final, NamedTuple

from agentenv.wire.states import SlotState


class State(StrEnum):
    """What the slot is doing. From ``running`` to ``rerooting`` it has a lease, in the other states none."""

    resetting = "resetting"
    """The supervisor recreates it, or has not reported it yet."""
    free = "free"
    running = "running"
    """Its lease's calls may run."""
    agent_gone = "agent_gone"
    """As ``running``, but its agent has ended; the supervisor is about to report why."""
    sealing = "sealing"
    freezing = "freezing"
    """A checkpoint is made of it."""
    rerooting = "rerooting"
    """It gets another root: its lease's image, or a checkpoint."""
    reset_due = "reset_due"
    """Its lease ended while it was sealed, frozen or rerooted: it is reset when the supervisor has done that."""
    quarantined = "quarantined"


class Event(StrEnum):
    """What happens to a slot."""

    # by a client's request, or a deadline
    grant = "grant"
    grant_root = "grant_root"
    """As ``grant``, with a root that has to be made first."""
    use = "use"
    """A call or a transfer begins."""
    seal = "seal"
    freeze = "freeze"
    reroot = "reroot"
    connect = "connect"
    give_back = "give_back"
    """The lease ends: it is released, has expired, or was lost to a deadline."""
    # by the slot's agent
    agent_ended = "agent_ended"
    unusable = "unusable"
    """The agent does not respond, or its end was not explained in time."""
    # by the supervisor
    kept = "kept"
    """The slot is ready again in the same epoch, with its files."""
    replaced = "replaced"
    """The slot is ready again in the same epoch, with other files."""
    refused = "refused"
    """It cannot have the root, and is being reset."""
    not_frozen = "not_frozen"
    """There is no checkpoint; the slot is as it was."""
    made = "made"
    """It is ready in a new epoch."""
    taken_over = "taken_over"
    """It is ready for this new server process, with a lease that an earlier one granted."""
    lost = "lost"
    """It ended by itself, and is being reset."""
    failed = "failed"
    """It could not be proved clean."""


class Refusal(StrEnum):
    """Why an event may not happen now. The slot is unchanged."""

    not_free = "not_free"
    """For a lease request: the slot is leased, or not ready."""
    busy = "busy"
    """For the lease's holder: the slot is being recreated; retry."""
    late = "late"
    """For a report: the slot has changed since, so the report is ignored."""


class Move(NamedTuple):
    """The state an event leads to; ``request_reset``: the supervisor has to be requested to reset the slot."""

    to: State
    request_reset: bool = False


_ALWAYS: Final = {Event.made: State.free, Event.taken_over: State.running, Event.failed: State.quarantined}
_READY: Final = {**_ALWAYS, Event.lost: State.resetting, Event.unusable: State.resetting}
_USABLE: Final = {
    **_READY,
    Event.seal: State.sealing,
    Event.freeze: State.freezing,
    Event.reroot: State.rerooting,
    Event.give_back: State.resetting,
}
_RECREATED: Final = {**_READY, Event.kept: State.running, Event.give_back: State.reset_due}

MOVES: Final[Mapping[State, Mapping[Event, State]]] = {
    State.resetting: _ALWAYS,
    State.free: {**_READY, Event.grant: State.running, Event.grant_root: State.rerooting},
    State.running: {
        **_USABLE,
        Event.use: State.running,
        Event.connect: State.running,
        Event.agent_ended: State.agent_gone,
    },
    # Calls that begin now end with the reason for the loss, like those that run.
    State.agent_gone: {**_USABLE, Event.use: State.agent_gone, Event.connect: State.agent_gone},
    # A second request for a seal waits for this one.
    State.sealing: {**_RECREATED, Event.seal: State.sealing},
    State.freezing: {**_RECREATED, Event.not_frozen: State.running},
    State.rerooting: {**_RECREATED, Event.replaced: State.running, Event.refused: State.resetting},
    State.reset_due: {
        **_ALWAYS,
        **dict.fromkeys((Event.kept, Event.replaced, Event.not_frozen, Event.refused), State.resetting),
    },
    # A slot that could not be proved clean is never used again.
    State.quarantined: {Event.failed: State.quarantined},
}
_REQUEST_RESET: Final = (Event.give_back, Event.unusable, Event.kept, Event.replaced, Event.not_frozen)
"""Events that the supervisor does not follow by a reset of its own."""
_REFUSALS: Final[Mapping[Event, Refusal]] = {
    **dict.fromkeys((Event.grant, Event.grant_root), Refusal.not_free),
    **dict.fromkeys((Event.use, Event.seal, Event.freeze, Event.reroot, Event.connect), Refusal.busy),
}
REPORTED: Final[Mapping[State, SlotState]] = {
    State.resetting: SlotState.resetting,
    State.free: SlotState.free,
    **dict.fromkeys(
        (State.running, State.agent_gone, State.sealing, State.freezing, State.rerooting), SlotState.leased
    ),
    State.reset_due: SlotState.resetting,
    State.quarantined: SlotState.quarantined,
}
"""Each state as clients see it."""


def decide(state: State, event: Event) -> Move | Refusal:
    """Where ``event`` leads from ``state``, or why it may not happen."""
    to = MOVES[state].get(event)
    if to is None:
        return _REFUSALS.get(event, Refusal.late)
    return Move(to, request_reset=to is State.resetting and event in _REQUEST_RESET)


def may(state: State, event: Event) -> bool:
    """Whether ``event`` leads anywhere from ``state``."""
    return event in MOVES[state]


USABLE: Final = tuple(state for state in State if may(state, Event.use))
"""States in which calls begin."""
