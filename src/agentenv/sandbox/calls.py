"""A call that was asked for, and its answer as it goes over the wire."""

from __future__ import annotations

import asyncio
import errno
from enum import StrEnum
from typing import Any, Protocol

from pydantic_core import to_json

from agentenv.errors import AgentEnvError
from agentenv.sandbox.metrics import Statistics
from agentenv.sandbox.process import Process
from agentenv.sandbox.replies import Reply, ReplyMemory
from agentenv.wire.base import MAX_BODY_BYTES, WireModel
from agentenv.wire.calls import Call

Fields = dict[str, Any]
"""Fields of a :class:`agentenv.wire.calls.CallResult`, without those at their default: what it takes to
build and dump the model is a good part of a short call. The golden samples hold the two together."""

_HEAD = b'{"type":"result","result":'


class Stop(StrEnum):
    """Why a running call was told to end."""

    no = ""
    deadline = "deadline"
    cancelled = "cancelled"
    lost = "lost"


class Outlet(Protocol):
    """A connection that answers go to."""

    closed: bool
    waits: bool
    """Whether it waits for exactly the calls it asked for, whoever else asks for them later."""

    def deliver(self, asked: Asked) -> None:
        """Send ``asked.message`` when there is room, then tell its reply memory."""

    def refuse(self, call_id: str, message: bytes) -> None:
        """Send the answer to a call that is not remembered."""


class Asked(Reply):
    """One call in its slot. ``outlets`` are the connection that asked last, and those that wait for it."""

    __slots__ = (
        "arguments",
        "asked_at",
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

    def __init__(self, call: Call, arguments: WireModel, memory: ReplyMemory, outlet: Outlet, now: float) -> None:
        super().__init__(call.id, memory)
        self.slot = call.lease.slot
        self.secret = call.lease.secret
        self.tool = call.tool
        self.held_bytes = 0
        self.arguments = arguments
        self.timeout_s = call.timeout_s
        self.outlets = [outlet]
        self.asked_at = now
        self.started_at = 0.0
        self.stop = Stop.no
        self.process: Process | None = None
        self.task: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None

    def asked_again(self, outlet: Outlet) -> None:
        """Somebody else wants the answer (too), or the same one over a new connection."""
        self.outlets = [known for known in self.outlets if known.waits and not known.closed]
        self.outlets.append(outlet)
        if self.message is not None:
            outlet.deliver(self)


def answer(asked: Asked, fields: Fields, statistics: Statistics, content: bytes = b"") -> None:
    """The call ended with this result: remember it, count it, and give it to whoever asked last."""
    message = encode_result(fields, content)
    if len(message) > MAX_BODY_BYTES:
        message = encode_result(_too_large(fields) if content else _shortened(fields))
    asked.memory.finish(asked, message)
    statistics.held_bytes -= asked.held_bytes
    statistics.calls += 1
    statistics.results_bytes += len(message)
    statistics.calls_faulted += "fault" in fields
    statistics.calls_timed_out += "timed_out" in fields
    statistics.calls_cancelled += "cancelled" in fields
    statistics.calls_oom_killed += "oom_killed" in fields
    if asked.timer is not None:
        asked.timer.cancel()
        asked.timer = None
    asked.process = asked.task = None
    for outlet in asked.outlets:
        if not outlet.closed:
            outlet.deliver(asked)


def ended(asked: Asked, now: float, left: Fields) -> Fields:
    """The result of a call that ran, or was cancelled while it waited; ``left`` is what the tool says."""
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
    """The :class:`agentenv.wire.calls.Result` message. ``content`` is the tool's reply as JSON already: a
    file of 64 MiB is not made a Python object once more."""
    encoded = to_json(fields)
    if content:
        return b'%b%b,"content":%b}}' % (_HEAD, encoded[:-1], content)
    return b"%b%b}" % (_HEAD, encoded)


def _too_large(fields: Fields) -> Fields:
    reason = f"the answer is larger than the {MAX_BODY_BYTES} bytes a message may have: ask for it in parts\n"
    return {**fields, "exit_code": errno.EFBIG, "stderr": reason}


def _shortened(fields: Fields) -> Fields:
    """So that it fits in one message even when every character takes six bytes of JSON (control
    characters do): the caps allow more than a message may have only where they were set very high."""
    keep = MAX_BODY_BYTES // 30
    changed: Fields = {**fields, "truncated": True}
    for name in ("stdout", "stderr"):
        text: str = fields.get(name, "")
        if len(text) > 2 * keep:
            dropped = f"{name}_dropped_bytes"
            changed[name] = text[:keep] + text[-keep:]
            changed[dropped] = fields.get(dropped, 0) + len(text[keep:-keep].encode())
    return changed
