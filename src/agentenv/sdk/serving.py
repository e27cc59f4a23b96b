"""What answers the connections that programs of a slot make to one of its ports: an application or protocol of this
process, or a server that this machine can reach. No port is opened on this machine."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from agentenv.containers.connect import Streams
from agentenv.containers.listen import Listener, ProtocolFactory
from agentenv.containers.transfer import TransferLease
from agentenv.errors import AgentEnvError, ConfigError
from agentenv.sdk.forwards import Joins, reset

Target: TypeAlias = web.Application | ProtocolFactory | int | str | Path
"""What answers: see :meth:`agentenv.sdk.slot_tools.SlotTools.serve`."""

_HERE: Final = "127.0.0.1"
_MAX_PORT: Final = 2**16 - 1
_GOODBYE_S: Final = 1.0
"""For requests that are being answered when an application is no longer served."""


class _OfThisProcess(logging.Filter):
    """Drops the failures to read a request, which a slot may cause as often as it likes."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return not isinstance(error, HttpProcessingError | web.RequestPayloadError | ConnectionResetError)


_logger = logging.getLogger(__name__)
_logger.addFilter(_OfThisProcess())


@dataclass(frozen=True)
class Led:
    """A target: each connection is led to one of ``connect``'s. One that cannot be made, or is lost, is reset."""

    connect: Callable[[], AbstractAsyncContextManager[Streams]]


class Served:
    """A port of a slot while it is answered here."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener

    @property
    def port(self) -> int:
        """The port in the slot."""
        return self._listener.port

    @property
    def url(self) -> str:
        """For programs of the slot, if HTTP is spoken there: ``http://127.0.0.1:PORT``."""
        return f"http://{_HERE}:{self.port}"

    @property
    def error(self) -> AgentEnvError | None:
        """With what it ended before its block did; None: it did not. ServingEndedError: by a process of the slot, which
        is no failure of the slot. LeaseLostError or ConnectionLostError: with the slot, or the way to it."""
        return self._listener.error

    async def wait(self) -> AgentEnvError:
        """Wait until it has ended before its block did; returns :attr:`error`."""
        return await self._listener.wait()

    def __repr__(self) -> str:
        return f"<Served {self.url}{'' if self.error is None else ' ended'}>"


@asynccontextmanager
async def served(lease: TransferLease, target: Target | Led, port: int, *, timeout_s: float) -> AsyncIterator[Served]:
    """Answer the connections to this port of the slot (0: any free one). Raises ConfigError when the target or the port
    is malformed, and as :meth:`Listener.open`."""
    if not 0 <= port <= _MAX_PORT:
        raise ConfigError("port", f"{port} is not a port", next_step=f"use 0 (any free one) to {_MAX_PORT}")
    async with AsyncExitStack() as stack:
        # An application ends its requests while their connections are still open.
        listener = Listener(lease)
        stack.push_async_callback(listener.aclose)
        factory = await stack.enter_async_context(_answering(target))
        await listener.open(factory, port, timeout_s=timeout_s)
        yield Served(listener)


@asynccontextmanager
async def answered_here(target: Target) -> AsyncIterator[Target | Led]:
    """The same target for a sandbox that belongs to another loop than the one that this is called in, where an
    application or a protocol runs."""
    if isinstance(target, int | str | Path):
        yield target
        return
    here = asyncio.get_running_loop()
    async with _answering(target) as factory:
        yield Led(partial(_led_to, here, factory))


@asynccontextmanager
async def _led_to(loop: asyncio.AbstractEventLoop, factory: ProtocolFactory) -> AsyncIterator[Streams]:
    """A connection to a protocol in another loop."""
    ours, theirs = socket.socketpair()
    async with _connection(partial(asyncio.open_connection, sock=ours)) as streams:
        accepted = loop.connect_accepted_socket(factory, theirs)
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(accepted, loop))
        yield streams


def _answering(target: Target | Led) -> AbstractAsyncContextManager[ProtocolFactory]:
    if isinstance(target, int | str | Path):
        target = _dialled(target)
    if isinstance(target, Led):
        return _joining(target)
    if isinstance(target, web.Application):
        return _application(target)
    if not callable(target):
        raise ConfigError("target", f"{target!r} answers no connections", next_step="name an application or a port")
    return _given(target)


@asynccontextmanager
async def _application(app: web.Application) -> AsyncIterator[ProtocolFactory]:
    """The protocols of an application's server, as it is without ports of its own."""
    runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=_GOODBYE_S, logger=_logger)
    await runner.setup()
    try:
        assert runner.server is not None
        yield runner.server
    finally:
        await runner.cleanup()


@asynccontextmanager
async def _joining(led: Led) -> AsyncIterator[ProtocolFactory]:
    joins = Joins(led.connect)
    try:
        yield lambda: asyncio.StreamReaderProtocol(asyncio.StreamReader(), joins.accepted)
    finally:
        await joins.aclose()


@asynccontextmanager
async def _given(factory: ProtocolFactory) -> AsyncIterator[ProtocolFactory]:
    yield factory


def _dialled(target: int | str | Path) -> Led:
    """Raises ConfigError."""
    if isinstance(target, Path) or (isinstance(target, str) and "/" in target):
        return Led(lambda: _connection(partial(asyncio.open_unix_connection, str(target))))
    host, _, text = (_HERE, "", str(target)) if isinstance(target, int) else target.rpartition(":")
    if not host or not text.isdecimal() or not 0 < int(text) <= _MAX_PORT:
        raise ConfigError(
            "target",
            f"{target!r} is neither a port, nor HOST:PORT, nor the path of a Unix socket",
            next_step="use 8000, 'localhost:8000' or '/run/server.sock'",
        )
    return Led(lambda: _connection(partial(asyncio.open_connection, host.strip("[]"), int(text))))


@asynccontextmanager
async def _connection(dial: Callable[[], Coroutine[Any, Any, Streams]]) -> AsyncIterator[Streams]:
    """A connection of this machine; whoever leaves it with an error breaks it off."""
    reader, writer = await dial()
    try:
        yield reader, writer
    except BaseException:
        reset(writer)
        raise
    finally:
        writer.close()
