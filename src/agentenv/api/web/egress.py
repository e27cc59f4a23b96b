"""The browser's only route to the network: a forward proxy on loopback that enforces the allow list.

A page may redirect, embed, fetch, or open a socket; all of it goes through this proxy, names are resolved here, and
only checked addresses are connected to. One request per connection: the request that is checked is the one that is
sent.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hmac
import logging
import secrets
from types import TracebackType
from typing import Final, Protocol, Self

from agentenv.api.web.network import parsed_url
from agentenv.errors import InvalidArgumentsError, PolicyRefusalError

logger = logging.getLogger(__name__)

REFUSED_HEADER: Final = "x-agentenv-refused"
_MOST_HEAD_BYTES: Final = 64 * 1024
_HEAD_S: Final = 30.0
_CONNECT_S: Final = 15.0
_IDLE_S: Final = 120.0
_CHUNK_BYTES: Final = 64 * 1024
_MOST_CONNECTIONS: Final = 1_000
_HOP_BY_HOP: Final = ("proxy-authorization", "proxy-connection", "connection", "keep-alive", "te", "upgrade")
_GONE: Final = (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError, ValueError)


class Judge(Protocol):
    """Decides where the proxy connects to."""

    async def addresses(self, host: str, port: int) -> list[str]:
        """The addresses of a host that may be connected to. Raises PolicyRefusalError; OSError when it cannot be
        resolved."""


class EgressProxy:
    """An async context manager. ``url``, ``username`` and ``password`` are given to the browser."""

    def __init__(self, allowed: Judge) -> None:
        self._allowed = allowed
        self._server: asyncio.Server | None = None
        self._places = asyncio.Semaphore(_MOST_CONNECTIONS)
        self._serving: set[asyncio.Task[None]] = set()
        self.username = "browser"
        self.password = secrets.token_urlsafe(24)

    @property
    def url(self) -> str:
        """Its address, once entered."""
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0, limit=_MOST_HEAD_BYTES)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._server is not None:
            self._server.close()
            for task in self._serving:
                task.cancel()
            await asyncio.gather(*self._serving, return_exceptions=True)
            await self._server.wait_closed()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            async with self._places:
                await self._serve(reader, writer)
        except _GONE as error:
            logger.debug("egress: %r", error)
        except asyncio.CancelledError:
            pass  # we are closing; asyncio's streams would log it
        finally:
            self._serving.discard(task)
            await _closed(writer)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(_HEAD_S):
            head = await reader.readuntil(b"\r\n\r\n")
        line, headers = _parsed(head)
        method, target, _ = line.split(" ", 2)
        if not self._authorized(headers):
            writer.write(b'HTTP/1.1 407 Proxy Authentication Required\r\nProxy-Authenticate: Basic realm="agentenv"\r\n'
                         b"Content-Length: 0\r\nConnection: close\r\n\r\n")  # fmt: skip
            return
        try:
            host, port, path = _destination(method, target)
            addresses = await self._allowed.addresses(host, port)
        except (PolicyRefusalError, InvalidArgumentsError) as error:
            _refuse(writer, 403, str(error))
            return
        except OSError:
            _refuse(writer, 502, "no such host", refused=False)
            return
        try:
            upstream = await _connect(addresses, port)
        except _GONE as error:
            _refuse(writer, 502, f"no connection: {error}", refused=False)
            return
        try:
            if method == "CONNECT":
                writer.write(b"HTTP/1.1 200 Connection Established\r\n\r\n")
                await _both_ways(reader, writer, *upstream)
            else:
                await _one_request(f"{method} {path} HTTP/1.1", headers, reader, writer, *upstream)
        finally:
            await _closed(upstream[1])

    def _authorized(self, headers: list[tuple[str, str]]) -> bool:
        given = next((value for name, value in headers if name.lower() == "proxy-authorization"), "")
        wanted = "Basic " + base64.b64encode(f"{self.username}:{self.password}".encode()).decode()
        return hmac.compare_digest(given.encode("utf-8", "replace"), wanted.encode())


def _parsed(head: bytes) -> tuple[str, list[tuple[str, str]]]:
    line, *rest = head.decode("latin-1").rstrip("\r\n").split("\r\n")
    headers = [(name.strip(), value.strip()) for name, _, value in (each.partition(":") for each in rest)]
    return line, headers


def _destination(method: str, target: str) -> tuple[str, int, str]:
    """Host, port, and the path to request there."""
    url = parsed_url(f"https://{target}" if method == "CONNECT" else target)
    return url.raw_host or "", url.port or 0, url.raw_path_qs


async def _connect(addresses: list[str], port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to the first of the addresses that answers. Raises: OSError of the last."""
    failure: Exception = OSError("no address")
    for address in addresses:
        try:
            async with asyncio.timeout(_CONNECT_S):
                return await asyncio.open_connection(address, port)
        except (OSError, TimeoutError) as error:
            failure = error
    raise failure


