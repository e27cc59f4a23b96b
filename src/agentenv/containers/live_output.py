"""The output of a running command as it is printed (:class:`agentenv.wire.calls.LiveOutput`).

It is read by requests of its own: the result of the call is complete without them. When the result arrives, the rest of
the output is taken from it, so that the callback gets each byte of the result once and in order.
"""

from __future__ import annotations

import asyncio
import codecs
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

from agentenv.containers.attachments import decoded_base64
from agentenv.containers.connection import ContainerConnection
from agentenv.deadlines import scaled
from agentenv.errors import AgentEnvError
from agentenv.sessions.head_tail import joined, seam, whole_start
from agentenv.wire.calls import LIVE_WAIT_S, CallResult, LiveOutput
from agentenv.wire.tools import BashReply

Stream = Literal["stdout", "stderr"]


@dataclass(frozen=True)
class OutputBytes:
    """An ``on_output`` that gets bytes in place of text: ``OutputBytes(callback)``. ``callback(stream, data)`` may be a
    coroutine function. Bytes that were dropped are just missing; the result counts them."""

    callback: Callable[[Stream, bytes], Awaitable[None] | None]


OnOutput = Callable[[Stream, str], Awaitable[None] | None] | OutputBytes
"""Called with the name of the stream and the next piece of its text, never an empty one; a coroutine function is
awaited before the next one."""


async def tell(on_output: OnOutput, stream: Stream, piece: Any) -> None:
    """Call it with a piece, bytes if it wants bytes. Raises what it raises."""
    callback: Callable[[Stream, Any], Awaitable[None] | None]
    callback = on_output.callback if isinstance(on_output, OutputBytes) else on_output
    if inspect.isawaitable(told := callback(stream, piece)):
        await told


_PAUSE_S: Final = 0.2
_LATE_S: Final = scaled(5.0)


class Kept(NamedTuple):
    """One stream in a result: its beginning and its end, and how many bytes are missing between."""

    head: bytes = b""
    tail: bytes = b""
    dropped_bytes: int = 0


class Shown:
    """Passes one stream to a callback. Pure, but for that."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._missing_bytes = 0
        self.bytes = 0
        """Offset in the stream up to which it was passed on."""

    def add(self, data: bytes, begin: int) -> None:
        """Pass on ``data``, which is at offset ``begin`` of the stream. Where bytes are missing, the rest of a cut
        character counts as missing, too."""
        if begin > self.bytes:
            pending, _ = self._decoder.getstate()
            self._decoder.reset()
            self._missing_bytes += len(pending) + begin - self.bytes
        self.bytes = begin + len(data)
        if self._missing_bytes:
            skipped = whole_start(data)
            self._missing_bytes += skipped
            if not (data := data[skipped:]):
                return
            self._mark()
        self._put(self._decoder.decode(data))

    def finish(self, kept: Kept) -> None:
        """Pass on the rest of the stream, as the result has it."""
        self.add(kept.head[self.bytes :], self.bytes)
        if kept.dropped_bytes:
            tail_begin = len(kept.head) + kept.dropped_bytes
            begin = max(self.bytes, tail_begin)
            self.add(kept.tail[begin - tail_begin :], begin)
        self._end()

    def _end(self) -> None:
        self._put(self._decoder.decode(b"", final=True))
        self._mark()

    def _mark(self) -> None:
        missing_bytes, self._missing_bytes = self._missing_bytes, 0
        self._put(seam(missing_bytes) if missing_bytes else "")

    def _put(self, text: str) -> None:
        if text:
            self._show(text)


class ShownBytes(Shown):
    """Passes on the bytes themselves, and nothing in the place of those that are missing."""

    def __init__(self, show: Callable[[bytes], None]) -> None:
        super().__init__(lambda _: None)
        self._show_bytes = show

    def add(self, data: bytes, begin: int) -> None:
        """See Shown."""
        self.bytes = begin + len(data)
        if data:
            self._show_bytes(data)

    def _end(self) -> None:
        """Nothing is pending."""


class LiveView:
    """The view of one call, whose ``on_output`` it calls."""

    def __init__(self, connection: ContainerConnection, lease: bytes, call_id: str, on_output: OnOutput) -> None:
        self._connection = connection
        self._lease = lease.decode()
        self._path = f"/v1/calls/{call_id}/output"
        self._on_output = on_output
        self._pieces: list[tuple[Stream, str | bytes]] = []
        kind = ShownBytes if isinstance(on_output, OutputBytes) else Shown
        self._stdout = kind(lambda piece: self._pieces.append(("stdout", piece)))
        self._stderr = kind(lambda piece: self._pieces.append(("stderr", piece)))
        self.telling = asyncio.Lock()
        """Held while the callback gets pieces: whoever cancels :meth:`follow` then loses some of them."""

    async def follow(self) -> None:
        """Pass on output as it is printed, until cancelled or the call has ended. Raises what the callback raises."""
        while True:
            offsets = {"stdout": self._stdout.bytes, "stderr": self._stderr.bytes}
            try:
                raw = await self._connection.request(
                    "GET", self._path, lease=self._lease, params=offsets, timeout_s=LIVE_WAIT_S + _LATE_S
                )
                output = self._connection.parsed(LiveOutput, raw)
            except AgentEnvError:
                # The call has not arrived there yet, or its result was discarded there. If the container has failed,
                # the call itself raises the error.
                await asyncio.sleep(_PAUSE_S)
                continue
            async with self.telling:
                self._stdout.add(output.stdout, output.stdout_from)
                self._stderr.add(output.stderr, output.stderr_from)
                await self._tell()
            if output.ended:
                return

    async def finish(self, result: CallResult) -> None:
        """Pass on what the result has and the callback has not."""
        stdout, stderr = await kept_of(result)
        self._stdout.finish(stdout)
        self._stderr.finish(stderr)
        await self._tell()

    async def _tell(self) -> None:
        pieces, self._pieces = self._pieces, []
        for stream, piece in pieces:
            await tell(self._on_output, stream, piece)


async def kept_of(result: CallResult) -> tuple[Kept, Kept]:
    """stdout and stderr in a result: of a call with ``binary`` the bytes
    (:class:`agentenv.wire.tools.BashReply`), of another one its text."""
    content = result.content if isinstance(result.content, dict) else {}
    if "parts" not in content:
        return Kept(result.stdout.encode()), Kept(result.stderr.encode())
    rest = memoryview(await decoded_base64(str(content.get("data", ""))))
    parts = []
    for length in BashReply.model_validate({"parts": content["parts"]}).parts:
        parts.append(bytes(rest[:length]))
        rest = rest[length:]
    out_head, out_tail, err_head, err_tail = parts
    err_head += result.stderr.encode()  # why it could not be started
    return (
        Kept(out_head, out_tail, result.stdout_dropped_bytes),
        Kept(err_head, err_tail, result.stderr_dropped_bytes),
    )


async def as_text(result: CallResult) -> CallResult:
    """The result of a call with ``binary`` as it would be without; any other one unchanged."""
    if not (isinstance(result.content, dict) and "parts" in result.content):
        return result
    stdout, stderr = await kept_of(result)
    out, out_dropped = joined(*stdout)
    err, err_dropped = joined(*stderr)
    fields = {"stdout": out, "stdout_dropped_bytes": out_dropped, "stderr": err, "stderr_dropped_bytes": err_dropped}
    return result.model_copy(update={**fields, "content": None})
