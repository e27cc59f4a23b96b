"""Serves a tool server with uvicorn, without uvicorn's signal handlers: the code that opened it decides when it
ends."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator

import uvicorn

from agentenv.api.tool_server.app import tool_app
from agentenv.api.tool_server.core import ToolServer
from agentenv.config import cannot_listen
from agentenv.errors import InfraError

_GRACE_S = 2


class _Uvicorn(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As in uvicorn, and signals that it is done."""
        await super().startup(sockets)
        self.up.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Does nothing: the command line (or the test) handles signals."""
        yield


@contextlib.asynccontextmanager
async def served(server: ToolServer, token: str, *, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
    """Serve an open tool server; yields its URL. Port 0: any free one. Leaving stops serving, not the server.

    Raises: ConfigError when it cannot listen there.
    """
    listening = _listen(host, port)
    try:
        config = uvicorn.Config(
            tool_app(server, token),
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=_GRACE_S,
            server_header=False,
        )
        running = _Uvicorn(config)
        task = asyncio.create_task(running.serve(sockets=[listening]), name="tool-server-http")
        try:
            up = asyncio.create_task(running.up.wait())
            await asyncio.wait({task, up}, return_when=asyncio.FIRST_COMPLETED)
            up.cancel()
            if task.done():
                raise InfraError("the tool server did not start to listen") from task.exception()
            yield _url(host, listening.getsockname()[1])
        finally:
            running.should_exit = True
            server.send_away()  # otherwise their requests would be cut off after a while with a 500
            await asyncio.wait({task})
    finally:
        listening.close()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named: asyncio turns off Nagle's delay (40 ms a call) only for TCP.
    opened = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind((host, port))
        opened.listen(1024)
    except OSError as error:
        opened.close()
        raise cannot_listen(error, host, port) from error
    return opened


def _url(host: str, port: int) -> str:
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)  # noqa: S104
    return f"http://{shown}:{port}"
