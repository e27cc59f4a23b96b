"""Serves an application with uvicorn, without uvicorn's signal handlers: whoever opened it decides when it ends.
Connections are accepted by :mod:`agentenv.api.door`, because uvicorn limits neither them nor their headers."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import uvicorn

from agentenv.api.door import ConnectionLimits, Door
from agentenv.api.limited_http import LimitedHttp
from agentenv.api.listening import listen, url_of
from agentenv.errors import ConfigError, InfraError

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
