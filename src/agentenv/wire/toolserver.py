"""Protocol between a tool server and its clients: plain HTTP and JSON, one call per request.

``GET /health`` · ``GET /v1/tools`` · ``POST /v1/calls`` · ``POST /v1/cancel`` · ``POST /v1/trajectories/end``. All
but ``/health`` require the bearer token; the body of a refusal is :class:`agentenv.wire.server.ErrorReply`.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from agentenv.wire.base import MAX_TIMEOUT_S, PROTOCOL_VERSION, Arguments, BootName, CallId, WireModel
from agentenv.wire.calls import CallResult

MAX_WAIT_S = 60.0
"""Longest time a server keeps one request open; then it responds that the call still runs, and the client repeats the
request."""
MAX_REQUEST_BYTES = 4 * 1024 * 1024
"""Largest request a tool server reads: external tools take questions, not files."""

Name = Annotated[str, Field(max_length=1_024)]


class CallScope(WireModel):
    """The trajectory a call belongs to.

    ``trajectory`` owns state (a browser page) and is unique for all time. ``group`` is the run of one item that
    this trajectory belongs to; budgets are counted per group. ``item`` names the item itself and is the same in
    every run; cassettes are keyed by it. Both are empty without a group.
    """

    trajectory: Annotated[str, Field(min_length=1, max_length=1_024)]
    group: Name = ""
    item: Name = ""


class ToolDescription(WireModel):
    """One tool as listed by ``GET /v1/tools``. ``parameters`` is a self-contained JSON schema."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: str
    parameters: Arguments
    timeout_s: Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S)]
    unavailable: str = ""
    """Why every call would be refused (it is not configured); empty if the tool works."""


class ToolList(WireModel):
    """``GET /v1/tools``. ``boot`` is new each time the server starts."""

    boot: str
    version: str
    protocol: int = PROTOCOL_VERSION
    tools: tuple[ToolDescription, ...]


class ToolCallRequest(WireModel):
    """``POST /v1/calls``: run this call, or return its outcome.

    ``id`` is unique for all time and chosen by the caller: resubmitting it never runs the call twice. ``boot`` is
    that of the server the call was *first* sent to. ``state_boot`` is that of the server that holds this
    trajectory's state, None without state: another server refuses a call that needs it. ``forget`` lists calls of
    this trajectory whose results have arrived. ``wait_s`` bounds how long this request stays open.
    """

    id: CallId
    scope: CallScope
    tool: Annotated[str, Field(min_length=1, max_length=64)]
    arguments: Arguments = Field(default_factory=dict)
    timeout_s: Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S)]
    boot: BootName
    state_boot: BootName | None = None
    forget: Annotated[tuple[CallId, ...], Field(max_length=1_000)] = ()
    wait_s: Annotated[float, Field(ge=0, le=MAX_WAIT_S)] = 20.0


class ToolCallReply(WireModel):
    """Answer to :class:`ToolCallRequest`; ``result`` None: the call still runs, repeat the request.

    ``stateful``: this trajectory has state in the server of this ``boot``.
    """

    boot: str
    result: CallResult | None = None
    stateful: bool = False


class CancelCalls(WireModel):
    """``POST /v1/cancel``: cancel these calls of a trajectory; their client no longer waits."""

    trajectory: Annotated[str, Field(min_length=1, max_length=1_024)]
    ids: Annotated[tuple[CallId, ...], Field(max_length=1_000)]


class EndTrajectory(WireModel):
    """``POST /v1/trajectories/end``: cancel its calls, close its state (browser pages), forget its replies."""

    trajectory: Annotated[str, Field(min_length=1, max_length=1_024)]


class Done(WireModel):
    """Answer to :class:`CancelCalls` and :class:`EndTrajectory`."""