async def _one_request(
    line: str,
    headers: list[tuple[str, str]],
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    up_reader: asyncio.StreamReader,
    up_writer: asyncio.StreamWriter,
) -> None:
    """Forward this request, its body and nothing more; return the answer until the server closes."""
    kept = [f"{name}: {value}" for name, value in headers if name.lower() not in _HOP_BY_HOP]
    up_writer.write("\r\n".join((line, *kept, "Connection: close", "", "")).encode("latin-1"))
    length = next((value for name, value in headers if name.lower() == "content-length"), "0")
    left = int(length) if length.isdigit() else 0
    while left > 0 and (chunk := await reader.read(min(_CHUNK_BYTES, left))):
        up_writer.write(chunk)
        await up_writer.drain()
        left -= len(chunk)
    await _pour(up_reader, writer, _Traffic())


class _Traffic:
    """When something last passed a connection, in either direction."""

    def __init__(self) -> None:
        self.passed()

    def passed(self) -> None:
        self._last_s = asyncio.get_running_loop().time()

    def left_s(self) -> float:
        """For how long it may still be silent."""
        return self._last_s + _IDLE_S - asyncio.get_running_loop().time()


async def _both_ways(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    up_reader: asyncio.StreamReader,
    up_writer: asyncio.StreamWriter,
) -> None:
    """A tunnel, until either side closes or both are silent for long."""
    traffic = _Traffic()
    ways = {
        asyncio.create_task(_pour(reader, up_writer, traffic)),
        asyncio.create_task(_pour(up_reader, writer, traffic)),
    }
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)


async def _pour(source: asyncio.StreamReader, sink: asyncio.StreamWriter, traffic: _Traffic) -> None:
    while True:
        try:
            async with asyncio.timeout(traffic.left_s()):
                chunk = await source.read(_CHUNK_BYTES)
        except TimeoutError:
            if traffic.left_s() > 0:  # the other direction is not silent
                continue
            raise
        if not chunk:
            return
        traffic.passed()
        async with asyncio.timeout(_IDLE_S):
            sink.write(chunk)
            await sink.drain()


def _refuse(writer: asyncio.StreamWriter, status: int, message: str, *, refused: bool = True) -> None:
    told = message.encode("ascii", "replace").replace(b"\r", b" ").replace(b"\n", b" ")
    mark = f"{REFUSED_HEADER}: ".encode() + told + b"\r\n" if refused else b""
    reason = b"Forbidden" if status == 403 else b"Bad Gateway"
    writer.write(
        b"HTTP/1.1 %d %s\r\nContent-Type: text/plain\r\n%sContent-Length: %d\r\nConnection: close\r\n\r\n%s"
        % (status, reason, mark, len(told), told)
    )


async def _closed(writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError, asyncio.CancelledError, TimeoutError):
        async with asyncio.timeout(5.0):
            if not writer.is_closing():
                await writer.drain()
            writer.close()
            await writer.wait_closed()
