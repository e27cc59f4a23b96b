"""Serves an application with uvicorn, without uvicorn's signal handlers: whoever opened it decides when it ends.
Connections are accepted by :mod:`agentenv.api.door`, and their headers are limited here, because uvicorn limits
neither."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, Final

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from agentenv.api.door import HEADER_S, ConnectionLimits, Door
from agentenv.errors import ConfigError, InfraError
from agentenv.listening import listen, url_of

_GRACE_S = 2


class _Uvicorn(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As in uvicorn, and signals that it is done."""
        await super().startup(sockets)
        self.up.set()

    def protocol(self) -> LimitedHttp:
        """Of a new connection."""
        return LimitedHttp(self.config, self.server_state, app_state={})

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Does nothing: the command line (or the test) handles signals."""
        yield


@contextlib.asynccontextmanager
async def served(
    app: Any,
    what: str,
    *,
    host: str,
    port: int,
    ending: Callable[[], None] = lambda: None,
    certificate: Path | None = None,
    key: Path | None = None,
) -> AsyncIterator[str]:
    """Serve an ASGI application; yields its URL. Port 0: any free one. ``what`` names it in errors. ``ending`` is
    called before open requests are waited for. With ``certificate`` and ``key`` it speaks TLS.

    Raises: ConfigError when it cannot listen there, or when the certificate cannot be used.
    """
    listening = listen(host, port)
    async with served_on(listening, app, what, ending=ending, certificate=certificate, key=key):
        yield url_of(listening, host, "https" if certificate else "http")


@contextlib.asynccontextmanager
async def served_on(
    listening: socket.socket,
    app: Any,
    what: str,
    *,
    ending: Callable[[], None] = lambda: None,
    certificate: Path | None = None,
    key: Path | None = None,
    limits: ConnectionLimits | None = None,
) -> AsyncIterator[None]:
    """As :func:`served`, on a socket that listens and that is closed at the end. ``limits`` of connections: None: those
    of this process."""
    try:
        running = _Uvicorn(_config(app, certificate, key))
        door = Door(
            listening, running.protocol, limits=limits, tls=running.config.ssl, idle=lambda protocol: protocol.idle
        )
        task = asyncio.create_task(running.serve(sockets=[]), name=f"{what} http")
        try:
            up = asyncio.create_task(running.up.wait())
            await asyncio.wait({task, up}, return_when=asyncio.FIRST_COMPLETED)
            up.cancel()
            if task.done():
                raise InfraError(f"the {what} did not start to listen") from task.exception()
            with door:
                yield
        finally:
            running.should_exit = True
            ending()
            await asyncio.wait({task})
    finally:
        listening.close()


def _config(app: Any, certificate: Path | None, key: Path | None) -> uvicorn.Config:
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=_GRACE_S,
        server_header=False,
        ssl_certfile=certificate,
        ssl_keyfile=key,
    )
    try:
        config.load()
    except OSError as error:
        raise ConfigError("tls_cert", f"{certificate} with {key} cannot be used: {error}") from error
    return config


HEADER_BYTES: Final = 64 * 1024
"""Largest headers of a request, and largest trailers of its body."""

_log = logging.getLogger(__name__)
_log.setLevel(logging.ERROR)  # uvicorn warns of every request that is none: anybody could fill the disk


class LimitedHttp(HttpToolsProtocol):
    """Cuts a connection whose headers are larger than ``HEADER_BYTES`` (431) or take longer than ``HEADER_S``. What
    comes before the headers of a request, or after its answer, counts as headers."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.logger = _log
        self._header_bytes = 0
        self._loose_bytes = 0
        """Received since the parser last completed anything: the parser keeps what is incomplete."""
        self._moved = False
        self._due: asyncio.TimerHandle | None = None

    @property
    def idle(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The first headers are due."""
        super().connection_made(transport)
        self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is due any more."""
        self._headers_came()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse it, and count what the parser does not return."""
        if self._due is None and self.idle:
            self._expect_headers()
        self._moved = False
        super().data_received(data)
        self._loose_bytes = 0 if self._moved else self._loose_bytes + len(data)
        if self._loose_bytes > HEADER_BYTES and not self.transport.is_closing():
            self._refuse()

    def on_message_begin(self) -> None:
        """A request begins."""
        self._header_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """A piece of its address."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or a trailer."""
        self._count(len(name) + len(value) + 4)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The request is known."""
        self._moved = True
        self._header_bytes = 0
        self._headers_came()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A piece of its body."""
        self._moved = True
        super().on_body(body)

    def send_400_response(self, msg: str) -> None:
        """The parser failed; by :meth:`_count`, if the headers are too large."""
        if self._header_bytes > HEADER_BYTES:
            self._refuse()
        else:
            super().send_400_response(msg)

    def _count(self, more: int) -> None:
        self._header_bytes += more
        if self._header_bytes > HEADER_BYTES:
            raise OverflowError  # ends the parser

    def _expect_headers(self) -> None:
        self._due = self.loop.call_later(HEADER_S, self.transport.abort)

    def _headers_came(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None

    def _refuse(self) -> None:
        said = f"the headers are larger than {HEADER_BYTES} bytes".encode()
        head = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: text/plain\r\nconnection: close\r\n"
        self.transport.write(head + b"content-length: %d\r\n\r\n" % len(said) + said)
        self.transport.close()
