"""One connection to a container: handshake, then text messages both ways. No retries, no knowledge of calls."""

from __future__ import annotations

import asyncio
import asyncio.trsock
import contextlib
import os
import socket
from typing import Final

import aiohttp

from agentenv.containers.connection import ContainerConnection
from agentenv.containers.handle import ContainerHandle
from agentenv.errors import (
    AgentEnvError,
    ConnectionLostError,
    InfraError,
    ProtocolError,
    SandboxUnavailableError,
    SlotDestroyedError,
)
from agentenv.wire.base import MAX_MESSAGE_BYTES

_SEND_BUFFER_BYTES: Final = 256 * 1024
"""Bytes the kernel buffers for us before a write waits. Cancellations and pings wait behind at most this much, and
written data has nearly arrived."""
_CONTRACT_CLOSE_CODES: Final = frozenset({1002, 1003, 1007, 1008, 1009})
"""WebSocket close codes that mean "what you sent is wrong": sending it again cannot help."""
_LOST: Final = (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSING, aiohttp.WSMsgType.CLOSED, aiohttp.WSMsgType.ERROR)


class Stream:
    """An open stream. ``boot`` identifies the server process at the other end."""

    def __init__(self, connection: ContainerConnection, socket_: aiohttp.ClientWebSocketResponse, boot: str) -> None:
        self._connection = connection
        self._socket = socket_
        self._raw = socket_.get_extra_info("socket")
        self.boot = boot

    async def send(self, text: bytes) -> None:
        """Send one message; waits while the other side does not read. Raises ConnectionLostError."""
        try:
            await self._socket.send_frame(text, aiohttp.WSMsgType.TEXT)
        except (aiohttp.ClientError, ConnectionError) as error:
            raise self._connection.lost(f"the stream: {error!r}") from error

    async def receive(self) -> str:
        """The next message.

        Raises: ConnectionLostError: the stream ended, or was silent for too long. ProtocolError: it ended because of a
        message that violates the protocol.
        """
        message = await self._socket.receive()
        if message.type is aiohttp.WSMsgType.TEXT:
            text: str = message.data
            return text
        if message.type in _LOST:
            raise self._why()
        raise ProtocolError(f"the container sent a {message.type.name} message on the stream, not a text")

    def _why(self) -> AgentEnvError:
        code = self._socket.close_code
        if code in _CONTRACT_CLOSE_CODES:
            return ProtocolError(
                f"the stream was closed with code {code}: a message was refused as malformed or too large"
            )
        return self._connection.lost(f"the stream: {self._socket.exception() or f'closed with code {code}'}")

    async def aclose(self, *, polite: bool) -> None:
        """Close the stream, in all cases; ``polite`` sends a close message first, for a moment at most. Repeatable."""
        if not polite:
            self._cut()
        async with self._connection:
            with contextlib.suppress(ConnectionLostError), self._connection.failures("the stream"):
                await self._socket.close()
            self._cut()

    def _cut(self) -> None:
        """Unsent bytes would keep a closing socket open for as long as the other side does not read."""
        raw = self._raw if isinstance(self._raw, asyncio.trsock.TransportSocket) else None
        raw = raw or self._socket.get_extra_info("socket")  # may be a plain number once another loop's socket is closed
        if raw is not None:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(raw.fileno())) as twin:
                twin.shutdown(socket.SHUT_RDWR)


async def open_stream(handle: ContainerHandle, *, silence_s: float) -> Stream:
    """Shake hands and open the stream, over a connection of its own: whatever was left open before may be dead, too. A
    stream silent for ``silence_s`` will count as cut.

    Raises:
        ProtocolError: the other side speaks another version, or is not a sandbox server.
        InfraError: the container refused, by the code it gave.
        ConnectionLostError: it could not be reached, or is not available now: another attempt may succeed.
    """
    connection = ContainerConnection(handle)
    refusals = (InfraError, SlotDestroyedError)
    try:
        boot = connection.server_info(await connection.request("GET", "/v1/info", *refusals)).boot
        # aiohttp pings after this much silence and closes the stream after half as much again.
        socket_ = await connection.socket(
            "/v1/stream", *refusals, max_message_bytes=MAX_MESSAGE_BYTES, heartbeat_s=silence_s / 1.5
        )
    except BaseException as error:
        await connection.aclose()
        if isinstance(error, SandboxUnavailableError):
            raise ConnectionLostError(error.message) from error
        raise
    if isinstance(raw := socket_.get_extra_info("socket"), asyncio.trsock.TransportSocket):
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
    return Stream(connection, socket_, boot)
