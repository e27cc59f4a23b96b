"""Calls, results, and the messages that carry them.

``POST /v1/batch`` takes one :class:`Batch` and streams :data:`ServerMessage` lines (NDJSON); the stream (``GET
/v1/stream``, WebSocket) takes :data:`ClientMessage` texts and sends :data:`ServerMessage` texts for as long as it
stays open. Each result is sent the moment it is ready.

A message stays small. Content above :data:`agentenv.wire.base.LARGE_BYTES` travels as an *attachment*: raw bytes in
the body of a request of its own, ``/v1/attachments/{call id}/{field}``, with the lease's key in the header
:data:`agentenv.wire.transfers.LEASE_HEADER`. An argument is PUT before its call is sent, piece by piece
(``?from=N``: after the first N bytes); the response to each PUT is an :class:`Attachment` with the size received so
far. A result's attachment is fetched by GET (``?from=N`` skips N bytes) until the call is forgotten.

``GET /v1/calls/{call id}/output?stdout=N&stderr=M`` waits up to :data:`LIVE_WAIT_S` for more output of a running call
than these numbers of bytes, and answers with a :class:`LiveOutput`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, TypeAdapter

from agentenv.errors import AgentEnvError, CallLostError, Fault, InfraError, SlotDestroyedError, from_wire
from agentenv.wire.base import MAX_BATCH_CALLS, MAX_TIMEOUT_S, Arguments, Base64, BootName, CallId, Count, WireModel
from agentenv.wire.leases import LeaseKey

LIVE_WAIT_S = 10.0
MAX_ATTACHMENTS = 4
"""Per call, and per result."""
_UNSHOWN = frozenset({"id", "duration_s", "queue_s", "cpu_s", "peak_memory_bytes", "attachments"})
_SHOWN_CHARACTERS = 1_000


class Attachment(WireModel):
    """Content sent outside its message. ``field`` of a call: the name of the argument, whose type determines the
    encoding (:func:`agentenv.wire.base.carried_as`). Of a result: ``stdout``, ``stderr``, ``content`` (its JSON),
    ``content.text`` (UTF-8; invalid bytes are replaced by the receiver) or ``content.data`` (the bytes themselves)."""

    field: Annotated[str, Field(pattern=r"^[a-z_]{1,40}(\.[a-z_]{1,40})?$")]
    size_bytes: Count


class Call(WireModel):
    """One tool call.

    ``id`` is unique for all time and chosen by the caller: resubmitting the same id never runs the call twice.
    ``boot`` is the ``ServerInfo.boot`` of the server the call was *first* sent to: a server that does not know the
    id and has another boot answers ``call_lost`` because the call may have run before. ``timeout_s`` counts from
    the moment the call starts in its slot; None: it has no limit.
    """

    id: CallId
    lease: LeaseKey
    tool: Annotated[str, Field(min_length=1, max_length=64)]
    arguments: Arguments = Field(default_factory=dict)
    timeout_s: Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S)] | None
    boot: BootName
    attachments: Annotated[tuple[Attachment, ...], Field(max_length=MAX_ATTACHMENTS)] = ()
    """Arguments that were sent as attachments; not contained in ``arguments``."""


class CallResult(WireModel):
    """The outcome of one call.

    ``fault == "none"``: the tool did its work; ``exit_code`` is data (128 + n when signal n ended the command, as a
    shell would say; 0 or an errno of file operations). Otherwise ``error`` is the ``code`` of a class in
    :mod:`agentenv.errors` and ``message`` says what to do. Text is UTF-8; invalid bytes became U+FFFD.
    ``*_dropped_bytes`` counts the bytes that the cap removed from the middle, where the text has the line ``[... N
    bytes dropped ...]``; ``truncated`` is true if any is above 0. ``queue_s`` is the time waiting for earlier calls
    of the slot, ``duration_s`` the time running. ``content`` is the tool's own reply (a :mod:`agentenv.wire.tools`
    model as JSON).
    """

    id: CallId
    fault: Fault = "none"
    error: str | None = None
    message: str = ""
    exit_code: int | None = None
    stdout: str = ""
    stderr: str = ""
    stdout_dropped_bytes: int = 0
    stderr_dropped_bytes: int = 0
    timed_out: bool = False
    oom_killed: bool = False
    truncated: bool = False
    cancelled: bool = False
    duration_s: float = 0.0
    queue_s: float = 0.0
    cpu_s: float | None = None
    peak_memory_bytes: int | None = None
    content: JsonValue = None
    attachments: Annotated[tuple[Attachment, ...], Field(max_length=MAX_ATTACHMENTS)] = ()
    """Attachments to fetch; available until the call's result is discarded."""

    @property
    def success(self) -> bool:
        """Whether the tool did its work, and a command ended in time with exit code 0."""
        return self.fault == "none" and not (self.exit_code or self.timed_out or self.cancelled)

    @property
    def printed(self) -> str:
        """stdout, then stderr."""
        seam = "\n" if self.stdout and self.stderr and not self.stdout.endswith("\n") else ""
        return f"{self.stdout}{seam}{self.stderr}"

    @property
    def output(self) -> str:
        """A tool's output: what it printed. For a tool that prints nothing: the text of its content,
        otherwise its JSON. A command in a session that printed nothing has none: the content is the session's
        state."""
        named = self.content if isinstance(self.content, dict) else {}
        if self.stdout or self.stderr or self.content is None or named.get("session") is not None:
            return self.printed
        return text if isinstance(text := named.get("text"), str) else json.dumps(self.content, ensure_ascii=False)

    def __repr_args__(self) -> Iterator[tuple[str, Any]]:
        """A line for an interactive prompt: the exit code, the output, and whatever is unusual."""
        for name, value in super().__repr_args__():
            if name == "exit_code" or (name not in _UNSHOWN and value != type(self).model_fields[str(name)].default):
                yield str(name), _shortened(value)

    def raise_failure(self) -> None:
        """Raise an infrastructure failure or the end of the slot that this reports, so that no layer can show or score
        it by mistake; no effect on any other result."""
        if self.error == SlotDestroyedError.code:
            raise SlotDestroyedError(self.message or "the slot was destroyed")
        if self.fault == "infra":
            raise from_wire(self.error or InfraError.code, self.message or "the call failed", "", InfraError)
        if self.cancelled:
            raise CallLostError(f"call {self.id} was cancelled by the other side")

    @classmethod
    def refused(cls, call_id: str, error: AgentEnvError) -> CallResult:
        """The result of a call that failed with ``error`` and has no other content."""
        return cls(id=call_id, fault=error.fault, error=error.code, message=str(error))


