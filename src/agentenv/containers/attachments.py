"""How arguments and results travel: in the message, or, when they are large, as raw bytes over HTTP requests of their
own (:mod:`agentenv.wire.calls`). :func:`encode_arguments` is the only place that encodes arguments.

Messages never wait behind them, and they are processed one piece at a time, because every trajectory of the trainer
shares the event loop. An interrupted request is repeated and resumes where it was. Without progress for too long it
fails, and only its own call with it.
"""

from __future__ import annotations

import asyncio
import base64
import codecs
from collections.abc import Mapping
from typing import Any, Final

from pydantic_core import from_json, to_json

from agentenv.containers.connection import PIECE_BYTES, ContainerConnection, Retries
from agentenv.errors import (
    ConnectionLostError,
    InfraError,
    InvalidArgumentsError,
    ProtocolError,
    SlotDestroyedError,
    ToolCallError,
)
from agentenv.wire.base import LARGE_BYTES, MAX_FILE_BYTES
from agentenv.wire.calls import MAX_ATTACHMENTS, Attachment, CallResult

_MOST_BEGINNINGS: Final = 5
_FIRST_PAUSE_S: Final = 0.2
_REFUSALS: Final = (InfraError, SlotDestroyedError, ToolCallError)

Part = str | bytes


_JSON_BYTES_PER_CHAR: Final = 6
"""Most that JSON makes of a character of the basic plane (a control character: ``\\u0001``), and of what UTF-8 needs
four bytes for."""
_QUOTES: Final = '""'


def encode_arguments(arguments: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Part]]:
    """The arguments of a call as JSON values for its message, and those sent as attachments instead: each whose JSON
    takes more than LARGE_BYTES. Pure.

    ``arguments`` are JSON values, or ``bytes``: base64 in the message, themselves in an attachment. Text is attached
    as UTF-8, any other value as its JSON; the receiver knows by the type of the tool's field
    (:func:`agentenv.wire.base.carried_as`).

    Raises: InvalidArgumentsError: one is larger than MAX_FILE_BYTES, or there are more than MAX_ATTACHMENTS.
    """
    message: dict[str, Any] = {}
    attached: dict[str, Part] = {}
    for name, value in arguments.items():
        part = _large_part(value)
        if part is None:
            message[name] = base64.b64encode(value).decode("ascii") if isinstance(value, bytes) else value
            continue
        if (size_bytes := size_of(part)) > MAX_FILE_BYTES:
            raise InvalidArgumentsError(
                f"{name}: {size_bytes} bytes exceed the limit of {MAX_FILE_BYTES} bytes per call",
                next_step="send it in smaller parts",
            )
        attached[name] = part
    if len(attached) > MAX_ATTACHMENTS:
        raise InvalidArgumentsError(f"more than {MAX_ATTACHMENTS} arguments are large")
    return message, attached


def _large_part(value: Any) -> Part | None:
    """The value as it is attached; None when its JSON is small enough for a message."""
    if isinstance(value, bytes):
        return value if (len(value) + 2) // 3 * 4 + len(_QUOTES) > LARGE_BYTES else None
    if isinstance(value, str):
        if len(value) * _JSON_BYTES_PER_CHAR <= LARGE_BYTES:
            return None
        return value if len(value) > LARGE_BYTES or len(to_json(value)) > LARGE_BYTES else None
    if not isinstance(value, (dict, list, tuple)):
        return None
    return encoded if len(encoded := to_json(value)) > LARGE_BYTES else None


def size_of(part: Part) -> int:
    """Size in bytes; of text as UTF-8."""
    return len(part) if isinstance(part, bytes) or part.isascii() else len(part.encode())


