"""Large arguments and results of calls, which are sent as raw bytes over HTTP requests of their own
(:mod:`agentenv.wire.calls`).

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

from pydantic_core import from_json

from agentenv.containers.connection import PIECE_BYTES, ContainerConnection, Retries
from agentenv.errors import (
    ConnectionLostError,
    InfraError,
    ProtocolError,
    SlotDestroyedError,
    ToolCallError,
)
from agentenv.wire.calls import Attachment, CallResult

_MAX_RESTARTS: Final = 5
_FIRST_PAUSE_S: Final = 0.2
_REFUSALS: Final = (InfraError, SlotDestroyedError, ToolCallError)

Part = str | bytes
"""A large argument: text is sent as UTF-8."""


class Attachments:
    """The attachments of the calls to one container. ``silence_s``: longest time without progress."""

    def __init__(self, connection: ContainerConnection, silence_s: float) -> None:
        self._connection = connection
        self._silence_s = silence_s

    async def put(self, lease: bytes, call_id: str, parts: Mapping[str, Part]) -> tuple[Attachment, ...]:
        """Send a call's large arguments. Raises ToolCallError when one is rejected, InfraError."""
        return tuple([await self._put(lease, call_id, field, part) for field, part in parts.items()])

    async def complete(self, lease: bytes, result: CallResult) -> CallResult:
        """The result with all its attachments. Raises InfraError: CallLostError when the server has discarded
        it."""
        fields: dict[str, Any] = {"attachments": ()}
        content = dict(result.content) if isinstance(result.content, dict) else {}
        # By name: ``content`` comes before the attachments that are fields of it.
        for part in sorted(result.attachments, key=lambda part: part.field):
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
        """Send piece by piece: each response has the number of bytes that arrived, whatever is buffered on the way."""
        retries = Retries(_FIRST_PAUSE_S, within_s=self._silence_s)
        step = PIECE_BYTES if isinstance(part, bytes) or part.isascii() else PIECE_BYTES // 4
        start, sent_bytes, restarts = 0, 0, 0
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
            elif arrived_bytes == 0 and restarts < _MAX_RESTARTS:  # the server was restarted
                start, sent_bytes, restarts = 0, 0, restarts + 1
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
            raise ProtocolError(f"more than {part.size_bytes} bytes of {part.field} arrived")


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
