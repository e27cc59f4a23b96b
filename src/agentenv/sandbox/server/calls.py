"""The calls of a slot: their arguments, their results as sent over the wire, and the cache of results of a lease.

A call runs at most once: resubmitting it returns the original result while that is cached, and an error after that,
but never runs the call again.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final, Protocol

from pydantic import ValidationError
from pydantic_core import from_json, to_json

from agentenv.errors import AgentEnvError, ProtocolError, UnknownToolError
from agentenv.sandbox.server.process import Process
from agentenv.sandbox.server.uploads import Upload, UploadBuffer
from agentenv.wire.base import LARGE_BYTES, WireModel, carried_as
from agentenv.wire.calls import Call
from agentenv.wire.sessions import SLOT_TOOLS
from agentenv.wire.tools import CODE_TOOLS, SlotTool

MAX_ENDED_IDS = 16_384
"""Ids of discarded calls kept per lease (as hashes), so that a late copy of an old batch does not run."""
MAX_VALUE_BYTES = 16 * 1024 * 1024
"""Largest attachment that is read into a value."""
MAX_JSON_BYTES = 4 * 1024 * 1024
"""Largest that is parsed: twice what Linux gives the arguments and the environment of a program."""
_MAX_PROBLEMS = 3
_MAX_INPUT_CHARS = 80
_HEAD = b'{"type":"result","result":'
_TOOLS: Final = {tool.name: tool for tool in (*SLOT_TOOLS, *CODE_TOOLS)}

Raw = tuple[bytes | bytearray | memoryview, ...]
"""Content in pieces as it was read: nothing is copied to join them."""
Fields = dict[str, Any]
"""Fields of a :class:`agentenv.wire.calls.CallResult`, without those at their default: building and dumping the
model would take a good part of a short call. The golden samples keep the two consistent. ``stdout`` and ``stderr``
may be :data:`Raw`, which is sent as an attachment."""


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


class ResultSink(Protocol):
    """A connection to which results are sent."""

    closed: bool

    def deliver(self, call: SlotCall) -> None:
        """Send ``call.message`` when there is room, then report it as sent."""

    def refuse(self, call_id: str, message: bytes) -> None:
        """Send the result of a call that is not cached."""


class SlotCall:
    """One call in its slot, from its arrival until its result is discarded.

    ``message`` is the encoded result, None until the call has ended; ``attachments`` are those it lists. ``sinks``: the
    open connections that submitted the call; ``uploads``: its large arguments, which are empty in ``arguments``.
    """

    __slots__ = (
        "arguments",
        "arrived_at",
        "attachments",
        "cache",
        "call_id",
        "delivered",
        "held_bytes",
        "message",
        "process",
        "secret",
        "service",
        "sinks",
        "size_bytes",
        "slot",
        "started_at",
        "stop",
        "task",
        "timeout_s",
        "timer",
        "tool",
        "uploads",
    )

    def __init__(
        self,
        call: Call,
        arguments: WireModel,
        cache: ResultCache,
        sink: ResultSink,
        now: float,
        held_bytes: int = 0,
        uploads: Mapping[str, Upload] = MappingProxyType({}),
    ) -> None:
        self.call_id = call.id
        self.slot = call.lease.slot
        self.secret = call.lease.secret
        self.service = call.lease.service
        self.tool = call.tool
        self.timeout_s = math.inf if call.timeout_s is None else call.timeout_s
        self.arguments = arguments
        self.cache = cache
        self.sinks = [sink]
        self.arrived_at = now
        self.held_bytes = held_bytes
        self.uploads = uploads
        self.started_at = 0.0
        self.stop = Stop.no
        self.process: Process | None = None
        self.task: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.message: bytes | None = None
        self.attachments: Mapping[str, Raw] = {}
        self.size_bytes = 0
        self.delivered = False

    def __repr__(self) -> str:
        state = "not ended" if self.message is None else "delivered" if self.delivered else "ended"
        return f"SlotCall({self.call_id!r}, {state})"

    def resubmitted(self, sink: ResultSink) -> None:
        """The call was submitted again, by another client or over a new connection. The order of arrival does not
        show which connection is alive, so the result is sent to every open one."""
        self.sinks = [known for known in self.sinks if not known.closed and known is not sink]
        self.sinks.append(sink)
        if self.message is not None:
            sink.deliver(self)


class ResultCache:
    """The calls of one lease and their results. Pure. Keeps at most ``max_count`` and ``max_sent_bytes`` of results
    that were sent, and always the newest. The limit should exceed what a connection can buffer, because that may have
    to be sent again.

    Unsent results are never dropped, nor are those with attachments until the client forgets them; ``full`` means
    that there are ``max_unsent_bytes`` or ``max_count`` of them, and that no further call should begin. ``index``
    is shared by all leases of the server: it finds a call by its id alone. ``uploads`` holds the calls' attachments.
    """

    def __init__(
        self,
        index: dict[str, SlotCall],
        *,
        max_count: int,
        max_unsent_bytes: int,
        max_sent_bytes: int,
        uploads: UploadBuffer,
    ) -> None:
        self.uploads = uploads
        self._index = index
        self._max_count = max_count
        self._max_unsent_bytes = max_unsent_bytes
        self._max_sent_bytes = max_sent_bytes
        self._running: dict[str, SlotCall] = {}
        """Calls that wait or run."""
        self._unsent: dict[str, SlotCall] = {}
        self._sent: OrderedDict[str, SlotCall] = OrderedDict()
        self._ended: OrderedDict[int, None] = OrderedDict()
        self._unsent_bytes = 0
        self._sent_bytes = 0

    def __repr__(self) -> str:
        return f"ResultCache(running={len(self._running)}, unsent={len(self._unsent)}, sent={len(self._sent)})"

    @property
    def full(self) -> bool:
        """Whether no further call should begin until results are sent."""
        return self._unsent_bytes >= self._max_unsent_bytes or len(self._unsent) >= self._max_count

    def has_ended(self, call_id: str) -> bool:
        """Whether a call of that id has run here and its result was discarded."""
        return hash(call_id) in self._ended

    def begin(self, call: SlotCall) -> None:
        """Add a new call. Raises ValueError when its id is already known: look it up first."""
        if call.call_id in self._index or hash(call.call_id) in self._ended:
            raise ValueError(f"call {call.call_id!r} is known already")
        self._index[call.call_id] = call
        self._running[call.call_id] = call

    def finish(self, call: SlotCall, message: bytes, attachments: Mapping[str, Raw] = MappingProxyType({})) -> None:
        """The call ended with this result. Raises KeyError when it was not running here."""
        del self._running[call.call_id]
        call.message = message
        call.attachments = attachments
        call.size_bytes = len(message) + sum(size_of(raw) for raw in attachments.values())
        self._unsent[call.call_id] = call
        self._unsent_bytes += call.size_bytes

    def sent(self, call: SlotCall) -> None:
        """The result was written to a connection; it may be dropped when room is needed, unless some of its
        attachments are still to be fetched."""
        call.delivered = call.message is not None
        if call.attachments or self._unsent.pop(call.call_id, None) is None:
            return
        self._unsent_bytes -= call.size_bytes
        self._sent[call.call_id] = call
        self._sent_bytes += call.size_bytes
        while len(self._sent) > max(1, self._max_count) or (
            self._sent_bytes > self._max_sent_bytes and len(self._sent) > 1
        ):
            self.forget(next(iter(self._sent.values())))

    def forget(self, call: SlotCall) -> None:
        """Discard a result. No effect on a call that has not ended."""
        if call.message is None:
            return
        if self._sent.pop(call.call_id, None) is not None:
            self._sent_bytes -= call.size_bytes
        elif self._unsent.pop(call.call_id, None) is not None:
            self._unsent_bytes -= call.size_bytes
        else:
            return
        call.attachments = {}
        del self._index[call.call_id]
        self._ended[hash(call.call_id)] = None
        if len(self._ended) > MAX_ENDED_IDS:
            self._ended.popitem(last=False)

    def clear(self) -> None:
        """The lease has ended: drop everything, running calls included."""
        for calls in (self._running, self._unsent, self._sent):
            for call_id, call in calls.items():
                call.attachments = {}
                del self._index[call_id]
            calls.clear()
        self._ended.clear()
        self.uploads.close()
        self._unsent_bytes = self._sent_bytes = 0


# -- arguments -------------------------------------------------------------------------------------


def with_uploads(tool: str, arguments: dict[str, Any], uploads: Mapping[str, Upload]) -> dict[str, Any]:
    """The arguments with those that were uploaded: in full, or empty where the tool reads the upload itself
    (:attr:`agentenv.wire.tools.SlotTool.streamed`). Raises InvalidArgumentsError when one is too large, ProtocolError
    when one is also among ``arguments``, or does not fit its field (:func:`agentenv.wire.base.carried_as`).
    """
    if twice := uploads.keys() & arguments.keys():
        raise ProtocolError(f"{tool}: duplicate argument: {', '.join(sorted(twice))}")
    if (row := _TOOLS.get(tool)) is None:
        return arguments
    return {**arguments, **{name: _value(row, name, upload) for name, upload in uploads.items()}}


def _value(row: SlotTool, name: str, upload: Upload) -> Any:
    carried = carried_as(row.arguments, name)
    if name in row.streamed:
        return b"" if carried == "bytes" else ""
    content = upload.content(name, MAX_JSON_BYTES if carried == "json" else MAX_VALUE_BYTES)
    if carried == "bytes":
        return content
    try:
        return content.decode() if carried == "text" else from_json(content)
    except ValueError as error:
        raise ProtocolError(f"{name}: is not {'UTF-8' if carried == 'text' else 'JSON'}: {error}") from error


def parse_arguments(tool: str, arguments: dict[str, Any]) -> WireModel:
    """The arguments of a call of ``tool``, checked. Clients check them by the same models before they send a call: so
    arguments that do not fit here are a failure of the client or of the wire, never a mistake of the caller.

    Raises:
        UnknownToolError: a slot has no such tool.
        ProtocolError: they do not fit.
    """
    row = _TOOLS.get(tool)
    if row is None:
        raise UnknownToolError(f"unknown tool {tool!r}", next_step=f"use one of: {', '.join(_TOOLS)}")
    try:
        return row.arguments.model_validate(arguments)
    except ValidationError as error:
        raise ProtocolError(f"{tool}: {_problems(error)}") from error


def _problems(error: ValidationError) -> str:
    sentences = []
    for problem in error.errors(include_url=False, include_context=False)[:_MAX_PROBLEMS]:
        where = ".".join(str(part) for part in problem["loc"]) or "arguments"
        value = repr(problem["input"])
        got = "" if problem["type"] == "missing" or len(value) > _MAX_INPUT_CHARS else f" (got {value})"
        sentences.append(f"{where}: {problem['msg']}{got}")
    return "; ".join(sentences)


# -- results ---------------------------------------------------------------------------------------


def size_of(raw: Raw) -> int:
    """Total size of the pieces, in bytes."""
    return sum(len(piece) for piece in raw)


def result_fields(call: SlotCall, now: float, fields: Fields) -> Fields:
    """The result of a call that ran, or was cancelled while queued; ``fields`` are the tool's."""
    result: Fields = {"id": call.call_id, **fields}
    result["queue_s"] = (call.started_at or now) - call.arrived_at
    if call.started_at:
        result["duration_s"] = now - call.started_at
    if call.stop is Stop.deadline:
        result["timed_out"] = True
    elif call.stop is Stop.cancelled:
        result |= {"cancelled": True, "error": "cancelled", "message": "the call was cancelled"}
    return result


