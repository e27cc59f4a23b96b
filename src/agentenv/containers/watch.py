"""Follows the slots of one container: the client of ``GET /v1/watch``. No retries."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Final, cast
from urllib.parse import urlsplit

import httptools
from pydantic import ValidationError

from agentenv.containers.connection import ContainerConnection
from agentenv.containers.handle import ContainerHandle
from agentenv.errors import ProtocolError
from agentenv.wire.watch import LEAST_BEAT_S, MOST_BEAT_S, WatchLine, WatchList, watch_line

MAX_LINE_BYTES: Final = 16 * 1024 * 1024
"""Longest line: the list of 10,000 slots takes a third of it."""
_MAX_REFUSAL_BYTES: Final = 64 * 1024
_WHAT: Final = "GET /v1/watch"


async def watch(
    handle: ContainerHandle, *, generation: int = 0, silence_s: float = 5.0
) -> AsyncGenerator[WatchLine, None]:
    """The lines as they arrive, the list first, without end: the caller closes it. ``generation`` is the farm's: the
    container refuses earlier ones from then on. The requested interval of beats is shorter than ``silence_s``.

    Raises: ConnectionLostError: there was no connection, it was cut, or nothing arrived for ``silence_s``.
    ProtocolError: a line violates the wire contract. Otherwise the error the container named.
    """
    connection = ContainerConnection(handle, generation=generation)
    response = await _request(connection, silence_s)
    try:
        unfinished, listed, refused = b"", False, b""
        while piece := await response.read():
            if response.status != 200:
                refused = (refused + piece)[:_MAX_REFUSAL_BYTES]
                continue
            *lines, unfinished = (unfinished + piece).split(b"\n")
            if len(unfinished) > MAX_LINE_BYTES:
                raise ProtocolError(f"container {handle.id} sent a line above {MAX_LINE_BYTES} bytes")
            for raw in lines:
                line = _parsed(handle, raw)
                if isinstance(line, WatchList) is listed:
                    raise ProtocolError(f"container {handle.id}: the list must be the first line, and the only one")
                listed = True
                yield line
        if response.status not in (0, 200):
            raise connection.refusal(response.status, refused)
        raise connection.lost(f"{_WHAT}: {response.end}")
    finally:
        response.close()


class _Response(asyncio.Protocol):
    """The response to one request, over a connection of its own. A farm has thousands of them for as long as it runs:
    each takes a fifth of the memory of aiohttp's (benchmarks, F9)."""

    def __init__(self, request: bytes, silence_s: float) -> None:
        self.status = 0
        """0: it has not begun."""
        self.end = ""
        """Why the response has ended; empty: it has not."""
        self._loop = asyncio.get_running_loop()
        self._request = request
        self._silence_s = silence_s
        self._parser = httptools.HttpResponseParser(self)
        self._body = b""
        self._more: asyncio.Future[None] | None = None
        self._transport: asyncio.Transport | None = None
        self._received_at_s = self._loop.time()
        self._silence_timer: asyncio.TimerHandle | None = None

    async def read(self) -> bytes:
        """What has arrived of the body since the last call, at least a byte; empty at its end."""
        while not self._body and not self.end:
            self._more = self._loop.create_future()
            await self._more
        body, self._body = self._body, b""
        if self._transport is not None:
            self._transport.resume_reading()
        return body

    def close(self) -> None:
        """Close the connection. Repeatable."""
        self._ended("it was closed here")
        if self._transport is not None:
            self._transport.abort()

    # -- called by asyncio --------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(self._request)
        self._check_silence()

    def data_received(self, data: bytes) -> None:
        """A part of the response."""
        self._received_at_s = self._loop.time()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._ended(f"the answer is not HTTP: {error}")
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        """The connection has ended."""
        self._ended(str(error) if error is not None else "it was cut")

    def _check_silence(self) -> None:
        """End the response after too long a silence. Data that arrived while this process was suspended has been read
        by now: asyncio reads before it calls timers."""
        now = self._loop.time()
        if self._transport is not None and not self._transport.is_reading():
            self._received_at_s = now  # paused because our reader is slow: not a silence of the container
        left_s = self._received_at_s + self._silence_s - now
        if left_s > 0:
            self._silence_timer = self._loop.call_later(left_s, self._check_silence)
        else:
            self._ended(f"nothing came for {self._silence_s:g} s")

    # -- called by httptools ------------------------------------------------------------------------

    def on_headers_complete(self) -> None:
        """The body follows."""
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        """A part of it."""
        self._body += body
        if len(self._body) > MAX_LINE_BYTES and self._transport is not None:
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        """The container has ended it."""
        self._ended("it was cut")

    def _ended(self, why: str) -> None:
        self.end = self.end or why
        if self._silence_timer is not None:
            self._silence_timer.cancel()
        self._wake()

    def _wake(self) -> None:
        if self._more is not None and not self._more.done():
            self._more.set_result(None)


async def _request(connection: ContainerConnection, silence_s: float) -> _Response:
    """Raises ConnectionLostError."""
    url = urlsplit(connection.handle.base_url)
    headers = {"Host": url.netloc, **connection.headers}
    first = f"GET {url.path}/v1/watch?beat_s={_beat_s(silence_s):g} HTTP/1.1"
    request = "\r\n".join([first, *(f"{name}: {value}" for name, value in headers.items()), "", ""]).encode()
    secure = url.scheme == "https"
    port = url.port or (443 if secure else 80)
    try:
        with connection.failures(_WHAT, silence_s):
            async with asyncio.timeout(silence_s):
                _, response = await asyncio.get_running_loop().create_connection(
                    lambda: _Response(request, silence_s), url.hostname or "", port, ssl=secure or None
                )
    except OSError as error:  # its name has no address, its certificate is wrong
        raise connection.lost(f"{_WHAT}: {error}") from error
    return response


def _beat_s(silence_s: float) -> float:
    """Each line costs the farm some 0.1 core-ms (F9.watch), and it follows thousands of containers."""
    return min(max(LEAST_BEAT_S, silence_s / 2.5), MOST_BEAT_S)


def _parsed(handle: ContainerHandle, line: bytes) -> WatchLine:
    try:
        return watch_line.validate_json(line)
    except ValidationError as error:
        raise ProtocolError(f"container {handle.id}: a line of the watch: {error}") from error
