"""One connection to a container: handshake, then text messages both ways. No retries, no knowledge of calls."""

from __future__ import annotations

import asyncio
import asyncio.trsock
import contextlib
import os
import socket
from typing import Final

import aiohttp

from agentenv.containers.handle import ContainerHandle
from agentenv.containers.http import checked_info, headers_for, refusal
from agentenv.deadlines import scaled
from agentenv.errors import InfraError, ProtocolError, SlotDestroyedError
from agentenv.wire.base import MAX_MESSAGE_BYTES

_POLITE_CLOSE_S: Final = scaled(1.0)
_SEND_BUFFER_BYTES: Final = 256 * 1024
"""Bytes the kernel buffers for us before a write waits. Cancellations and pings wait behind at most this much, and
written data has nearly arrived."""
_CONTRACT_CLOSE_CODES: Final = frozenset({1002, 1003, 1007, 1008, 1009})
"""WebSocket close codes that mean "what you sent is wrong": sending it again cannot help."""
_LOST: Final = (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSING, aiohttp.WSMsgType.CLOSED, aiohttp.WSMsgType.ERROR)


class StreamCutError(Exception):
    """The connection is gone or silent; sent messages may or may not have arrived."""


TRANSIENT: Final = (StreamCutError, aiohttp.ClientError, OSError, TimeoutError)
"""Errors that a new connection may cure."""


class Stream:
    """An open stream. ``boot`` identifies the server process at the other end."""

    def __init__(self, socket_: aiohttp.ClientWebSocketResponse, boot: str) -> None:
        self._socket = socket_
        self._raw = socket_.get_extra_info("socket")
        self.boot = boot

    async def send(self, text: bytes) -> None:
        """Send one message; waits while the other side does not read. Raises a :data:`TRANSIENT` error."""
        await self._socket.send_frame(text, aiohttp.WSMsgType.TEXT)

    async def receive(self) -> str:
        """The next message.

        Raises: StreamCutError: the stream ended, or was silent for too long. ProtocolError: it ended because of a
        message that violates the protocol.
        """
        message = await self._socket.receive()
        if message.type is aiohttp.WSMsgType.TEXT:
            text: str = message.data
            return text
        if message.type in _LOST:
            raise self._why()
        raise ProtocolError(f"the container sent a {message.type.name} message where only text belongs")

    def _why(self) -> Exception:
        code = self._socket.close_code
        if code in _CONTRACT_CLOSE_CODES:
            return ProtocolError(
                f"the stream was closed with code {code}: a message was refused as malformed or too large"
            )
        return StreamCutError(str(self._socket.exception() or f"closed with code {code}"))

    async def aclose(self, *, polite: bool) -> None:
        """Close the stream, in all cases; ``polite`` sends a close message first, for a second at most. Repeatable."""
        if not polite:
            self._cut()
        with contextlib.suppress(*TRANSIENT):
            await self._socket.close()
        self._cut()

    def _cut(self) -> None:
        """Unsent bytes would keep a closing socket open for as long as the other side does not read."""
        raw = self._raw if isinstance(self._raw, asyncio.trsock.TransportSocket) else None
        raw = raw or self._socket.get_extra_info("socket")  # may be a plain number once another loop's socket is closed
        if raw is not None:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(raw.fileno())) as twin:
                twin.shutdown(socket.SHUT_RDWR)


async def open_stream(http: aiohttp.ClientSession, handle: ContainerHandle, *, silence_s: float) -> Stream:
    """Shake hands and open the stream. A stream silent for ``silence_s`` will count as cut.

    Raises:
        ProtocolError: the other side speaks another version, or is not a sandbox server.
        InfraError: the container refused, by the code it gave.
        StreamCutError, aiohttp.ClientError, OSError: it could not be reached (see :data:`TRANSIENT`).
    """
    headers = headers_for(handle)
    async with http.get(f"{handle.base_url}/v1/info", headers=headers) as reply:
        body = await reply.read()
        if reply.status != 200:
            raise _refusal(handle, reply.status, body)
    boot = checked_info(handle, body).boot
    try:
        socket_ = await http.ws_connect(
            f"{handle.base_url}/v1/stream",
            headers=headers,
            max_msg_size=MAX_MESSAGE_BYTES,
            compress=0,
            # aiohttp pings after this much silence and gives up after half as much again.
            heartbeat=silence_s / 1.5,
            timeout=aiohttp.ClientWSTimeout(ws_close=_POLITE_CLOSE_S),
        )
    except aiohttp.WSServerHandshakeError as error:
        raise _refusal(handle, error.status, b"") from error
    if isinstance(raw := socket_.get_extra_info("socket"), asyncio.trsock.TransportSocket):
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
    return Stream(socket_, boot)


def _refusal(handle: ContainerHandle, status: int, body: bytes) -> Exception:
    """5xx may pass; a container that answers a handshake with 4xx will do so again."""
    refused = refusal(handle, status, body, InfraError, SlotDestroyedError)
    return StreamCutError(refused.message) if status >= 500 else refused