def refusal(call_id: str, error: AgentEnvError) -> Fields:
    """The result of a call that did not run, or whose slot was lost."""
    return {"id": call_id, "fault": error.fault, "error": error.code, "message": str(error)}


def split_attachments(fields: Fields, content: Content) -> tuple[Fields, dict[str, Raw]]:
    """Split the fields into those of the message, which lists its attachments, and the attachments by field."""
    raw = dict(content.raw)
    if content.json and size_of(content.json) > LARGE_BYTES:
        raw["content"] = content.json
    for name in ("stdout", "stderr"):
        value = fields.get(name, "")
        if isinstance(value, tuple):
            raw[name] = value
        elif len(value) > LARGE_BYTES:
            raw[name] = (value.encode(),)
    if not raw:
        return fields, raw
    small = {name: value for name, value in fields.items() if name not in raw}
    small["attachments"] = [{"field": name, "size_bytes": size_of(value)} for name, value in raw.items()]
    return small, raw


def encode_result(fields: Fields, content: bytes = b"") -> bytes:
    """The :class:`agentenv.wire.calls.Result` message. ``content`` is the tool's reply as JSON already."""
    encoded = to_json(fields)
    if content:
        return b'%b%b,"content":%b}}' % (_HEAD, encoded[:-1], content)
    return b"%b%b}" % (_HEAD, encoded)
