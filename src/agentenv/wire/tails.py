"""``GET /v1/slots/{slot}/tail``: what the calls in one slot print, for viewers. One JSON object per line.

First come the calls that ended lately under the slot's lease, then each call as it begins, prints and ends. What is
viewed is stored apart from the calls: a slow or absent reader costs them nothing, and misses what was dropped in the
meantime."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field, TypeAdapter

from agentenv.wire.base import WireModel

TAIL_BEAT_S: Final = 2.0
"""Longest interval between two lines."""
TAIL_BYTES: Final = 64 * 1024
"""Output of calls that have ended that a slot keeps for its tail, at most."""


class TailCall(WireModel):
    """A call has begun. ``call`` numbers the calls of this tail; ``about`` is the first line of the command, or the
    path."""

    type: Literal["call"] = "call"
    call: int
    tool: str
    about: str = ""
    ago_s: float = 0.0
    """How long ago it began."""


class TailOutput(WireModel):
    """More output of a call. ``skipped_bytes`` before it are missing."""

    type: Literal["output"] = "output"
    call: int
    stream: Literal["stdout", "stderr"]
    text: str
    skipped_bytes: int = 0


class TailEnd(WireModel):
    """A call has ended. ``note``: why it has no exit code of its own (timed out, cancelled, …); empty if it has."""

    type: Literal["end"] = "end"
    call: int
    exit_code: int | None = None
    duration_s: float | None = None
    note: str = ""


class TailBeat(WireModel):
    """Nothing happens."""

    type: Literal["beat"] = "beat"


class TailOver(WireModel):
    """The lease has ended, or the server ends; the last line."""

    type: Literal["over"] = "over"


TailLine = Annotated[TailCall | TailOutput | TailEnd | TailBeat | TailOver, Field(discriminator="type")]
tail_line: TypeAdapter[TailLine] = TypeAdapter(TailLine)
