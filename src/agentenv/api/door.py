"""Accepts a service's connections: so many in all, and of one peer, before anything is known of whoever connects."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import resource
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

from aiohttp import web

from agentenv.deadlines import scaled

logger = logging.getLogger(__name__)

HEADER_S: Final = scaled(10.0)
"""Longest time that the handshake of TLS, or the headers of a request, may take."""
IDLE_S: Final = 60.0
"""How long aiohttp's server waits for the headers of a request, and keeps a connection without one: longer than its
clients do (30 s), so that none is closed as it is used again."""
_MOST: Final = 10_000
_AT_ONCE: Final = 64
"""Connections accepted before others have their turn in the event loop."""
_RETRY_S: Final = 0.5
_LOG_EVERY_S: Final = 1.0


@dataclass(frozen=True)
class ConnectionLimits:
    """Most open connections: of everybody, and of one peer (an IPv4 address, or a /64 network of IPv6)."""

    in_all: int = _MOST
    per_peer: int = _MOST // 4

    @classmethod
    def of_this_process(cls) -> ConnectionLimits:
        """Raise the soft limit of open files to the hard one. Half of them are for connections: what the service itself
        opens, above all to its containers, does not depend on who connects to it."""
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        files = _MOST * 2 if hard == resource.RLIM_INFINITY else hard
        in_all = min(_MOST, max(4, files // 2))
        return cls(in_all, in_all // 4)


class _Socket(socket.socket):
    """Calls ``closed`` when it is closed: transports close theirs, however they end."""

    closed: Callable[[], None] = staticmethod(lambda: None)

    def close(self) -> None:
        super().close()
        self.closed()


class _Connection:
    """``protocol`` is None until the handshake of TLS begins."""

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.protocol: asyncio.BaseProtocol | None = None
        self.serving: asyncio.Task[None] | None = None
        self.transport: asyncio.BaseTransport | None = None

    def cut(self) -> None:
        if isinstance(self.transport, asyncio.WriteTransport):
            self.transport.abort()
        elif self.serving is not None:
            self.serving.cancel()


class Door:
    """Accepts connections on a listening socket while it is open (a context manager). When it closes, so does the
    socket; connections that were accepted stay.

    Who is above a limit costs its own peer, or the peer with the most connections, the oldest connection without a
    request that is being answered (``idle``); if that peer has none, the new connection is closed.
    """

    def __init__(
        self,
        listening: socket.socket,
        make: Callable[[], asyncio.BaseProtocol],
        *,
        limits: ConnectionLimits | None = None,
        tls: ssl.SSLContext | None = None,
        idle: Callable[[Any], bool] = lambda _: False,
    ) -> None:
        """``make`` makes the protocol of a connection. ``limits``: None: those of this process."""
        self._listening = listening
        self._make = make
        self._limits = limits or ConnectionLimits.of_this_process()
        self._tls = tls
        self._idle = idle
        self._peers: dict[str, dict[_Connection, None]] = {}
        """Open connections of each peer, the oldest first."""
        self._open = 0
        self._logged_at_s = float("-inf")
        self._retry: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        self._listening.setblocking(False)
        self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._retry is not None:
            self._retry.cancel()
        asyncio.get_running_loop().remove_reader(self._listening)
        self._listening.close()  # else the kernel goes on to accept connections, which are never answered

    def _start(self) -> None:
        self._retry = None
        asyncio.get_running_loop().add_reader(self._listening, self._accept)

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                accepted, address = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # no descriptors or memory: the socket stays readable
                self._log("connections cannot be accepted: %s", error)
                loop = asyncio.get_running_loop()
                loop.remove_reader(self._listening)
                self._retry = loop.call_later(_RETRY_S, self._start)
                return
            self._admit(accepted, peer_of(address[0]))

    def _admit(self, accepted: socket.socket, peer: str) -> None:
        if not self._room(peer):
            accepted.close()
            return
        connection = _Connection(peer)
        self._peers.setdefault(peer, {})[connection] = None
        self._open += 1
        conn = _Socket(fileno=accepted.detach())
        conn.closed = lambda: self._forget(connection)
        conn.setblocking(False)
        connection.serving = asyncio.get_running_loop().create_task(self._serve(connection, conn))

    async def _serve(self, connection: _Connection, conn: _Socket) -> None:
        def made() -> asyncio.BaseProtocol:
            connection.protocol = self._make()
            return connection.protocol

        try:
            connection.transport, _ = await asyncio.get_running_loop().connect_accepted_socket(
                made, conn, ssl=self._tls, ssl_handshake_timeout=HEADER_S if self._tls is not None else None
            )
        except (OSError, EOFError) as error:
            logger.debug("no connection with %s: %s", connection.peer, error)
        finally:
            if connection.transport is None:
                conn.close()

    def _room(self, peer: str) -> bool:
        """Whether a connection of this peer may be accepted, after another one was closed for it if need be."""
        if len(self._peers.get(peer, ())) >= self._limits.per_peer:
            crowd = peer
        elif self._open >= self._limits.in_all:
            crowd = max(self._peers, key=lambda name: len(self._peers[name]))
        else:
            return True
        oldest = next((one for one in self._peers[crowd] if one.protocol is None or self._idle(one.protocol)), None)
        self._log("%d connections are open, %d of %s: no more of it", self._open, len(self._peers[crowd]), crowd)
        if oldest is None:
            return False
        self._forget(oldest)
        oldest.cut()
        return True

    def _forget(self, connection: _Connection) -> None:
        crowd = self._peers.get(connection.peer, {})
        if connection not in crowd:
            return
        del crowd[connection]
        self._open -= 1
        if not crowd:
            del self._peers[connection.peer]

    def _log(self, message: str, *about: object) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._logged_at_s >= _LOG_EVERY_S:
            self._logged_at_s = now
            logger.warning(message, *about)


@asynccontextmanager
async def behind_door(
    application: web.Application,
    listening: socket.socket,
    *,
    drain_s: float,
    tls: ssl.SSLContext | None = None,
    auto_decompress: bool = True,
) -> AsyncIterator[None]:
    """Serve an application on a listening socket, which is closed at the end; requests then have ``drain_s`` to end. A
    client that goes away ends its request."""
    runner = web.AppRunner(
        application,
        access_log=None,
        handle_signals=False,
        handler_cancellation=True,
        auto_decompress=auto_decompress,
        keepalive_timeout=IDLE_S,
        shutdown_timeout=drain_s,
    )
    try:
        await runner.setup()
        assert runner.server is not None
        with Door(listening, runner.server, tls=tls):
            yield
    finally:
        await runner.cleanup()
        listening.close()


def peer_of(address: str) -> str:
    """Whose connection it is: an IPv4 address, or the /64 network of an IPv6 one, which is a single host's."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if found.version == 4:
        return str(found)
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.ip_network((found, 64), strict=False))
