"""Connections to servers in a slot for those who have no asyncio streams: a blocking socket, and a listening port of
this machine."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Final

from agentenv.config import cannot_listen
from agentenv.containers.connect import Streams
from agentenv.errors import AgentEnvError
from agentenv.wire.connections import LINGER_S

_HERE: Final = "127.0.0.1"
_PIECE_BYTES: Final = 64 * 1024
_AT_ONCE: Final = struct.pack("ii", 1, 0)
"""For SO_LINGER: closing sends a reset (socket(7))."""


@asynccontextmanager
async def as_socket(connection: AbstractAsyncContextManager[Streams]) -> AsyncIterator[socket.socket]:
    """A blocking socket that leads to the connection, for another thread. What the connection is lost with reads there
    as its end, and is raised on leaving."""
    async with connection as (reader, writer):
        ours, theirs = socket.socketpair()
        inner = await asyncio.open_connection(sock=theirs)
        joined = asyncio.create_task(_join(inner, (reader, writer)))
        joined.add_done_callback(lambda _: inner[1].close())
        try:
            with ours:
                yield ours
            await asyncio.wait({joined}, timeout=LINGER_S)  # what was written still goes out, if it is read
            if joined.done():
                with suppress(OSError):  # one side did not want the rest
                    joined.result()
        finally:
            joined.cancel()
            await asyncio.gather(joined, return_exceptions=True)


@asynccontextmanager
async def forwarded(
    connect: Callable[[], AbstractAsyncContextManager[Streams]], local_port: int
) -> AsyncIterator[tuple[str, int]]:
    """Listen on this machine's loopback (port 0: any free one), each connection leading to one of ``connect``'s; yields
    the address. A connection that cannot be made, or is lost, is reset. Raises ConfigError when it cannot listen."""
    serving: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with connect() as there:
                await _join((reader, writer), there)
        except (AgentEnvError, OSError):
            _reset(writer)

    def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(serve(reader, writer))
        serving.add(task)
        task.add_done_callback(lambda task: ended(task, writer))

    def ended(task: asyncio.Task[None], writer: asyncio.StreamWriter) -> None:
        serving.discard(task)
        if task.cancelled():  # perhaps before it began
            _reset(writer)
        writer.close()

    try:
        server = await asyncio.start_server(accepted, _HERE, local_port)
    except (OSError, OverflowError) as error:
        raise cannot_listen(OSError(str(error)), _HERE, local_port, prefix="local_") from error
    try:
        yield server.sockets[0].getsockname()[:2]
    finally:
        server.close()
        while tasks := [*serving]:  # a connection may have been accepted in the meantime
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.sleep(0)


def _reset(writer: asyncio.StreamWriter) -> None:
    """Break the connection off: the other side must not take it for complete."""
    with suppress(OSError):  # it has gone already
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
    writer.transport.abort()


async def _join(one: Streams, other: Streams) -> None:
    """Pass bytes in both directions until both are over."""
    both = [asyncio.create_task(_pass(one[0], other[1])), asyncio.create_task(_pass(other[0], one[1]))]
    try:
        await asyncio.gather(*both)
    finally:
        for task in both:
            task.cancel()
        await asyncio.gather(*both, return_exceptions=True)


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(_PIECE_BYTES):
        writer.write(piece)
        await writer.drain()
    writer.write_eof()
