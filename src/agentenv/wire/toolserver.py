"""What a tool server and its clients say to each other: plain HTTP and JSON, one call a request.

``GET /health`` · ``GET /v1/tools`` · ``POST /v1/calls`` · ``POST /v1/cancel`` · ``POST /v1/trajectories/end``.
All but ``/health`` need the bearer token; a refused request's body is :class:`agentenv.wire.server.ErrorReply`.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from agentenv.wire.base import MAX_TIMEOUT_S, PROTOCOL_VERSION, Arguments, CallId, WireModel
from agentenv.wire.calls import CallResult

MAX_WAIT_S = 60.0
"""Longest a server keeps one request open; then it says that the call still runs, and is asked again."""
MAX_REQUEST_BYTES = 4 * 1024 * 1024
"""Largest request a tool server reads: external tools take questions, not files."""

Name = Annotated[str, Field(max_length=1_024)]


class CallScope(WireModel):
    """Whose call it is.

    ``trajectory`` owns state (a browser page) and is unique for all time. ``group`` is the run of one
    item this trajectory belongs to: budgets are counted on it. ``item`` names the item itself, and
    stays the same from run to run: cassettes are kept under it. Both may be empty: no group.
    """

    trajectory: Annotated[str, Field(min_length=1, max_length=1_024)]
    group: Name = ""
    item: Name = ""


class ToolDescription(WireModel):
    """One tool as ``GET /v1/tools`` tells of it. ``parameters`` is a self-contained JSON schema."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: str
    parameters: dict[str, Any]
    timeout_s: Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S)]
    unavailable: str = ""
    """Why every call would be refused (nothing is configured for it); empty when it works."""


class ToolList(WireModel):
    """``GET /v1/tools``. ``boot`` is new each time the server starts."""

    boot: str
    version: str
    protocol: int = PROTOCOL_VERSION
    tools: tuple[ToolDescription, ...]


class ToolCallRequest(WireModel):
    """``POST /v1/calls``: run this call, or say what became of it.

    ``id`` is unique for all time and chosen by the caller: asking again with it never runs the call
    twice. ``boot`` is the server's the call was *first* sent to. ``state_boot`` is the server's that
    holds this trajectory's state, None when it has none: another server refuses a call that needs it.
    ``forget`` lists calls of this trajectory whose results have arrived. ``wait_s`` bounds how long
    this request stays open.
    """

    id: CallId
    scope: CallScope
    tool: Annotated[str, Field(min_length=1, max_length=64)]
    arguments: Arguments = Field(default_factory=dict)
    timeout_s: Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S)]
    boot: str
    state_boot: str | None = None
    forget: Annotated[tuple[CallId, ...], Field(max_length=1_000)] = ()
    wait_s: Annotated[float, Field(ge=0, le=MAX_WAIT_S)] = 20.0


class ToolCallReply(WireModel):
    """Answer to :class:`ToolCallRequest`; ``result`` None: the call still runs, ask again.

    ``stateful``: this trajectory now has state in the server of this ``boot``.
    """

    boot: str
    result: CallResult | None = None
    stateful: bool = False


class CancelCalls(WireModel):
    """``POST /v1/cancel``: end these calls of a trajectory; nobody waits for them any more."""

    trajectory: Annotated[str, Field(min_length=1, max_length=1_024)]
    ids: Annotated[tuple[CallId, ...], Field(max_length=1_000)]


class EndTrajectory(WireModel):
    """``POST /v1/trajectories/end``: end its calls, close what it held (browser pages), forget its replies."""

    trajectory: Annotated[str, Field(min_length=1, max_length=1_024)]


class Done(WireModel):
    """Answer to :class:`CancelCalls` and :class:`EndTrajectory`."""
