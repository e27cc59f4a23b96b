"""Connections to servers in a slot, as asyncio streams: the client of ``GET /v1/slots/{slot}/connect``
(:mod:`agentenv.wire.connections`)."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from typing import Literal

import aiohttp

from agentenv.containers.connection import ContainerConnection
from agentenv.containers.transfer import TransferLease
from agentenv.errors import LeaseLostError
from agentenv.wire.base import MAX_PIECE_BYTES
from agentenv.wire.connections import LINGER_S, OVER, ConnectionReply

_READ_BYTES = 64 * 1024
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def connected(lease: TransferLease, port: int, *, timeout_s: float) -> AsyncIterator[Streams]:
    """A connection to the server that listens at this port of the slot's loopback interface; closed on leaving.

    Writing waits while the other side does not read. ``writer.write_eof()`` ends one direction only. A connection that
    the slot's server resets reads as ended. Reading raises ConnectionLostError or LeaseLostError when the connection to
    the slot was lost.

    Raises: ConnectionRefusedError, or another OSError: nothing listens there. TimeoutError, ConnectionLostError,
    LeaseLostError, and what the container named.
    """
    async with ContainerConnection(lease.container) as connection:
        async with asyncio.timeout(timeout_s):
            remote = await opened(connection, lease, "connect", port)
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=ours)
        with closing(writer):
            inner = await asyncio.open_connection(sock=theirs)
            with closing(inner[1]):
                sending = asyncio.create_task(_send(remote, inner[0]), name=f"to port {port}")
                receiving = asyncio.create_task(
                    _receive_for(reader, connection, remote, inner[1]), name=f"from port {port}"
                )
                try:
                    yield reader, writer
                    writer.close()
                    await asyncio.wait({sending}, timeout=LINGER_S)  # what was written is still sent, if it is read
                finally:
                    for task in (sending, receiving):
                        task.cancel()
                    await asyncio.gather(sending, receiving, return_exceptions=True)
                    await remote.close()


async def opened(
    connection: ContainerConnection, lease: TransferLease, how: Literal["connect", "listen"], port: int
) -> aiohttp.ClientWebSocketResponse:
    """The WebSocket of a connection to this port, or of those that are made to it. Raises OSError with the slot's
    errno, ConnectionLostError, and what the container named."""
    remote = await connection.socket(
        f"/v1/slots/{lease.key.slot}/{how}",
        lease=lease.key.model_dump_json(),
        params={"port": port},
        max_message_bytes=MAX_PIECE_BYTES + 1,
    )
    reply = reply_in(connection, await remote.receive())
    if reply is None or reply.error:
        await remote.close()
        if reply is None:
            raise connection.lost(f"port {port}: the connection was cut")
        raise OSError(reply.error, f"{os.strerror(reply.error)}: port {port} of the slot")
    return remote


async def _receive_for(
    reader: asyncio.StreamReader,
    connection: ContainerConnection,
    remote: aiohttp.ClientWebSocketResponse,
    writer: asyncio.StreamWriter,
) -> None:
    """Receive until the connection ends; the reader raises the error with which it was lost."""
    try:
        await _receive(connection, remote, writer)
    except Exception as error:
        reader.set_exception(error)


async def _send(remote: aiohttp.ClientWebSocketResponse, reader: asyncio.StreamReader) -> None:
    while piece := await reader.read(_READ_BYTES):
        await remote.send_bytes(piece)
    await remote.send_str(OVER)


async def _receive(
    connection: ContainerConnection, remote: aiohttp.ClientWebSocketResponse, writer: asyncio.StreamWriter
) -> None:
    """Pass on what arrives, until the connection ends. Raises the error with which it was lost."""
    over = False
    while True:
        message = await remote.receive()
        if message.type is aiohttp.WSMsgType.BINARY:
            writer.write(message.data)
            await writer.drain()
        elif message.type is aiohttp.WSMsgType.TEXT and message.data == OVER:
            over = True
            writer.write_eof()
        elif (reply := reply_in(connection, message)) is None:
            break
        else:
            raise LeaseLostError(reply.lost)
    if not over:
        raise connection.lost("the connection to the slot was cut")


def reply_in(connection: ContainerConnection, message: aiohttp.WSMessage) -> ConnectionReply | None:
    """The reply in a text message; None when the WebSocket was closed. Raises ProtocolError."""
    return connection.parsed(ConnectionReply, message.data) if message.type is aiohttp.WSMsgType.TEXT else None
