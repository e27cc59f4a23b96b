"""A port of a slot whose connections are answered in this process: the client of ``GET /v1/slots/{slot}/listen``
(:mod:`agentenv.wire.connections`). No port is opened on this machine.

What comes from a slot may be from anybody in it. Every frame is checked, and the first that is wrong ends the port. A
port never holds more than MAX_CONNECTIONS times WINDOW_BYTES of what a slot sent.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import aiohttp

from agentenv.containers.connect import opened, reply_in
from agentenv.containers.connection import ContainerConnection
from agentenv.containers.frames import Frame, FrameReader, broken
from agentenv.containers.slot_transport import SlotTransport
from agentenv.containers.transfer import TransferLease
from agentenv.errors import AgentEnvError, LeaseLostError, ServingEndedError
from agentenv.wire.base import MAX_PIECE_BYTES
from agentenv.wire.connections import LINGER_S, MAX_CONNECTIONS, MAX_DATA_BYTES, OVER, FrameKind

ProtocolFactory = Callable[[], asyncio.BaseProtocol]

_MESSAGE_BYTES: Final = MAX_PIECE_BYTES - 2 * MAX_DATA_BYTES
"""A message takes no further frames once it has so many bytes."""


class Listener:
    """A port of a slot from :meth:`open` to :meth:`aclose`, its connections served by protocols of this process."""

    def __init__(self, lease: TransferLease) -> None:
        self.port = 0
        """Set by :meth:`open`."""
        self._lease = lease
        self._connection = ContainerConnection(lease.container)
        self._remote: aiohttp.ClientWebSocketResponse | None = None
        self._frames = FrameReader()
        self._connections = _Connections()
        self._tasks: list[asyncio.Task[None]] = []
        self._error: asyncio.Future[AgentEnvError] = asyncio.get_running_loop().create_future()

    @property
    def error(self) -> AgentEnvError | None:
        """With what it ended; None while it serves, or was closed: ServingEndedError, LeaseLostError or
        ConnectionLostError."""
        return self._error.result() if self._error.done() and not self._error.cancelled() else None

    async def open(self, factory: ProtocolFactory, port: int, *, timeout_s: float) -> None:
        """Listen at this port of the slot's loopback interface (0: any free one), with protocols of ``factory``.

        Raises: OSError with the slot's errno (it is in use), TimeoutError, ServingEndedError, ConnectionLostError,
        LeaseLostError, and what the container named.
        """
        self._connections.factory = factory
        async with asyncio.timeout(timeout_s):
            self._remote = await opened(self._connection, self._lease, "listen", port)
            while not self._connections.port:
                await self._receive_once(self._remote)
        self.port = self._connections.port
        self._tasks = [
            asyncio.create_task(self._send(self._remote), name=f"to port {self.port}"),
            asyncio.create_task(self._receive(self._remote), name=f"from port {self.port}"),
        ]

    async def wait(self) -> AgentEnvError:
        """Wait until it has ended without being closed; returns :attr:`error`."""
        return await asyncio.shield(self._error)

    async def aclose(self) -> None:
        """Close its connections and the port. What was written is still sent, if it is taken soon. Repeatable."""
        if self.error is None and self._tasks:
            self._connections.close()
            with suppress(TimeoutError):
                async with asyncio.timeout(LINGER_S):
                    await self._connections.drained.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._error.cancel()
        self._connections.lose(None)
        if self._remote is not None:
            await self._remote.close()
        await self._connection.aclose()

    async def _send(self, remote: aiohttp.ClientWebSocketResponse) -> None:
        with suppress(ConnectionError, aiohttp.ClientError):  # who receives sees that too, and why
            while True:
                await remote.send_bytes(await self._connections.next_message())

    async def _receive(self, remote: aiohttp.ClientWebSocketResponse) -> None:
        try:
            while True:
                await self._receive_once(remote)
        except AgentEnvError as error:
            self._error.set_result(error)
            self._connections.lose(error)
            await remote.close()

    async def _receive_once(self, remote: aiohttp.ClientWebSocketResponse) -> None:
        """Raises the error with which it ended."""
        message = await remote.receive()
        if message.type is aiohttp.WSMsgType.BINARY:
            for frame in self._frames.read(message.data):
                self._connections.obey(frame)
        elif message.type is aiohttp.WSMsgType.TEXT and message.data == OVER:
            raise ServingEndedError("what listened in the slot was ended by a process of the slot")
        elif (reply := reply_in(self._connection, message)) is not None:
            raise LeaseLostError(reply.lost)
        else:
            raise self._connection.lost(f"port {self.port or 'to listen at'}: the connection to the slot was cut")


class _Connections:
    """Those of one port, and what is to be sent for them."""

    def __init__(self) -> None:
        self.port = 0
        self.factory: ProtocolFactory = asyncio.Protocol
        self.drained = asyncio.Event()
        """Set when nothing was left to be sent."""
        self._open: dict[int, SlotTransport] = {}
        self._last = 0
        self._closing = False
        self._due: deque[SlotTransport] = deque()
        self._some_due = asyncio.Event()

    def obey(self, frame: Frame) -> None:
        """Do what a frame of the slot says. Raises ServingEndedError when it may not say that."""
        if not self.port:
            if frame.kind is not FrameKind.PORT or not 0 < frame.connection < 2**16:
                raise broken("it did not say at which port it listens")
            self.port = frame.connection
        elif frame.kind is FrameKind.OPEN:
            self._begin(frame.connection)
        elif frame.kind is FrameKind.PORT or not 0 < frame.connection <= self._last:
            raise broken(f"a frame {frame.kind.name} for {frame.connection}, which is no connection")
        elif (one := self._open.get(frame.connection)) is not None:
            one.obey(frame)
            self._forget_if_ended(one)

    async def next_message(self) -> bytes:
        """Wait for frames that can be sent; each connection in turn."""
        message = b""
        while not message:
            await self._some_due.wait()
            parts: list[bytes | bytearray] = []
            size = 0
            while self._due and size < _MESSAGE_BYTES:
                one = self._due.popleft()
                one.queued = False
                frames = one.next_frames()
                parts += frames
                size += sum(map(len, frames))
                self._forget_if_ended(one)
                if one.sendable:
                    self._have_due(one)
            if not self._due:
                self._some_due.clear()
            message = b"".join(parts)
            self._look_if_drained()
        return message

    def close(self) -> None:
        """Close all, and reset those that are made from now on."""
        self._closing = True
        for one in [*self._open.values()]:
            one.close()
        self._look_if_drained()

    def lose(self, error: AgentEnvError | None) -> None:
        """All have ended with this error."""
        for one in [*self._open.values()]:
            one.lose(error)
        self._open.clear()
        self._due.clear()

    def _begin(self, number: int) -> None:
        if number != self._last + 1:
            raise broken(f"connection {number} came after {self._last}")
        if len(self._open) == MAX_CONNECTIONS:
            raise broken(f"it opened more than {MAX_CONNECTIONS} connections at once")
        self._last = number
        one = self._open[number] = SlotTransport(number, self._have_due)
        if self._closing:
            one.abort()
        else:
            one.serve_by(self.factory)

    def _have_due(self, one: SlotTransport) -> None:
        if not one.queued:
            one.queued = True
            self._due.append(one)
            self._some_due.set()

    def _forget_if_ended(self, one: SlotTransport) -> None:
        if one.ended:
            self._open.pop(one.number, None)

    def _look_if_drained(self) -> None:
        if self._closing and not any(one.unsent for one in self._open.values()):
            self.drained.set()
