"""Connections over which results are sent: the stream (WebSocket) and the reply of ``POST /v1/batch``."""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Callable

from aiohttp import web

from agentenv.sandbox.server.calls import SlotCall
from agentenv.sandbox.server.poller import Poller

_HIGH_WATER_BYTES = 2 * 1024 * 1024
"""Unsent bytes in the connection's buffer beyond which results wait in their cache (which is bounded)."""
_MAX_OWN_BYTES = 1024 * 1024
"""Acknowledgements and refusals that may wait for a client to read them."""
_SLOW_POLL_S = 0.002
_SLOWEST_POLL_S = 0.05
_TEXT_FRAME = 0x81
_SHORT, _LONG = struct.Struct("!BBH"), struct.Struct("!BBQ")


class StreamSink:
    """One WebSocket. All results ready in one iteration of the loop are sent in one write, each as a separate text
    message. Writes to a client that does not read are retried, and block no other client.

    ``sent`` is called with each call whose result was written."""

    def __init__(self, transport: asyncio.Transport, poller: Poller, sent: Callable[[SlotCall], None]) -> None:
        self.closed = False
        self._transport = transport
        self._poller = poller
        self._sent = sent
        self._ready: deque[SlotCall | bytes] = deque()
        self._own_bytes = 0
        self._scheduled = False
        self._poll_s = _SLOW_POLL_S
        self._drained: asyncio.Future[None] | None = None

    @property
    def clogged(self) -> bool:
        """Whether the client reads so little that no more of its messages should be read. Waiting results do not
        count: their cache is bounded, and messages that cancel or forget them have to be read."""
        return self._own_bytes > _MAX_OWN_BYTES

    def deliver(self, call: SlotCall) -> None:
        """See :class:`ResultSink`."""
        self._push(call)

    def refuse(self, call_id: str, message: bytes) -> None:  # noqa: ARG002 (the message names it)
        """See :class:`ResultSink`."""
        self._push(message)

    def send(self, message: bytes) -> None:
        """Send a message that is no result."""
        self._push(message)

    def send_along(self, message: bytes) -> None:
        """Send a message together with the next one, or within a millisecond or two if there is none."""
        self._ready.append(message)
        self._own_bytes += len(message)
        if not self._scheduled:
            self._poller.later(self, self._flush)

    async def room(self) -> None:
        """Wait until the client has read: then its next messages can be read."""
        while self._own_bytes and not self.closed:
            self._drained = self._poller.loop.create_future()
            await self._drained

    def close(self) -> None:
        """Stop sending. Repeatable. Calls continue; their results are cached."""
        self.closed = True
        self._poller.not_later(self)
        self._ready.clear()
        self._own_bytes = 0
        self._wake_drained()

    def _push(self, item: SlotCall | bytes) -> None:
        self._ready.append(item)
        self._own_bytes += len(item) if isinstance(item, bytes) else 0
        if not self._scheduled:
            self._scheduled = True
            self._poller.defer(self._flush)

    def _flush(self) -> None:
        self._scheduled = False
        self._poller.not_later(self)
        if self.closed or self._transport.is_closing():
            self.close()
            return
        room = _HIGH_WATER_BYTES - self._transport.get_write_buffer_size()
        frames: list[bytes] = []
        written: list[SlotCall] = []
        while self._ready and room > 0:
            item = self._ready.popleft()
            message = item if isinstance(item, bytes) else item.message
            if message is None:
                continue
            self._own_bytes -= len(item) if isinstance(item, bytes) else 0
            frames += (_frame_head(len(message)), message)
            room -= len(message)
            if isinstance(item, SlotCall):
                written.append(item)
        if frames:
            self._poll_s = _SLOW_POLL_S
            self._transport.write(b"".join(frames))
            for call in written:
                self._sent(call)
        if self._drained is not None and not self._own_bytes:
            self._wake_drained()
        if self._ready and not self._scheduled:
            self._scheduled = True
            self._poller.loop.call_later(self._poll_s, self._flush)
            self._poll_s = min(2 * self._poll_s, _SLOWEST_POLL_S)

    def _wake_drained(self) -> None:
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)


class BatchSink:
    """The lines of one ``POST /v1/batch``: one for each of its calls, also of those that another client submitted."""

    def __init__(self, ids: set[str], sent: Callable[[SlotCall], None]) -> None:
        self.closed = False
        self._missing = ids
        self._sent = sent
        self._ready: deque[tuple[SlotCall | None, bytes]] = deque()
        self._woken = asyncio.Event()

    def deliver(self, call: SlotCall) -> None:
        """See :class:`ResultSink`."""
        if call.message is not None:
            self._add(call.call_id, call, call.message)

    def refuse(self, call_id: str, message: bytes) -> None:
        """See :class:`ResultSink`."""
        self._add(call_id, None, message)

    async def write_all(self, response: web.StreamResponse) -> None:
        """Write each result as a line as soon as it is ready, until every call has one."""
        while self._missing or self._ready:
            await self._woken.wait()
            self._woken.clear()
            while self._ready:
                call, message = self._ready.popleft()
                await response.write(message + b"\n")
                if call is not None:
                    self._sent(call)

    def _add(self, call_id: str, call: SlotCall | None, message: bytes) -> None:
        if call_id in self._missing:
            self._missing.discard(call_id)
            self._ready.append((call, message))
            self._woken.set()


def _frame_head(size: int) -> bytes:
    """The head of an unmasked, unfragmented WebSocket text frame (RFC 6455 §5.2)."""
    if size < 126:
        return bytes((_TEXT_FRAME, size))
    return _SHORT.pack(_TEXT_FRAME, 126, size) if size < 65536 else _LONG.pack(_TEXT_FRAME, 127, size)