def _shortened(value: Any) -> Any:
    if not isinstance(value, str) or len(value) <= _SHOWN_CHARACTERS:
        return value
    return f"{value[:_SHOWN_CHARACTERS]}… ({len(value)} characters)"


class LiveOutput(WireModel):
    """What a running ``bash`` call has printed: the next bytes of each stream, and the offset of the first of them
    (larger than the requested one where bytes were dropped). ``ended``: the call's result exists, and has the rest."""

    stdout: Base64 = b""
    stdout_from: int = 0
    stderr: Base64 = b""
    stderr_from: int = 0
    ended: bool = False


class CallKey(WireModel):
    """Identifies one call. The lease's key proves that the sender may use it."""

    id: CallId
    lease: LeaseKey


class Batch(WireModel):
    """Client → server: calls to run, or, when resubmitted, whose results are to be sent again."""

    type: Literal["batch"] = "batch"
    batch: Count = 0
    """Number of the batch within its stream; echoed in :class:`Accepted`."""
    calls: Annotated[tuple[Call, ...], Field(max_length=MAX_BATCH_CALLS)]


class Cancel(WireModel):
    """Client → server: cancel these calls now. Calls that still run get their (cancelled) result; results of
    finished calls are discarded."""

    type: Literal["cancel"] = "cancel"
    calls: Annotated[tuple[CallKey, ...], Field(max_length=MAX_BATCH_CALLS)]


class Forget(WireModel):
    """Client → server: these results arrived with all their attachments, so they can be discarded. For a
    call that was never sent: its uploaded attachments are dropped."""

    type: Literal["forget"] = "forget"
    calls: Annotated[tuple[CallKey, ...], Field(max_length=MAX_BATCH_CALLS)]


class Accepted(WireModel):
    """Server → client: the batch arrived; each of its calls will get a result."""

    type: Literal["accepted"] = "accepted"
    batch: int


class Result(WireModel):
    """Server → client: one finished call."""

    type: Literal["result"] = "result"
    result: CallResult


class Failure(WireModel):
    """Server → client: the message itself was rejected; none of its calls ran."""

    type: Literal["failure"] = "failure"
    error: str
    message: str
    batch: int | None = None
    """Number of the rejected batch, if the message could be read that far."""


ClientMessage = Annotated[Batch | Cancel | Forget, Field(discriminator="type")]
ServerMessage = Annotated[Accepted | Result | Failure, Field(discriminator="type")]
client_message: TypeAdapter[Batch | Cancel | Forget] = TypeAdapter(ClientMessage)
server_message: TypeAdapter[Accepted | Result | Failure] = TypeAdapter(ServerMessage)
