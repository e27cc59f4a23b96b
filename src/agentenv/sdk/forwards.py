"""Connections to servers in a slot for those who have no asyncio streams: a blocking socket, and a listening port or
Unix socket of this machine."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Final

from agentenv.containers.connect import Streams
from agentenv.errors import AgentEnvError, ConfigError
from agentenv.listening import listen, url_of
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


@contextmanager
def listening(local_port: int, unix: Path | None) -> Iterator[tuple[socket.socket, str]]:
    """A bound socket and how to reach it: of this machine's loopback (port 0: any free one), or at the path ``unix``,
    which only this user may connect to and which is removed at the end. Raises ConfigError when it cannot be."""
    if unix is None:
        with listen(_HERE, local_port, prefix="local_") as sock:
            yield sock, url_of(sock, _HERE)
        return
    if local_port:
        raise ConfigError("local_port", "is for forwarding without unix", next_step="leave one of them out")
    with socket.socket(socket.AF_UNIX) as sock:
        try:
            sock.bind(str(unix))
        except OSError as error:
            taken = "remove it if nobody listens there, or choose another path"
            step = taken if unix.exists() else "name a path of at most 107 bytes in a directory of yours"
            raise ConfigError("unix", f"cannot listen on {unix}: {error.strerror or error}", next_step=step) from error
        made = unix.lstat()
        try:
            unix.chmod(stat.S_IRUSR | stat.S_IWUSR)  # before it listens: nobody can have connected
            yield sock, str(unix)
        finally:
            with suppress(FileNotFoundError):
                if os.path.samestat(unix.lstat(), made):
                    unix.unlink()


@asynccontextmanager
async def forwarded(
    connect: Callable[[], AbstractAsyncContextManager[Streams]], local_port: int, unix: Path | None
) -> AsyncIterator[str]:
    """Listen as :func:`listening` says, each connection leading to one of ``connect``'s; yields how to reach it. A
    connection that cannot be made, or is lost, is reset. Raises ConfigError when it cannot listen."""
    joins = Joins(connect)
    with listening(local_port, unix) as (sock, where):
        start = asyncio.start_server if unix is None else asyncio.start_unix_server
        server = await start(joins.accepted, sock=sock)
        try:
            yield where
        finally:
            server.close()
            await joins.aclose()


class Joins:
    """Connections that were accepted, each leading to one of ``connect``'s. One that cannot be made, or is lost, is
    reset."""

    def __init__(self, connect: Callable[[], AbstractAsyncContextManager[Streams]]) -> None:
        self._connect = connect
        self._serving: set[asyncio.Task[None]] = set()

    def accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take one more."""
        task = asyncio.create_task(self._serve(reader, writer))
        self._serving.add(task)
        task.add_done_callback(lambda task: self._ended(task, writer))

    async def aclose(self) -> None:
        """Reset those that are left."""
        while tasks := [*self._serving]:  # a connection may have been accepted in the meantime
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with self._connect() as there:
                await _join((reader, writer), there)
        except (AgentEnvError, OSError):
            reset(writer)

    def _ended(self, task: asyncio.Task[None], writer: asyncio.StreamWriter) -> None:
        self._serving.discard(task)
        if task.cancelled():  # perhaps before it began
            reset(writer)
        writer.close()


def reset(writer: asyncio.StreamWriter) -> None:
    """Break the connection off: the other side must not take it for complete."""
    sock = writer.get_extra_info("socket")  # a connection of a slot has none: its abort is a reset
    with suppress(OSError):  # it has gone already
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
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
