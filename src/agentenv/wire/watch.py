"""``GET /v1/watch``: a container's slots, followed instead of polled. One JSON object per line (NDJSON).

The first line lists every slot. After it comes one line per change, in order, and a beat at least every ``beat_s``
seconds (a parameter of the query).
A watcher that reads too slowly is disconnected: it connects again and gets a new list.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field, TypeAdapter

from agentenv.wire.base import WireModel
from agentenv.wire.leases import SlotReport

BEAT_S: Final = 1.0
"""Longest interval between two lines, unless the watcher requests another."""
LEAST_BEAT_S: Final = 0.1
MOST_BEAT_S: Final = 60.0
CALL_BOUNDS_S: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0
)  # fmt: skip
"""Upper bounds of the buckets of a container's histogram of call times."""
GENERATION_HEADER: Final = "X-Agentenv-Generation"
"""The generation of the farm that sends a request. A container refuses (``fenced``) requests that change leases when it
has seen a later generation, or when it has seen any and the request has none."""
GUEST_HEADER: Final = "X-Agentenv-Guest"
"""Any value: the sender may lease although a farm controls the container."""


class WatchList(WireModel):
    """The first line."""

    type: Literal["list"] = "list"
    boot: str
    generation: int
    """The highest generation the container has obeyed; 0: none."""
    slots: tuple[SlotReport, ...]


class WatchChange(WireModel):
    """A slot's state or lease has changed."""

    type: Literal["change"] = "change"
    slot: SlotReport


class CallTimes(WireModel):
    """How long a container's calls ran, since its server started. ``counts`` has one number per bound of
    ``CALL_BOUNDS_S``, not cumulative, and one for longer calls."""

    counts: tuple[int, ...] = ()
    total_s: float = 0.0


class WatchBeat(WireModel):
    """The container is alive; ``statistics`` as in ``GET /v1/statistics``."""

    type: Literal["beat"] = "beat"
    statistics: dict[str, int]
    supervisor_silent_s: float = 0.0
    draining: bool = False
    call_times: CallTimes = CallTimes()


WatchLine = Annotated[WatchList | WatchChange | WatchBeat, Field(discriminator="type")]
watch_line: TypeAdapter[WatchLine] = TypeAdapter(WatchLine)
