"""What a farm service shows of itself: ``GET /v1/sight`` (one :class:`Sight`) and ``GET /v1/sight/changes`` (a
:class:`Sight` without its containers, which follow in :class:`SightChanges`, as does what changes; one JSON object per
line).

A token sees the runs it covers. Slots of others are shown as leased, and not by whom. Times are seconds of the farm's
own clock: compare them with ``clock_s`` of the same line.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field, TypeAdapter

from agentenv.wire.base import SlotIndex, WireModel
from agentenv.wire.farm import FarmInfo, RunStatus, WaitingFor
from agentenv.wire.leases import RunKind
from agentenv.wire.states import ContainerState, SlotState

SIGHT_EVERY_S: Final = 0.5
"""Shortest interval between two lines of changes."""
SIGHT_BEAT_S: Final = 2.0
"""Longest interval between two lines; the numbers of farm, runs and queue are sent at this interval."""


class SlotSight(WireModel):
    """One slot. ``run`` and what follows are those of its lease, if the token covers it; a leased slot without a run
    belongs to another run."""

    slot: SlotIndex
    state: SlotState
    since_s: float
    """Since when it is in this state, as far as is known."""
    epoch: int | None = None
    run: str = ""
    kind: RunKind = "train"
    environment: str = ""
    trajectory: str = ""


class ContainerSight(WireModel):
    """One container with its slots; in changes those slots that have changed."""

    id: str
    index: int
    node: str
    """Host of the container's address."""
    state: ContainerState
    slots: tuple[SlotSight, ...] = ()


class QueueSight(WireModel):
    """The waiting requests of one run and kind; ``why``, ``detail`` and ``eta_s`` are those of the oldest."""

    run: str
    kind: RunKind
    asks: int
    slots: int
    oldest_wait_s: float
    why: WaitingFor
    detail: str = ""
    eta_s: float | None = None


class OthersSight(WireModel):
    """The runs that the token does not cover, together."""

    runs: int = 0
    held: int = 0
    waiting: int = 0
    """Requested slots."""


class RatesSight(WireModel):
    """What happened in the seconds before ``at_s``: rates and percentiles over 10 s, faults over 2 s."""

    at_s: float
    calls_per_s: float = 0.0
    call_p50_s: float | None = None
    call_p99_s: float | None = None
    """How long calls ran in their slots; None if none ended."""
    leases_per_s: float = 0.0
    calls_running: int = 0
    faults: dict[str, int] = Field(default_factory=dict)
    """By kind; kinds of which there were none are omitted."""


class Sight(WireModel):
    """The whole farm at one moment. ``rates``: one entry per 2 s of the last 5 minutes."""

    type: Literal["sight"] = "sight"
    clock_s: float
    farm: FarmInfo
    containers: tuple[ContainerSight, ...]
    runs: tuple[RunStatus, ...]
    others: OthersSight = OthersSight()
    queue: tuple[QueueSight, ...]
    rates: tuple[RatesSight, ...] = ()


class SightChanges(WireModel):
    """What has changed since the line before, or was not sent yet. ``farm``, ``runs``, ``others`` and ``queue`` are
    whole, or not there."""

    type: Literal["changes"] = "changes"
    clock_s: float
    containers: tuple[ContainerSight, ...] = ()
    gone: tuple[str, ...] = ()
    farm: FarmInfo | None = None
    runs: tuple[RunStatus, ...] | None = None
    others: OthersSight | None = None
    queue: tuple[QueueSight, ...] | None = None
    rates: tuple[RatesSight, ...] = ()


SightLine = Annotated[Sight | SightChanges, Field(discriminator="type")]
sight_line: TypeAdapter[SightLine] = TypeAdapter(SightLine)
