"""A call in flight, and its answer as sent over the wire."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Protocol

from pydantic_core import to_json

from agentenv.errors import AgentEnvError
from agentenv.sandbox.server.inbox import Attached
from agentenv.sandbox.server.process import Process
from agentenv.sandbox.server.replies import Raw, RememberedReply, ReplyMemory, size_of
from agentenv.wire.base import LARGE_BYTES, WireModel
from agentenv.wire.calls import Call

Fields = dict[str, Any]
"""Fields of a :class:`agentenv.wire.calls.CallResult`, without those at their default: building and dumping the
model would take a good part of a short call. The golden samples keep the two consistent. ``stdout`` and ``stderr``
may be :data:`agentenv.sandbox.server.replies.Raw`, which is sent as an attachment."""

_HEAD = b'{"type":"result","result":'


class Stop(StrEnum):
    """Why a running call is stopped."""

    no = ""
    deadline = "deadline"
    cancelled = "cancelled"


@dataclass(frozen=True, slots=True)
class Content:
    """A tool's reply: its JSON in pieces, and fields too large for JSON, by name."""

    json: Raw = ()
    raw: Mapping[str, Raw] = field(default_factory=dict)


NO_CONTENT = Content()


class Outlet(Protocol):
    """A connection to which answers are sent."""

    closed: bool

    def deliver(self, asked: CallInFlight) -> None:
        """Send ``asked.message`` when there is room, then notify its reply memory."""

    def refuse(self, call_id: str, message: bytes) -> None:
        """Send the answer to a call that is not remembered."""


class CallInFlight(RememberedReply):
    """One call in its slot. ``outlets``: the open connections that submitted it; ``attached``: its large arguments,
    which are empty in ``arguments``."""

    __slots__ = (
        "arguments",
        "asked_at",
        "attached",
        "held_bytes",
        "outlets",
        "process",
        "secret",
        "slot",
        "started_at",
        "stop",
        "task",
        "timeout_s",
        "timer",
        "tool",
    )

    def __init__(
        self,
        call: Call,
        arguments: WireModel,
        memory: ReplyMemory,
        outlet: Outlet,
        now: float,
        held_bytes: int = 0,
        attached: Mapping[str, Attached] = MappingProxyType({}),
    ) -> None:
        super().__init__(call.id, memory)
        self.slot = call.lease.slot
        self.secret = call.lease.secret
        self.tool = call.tool
        self.held_bytes = held_bytes
        self.arguments = arguments
        self.attached = attached
        self.timeout_s = call.timeout_s
        self.outlets = [outlet]
        self.asked_at = now
        self.started_at = 0.0
        self.stop = Stop.no
        self.process: Process | None = None
        self.task: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None

    def resubmitted(self, outlet: Outlet) -> None:
        """The call was submitted again, by another client or over a new connection. The order of arrival does not
        show which connection is alive, so every open one is answered."""
        self.outlets = [known for known in self.outlets if not known.closed and known is not outlet]
        self.outlets.append(outlet)
        if self.message is not None:
            outlet.deliver(self)


def detached(fields: Fields, content: Content) -> tuple[Fields, dict[str, Raw]]:
    """Split the fields into those of the message, which lists its attachments, and the attachments by field."""
    raw = dict(content.raw)
    if size_of(content.json) > LARGE_BYTES:
        raw["content"] = content.json
    for name in ("stdout", "stderr"):
        value = fields.get(name, "")
        if isinstance(value, tuple):
            raw[name] = value
        elif len(value) > LARGE_BYTES:
            raw[name] = (value.encode(),)
    if not raw:
        return fields, raw
    left = {name: value for name, value in fields.items() if name not in raw}
    left["attachments"] = [{"field": name, "size_bytes": size_of(value)} for name, value in raw.items()]
    return left, raw


def ended(asked: CallInFlight, now: float, left: Fields) -> Fields:
    """The result of a call that ran, or was cancelled while queued; ``left`` are the tool's fields."""
    fields: Fields = {"id": asked.call_id, **left}
    fields["queue_s"] = (asked.started_at or now) - asked.asked_at
    if asked.started_at:
        fields["duration_s"] = now - asked.started_at
    if asked.stop is Stop.deadline:
        fields["timed_out"] = True
    elif asked.stop is Stop.cancelled:
        fields |= {"cancelled": True, "error": "cancelled", "message": "the call was cancelled"}
    return fields


def refusal(call_id: str, error: AgentEnvError) -> Fields:
    """The result of a call that did not run, or whose slot was lost."""
    return {"id": call_id, "fault": error.fault, "error": error.code, "message": str(error)}


def encode_result(fields: Fields, content: bytes = b"") -> bytes:
    """The :class:`agentenv.wire.calls.Result` message. ``content`` is the tool's reply as JSON already."""
    encoded = to_json(fields)
    if content:
        return b'%b%b,"content":%b}}' % (_HEAD, encoded[:-1], content)
    return b"%b%b}" % (_HEAD, encoded)