class Attachments:
    """The attachments of the calls to one container. ``silence_s``: longest time without progress."""

    def __init__(self, connection: ContainerConnection, silence_s: float) -> None:
        self._connection = connection
        self._silence_s = silence_s

    async def put(self, lease: bytes, call_id: str, parts: Mapping[str, Part]) -> tuple[Attachment, ...]:
        """Send a call's large arguments. Raises ToolCallError when one is rejected, InfraError."""
        return tuple([await self._put(lease, call_id, field, part) for field, part in parts.items()])

    async def complete(self, lease: bytes, result: CallResult) -> CallResult:
        """The result with all its attachments. Raises InfraError: CallLostError when the server no longer remembers
        it."""
        fields: dict[str, Any] = {"attachments": ()}
        content = dict(result.content) if isinstance(result.content, dict) else {}
        for part in sorted(
            result.attachments, key=lambda part: part.field
        ):  # content before the attachments that belong into it
            sink = _sink(part)
            await self._fetch(lease, result.id, part, sink)
            name, _, inner = part.field.partition(".")
            if part.field == "content" and isinstance(whole := sink.value(), dict):
                fields["content"] = content = whole
            elif inner:
                content[inner] = sink.value()
                if inner == "text" and isinstance(sink, _Text) and sink.lossy:
                    content["lossy"] = True
                fields["content"] = content
            else:
                fields[name] = sink.value()
        return result.model_copy(update=fields)

    async def _put(self, lease: bytes, call_id: str, field: str, part: Part) -> Attachment:
        """Send piece by piece: each answer tells how much has arrived, however much is buffered on the way."""
        retries = Retries(_FIRST_PAUSE_S, within_s=self._silence_s)
        step = PIECE_BYTES if isinstance(part, bytes) or part.isascii() else PIECE_BYTES // 4
        start, sent_bytes, anew = 0, 0, 0
        while start < len(part):
            piece = part[start : start + step]
            body = piece.encode() if isinstance(piece, str) else piece
            try:
                raw = await self._connection.request(
                    "PUT",
                    f"/v1/attachments/{call_id}/{field}",
                    *_REFUSALS,
                    lease=lease.decode(),
                    params={"from": sent_bytes} if sent_bytes else None,
                    data=body,
                    timeout_s=self._silence_s,
                )
            except ConnectionLostError as lost:
                await retries.after(lost)
                continue
            retries.progressed()
            arrived_bytes = self._connection.parsed(Attachment, raw).size_bytes
            if arrived_bytes == sent_bytes + len(body):
                start, sent_bytes = start + step, arrived_bytes
            elif arrived_bytes == 0 and anew < _MOST_BEGINNINGS:  # the server was restarted
                start, sent_bytes, anew = 0, 0, anew + 1
            else:
                raise ProtocolError(f"{sent_bytes + len(body)} bytes of {field} were sent, {arrived_bytes} arrived")
        return Attachment(field=field, size_bytes=sent_bytes)

    async def _fetch(self, lease: bytes, call_id: str, part: Attachment, sink: _Sink) -> None:
        retries = Retries(_FIRST_PAUSE_S, within_s=self._silence_s)
        while (begin := sink.size_bytes) < part.size_bytes:
            try:
                async with self._connection.stream(
                    "GET",
                    f"/v1/attachments/{call_id}/{part.field}",
                    *_REFUSALS,
                    lease=lease.decode(),
                    params={"from": begin} if begin else None,
                    silence_s=self._silence_s,
                ) as response:
                    async for piece in response.content.iter_any():
                        sink.feed(piece)
                if sink.size_bytes < part.size_bytes:
                    raise self._connection.lost(f"an attachment of call {call_id} ended early")
            except ConnectionLostError as lost:
                if sink.size_bytes > begin:
                    retries.progressed()
                await retries.after(lost)
        if sink.size_bytes > part.size_bytes:
            raise ProtocolError(f"more than {part.size_bytes} bytes of {part.field} came")


class _Sink:
    """Receives the bytes of one attachment."""

    def __init__(self) -> None:
        self.size_bytes = 0
        self._pieces: list[Any] = []

    def feed(self, piece: bytes) -> None:
        """The next bytes."""
        self.size_bytes += len(piece)
        self._pieces.append(piece)

    def value(self) -> Any:
        """The complete value."""
        return from_json(b"".join(self._pieces))


class _Text(_Sink):
    """Decodes text incrementally; ``lossy`` when the bytes are not UTF-8."""

    def __init__(self) -> None:
        super().__init__()
        self.lossy = False
        self._decoder = codecs.getincrementaldecoder("utf-8")()

    def feed(self, piece: bytes) -> None:
        self.size_bytes += len(piece)
        self._pieces.append(self._decoded(piece, final=False))

    def value(self) -> str:
        return "".join([*self._pieces, self._decoded(b"", final=True)])

    def _decoded(self, piece: bytes, *, final: bool) -> str:
        before = self._decoder.getstate()
        try:
            return self._decoder.decode(piece, final)
        except UnicodeDecodeError:
            self.lossy = True
            self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
            self._decoder.setstate(before)
            return self._decoder.decode(piece, final)


class _Base64(_Sink):
    """Encodes bytes as base64 for JSON."""

    def __init__(self) -> None:
        super().__init__()
        self._rest = b""

    def feed(self, piece: bytes) -> None:
        self.size_bytes += len(piece)
        data = self._rest + piece
        whole = len(data) - len(data) % 3
        self._rest = data[whole:]
        self._pieces.append(base64.b64encode(data[:whole]).decode("ascii"))

    def value(self) -> str:
        return "".join([*self._pieces, base64.b64encode(self._rest).decode("ascii")])


async def decoded_base64(text: str) -> bytes:
    """The bytes of a base64 field of a result, decoded piece by piece."""
    pieces = []
    for start in range(0, len(text), PIECE_BYTES):
        pieces.append(base64.b64decode(text[start : start + PIECE_BYTES]))
        await asyncio.sleep(0)
    return b"".join(pieces)


def _sink(part: Attachment) -> _Sink:
    if part.field == "content":
        return _Sink()
    return _Base64() if part.field == "content.data" else _Text()
