"""A non-blocking socket, read and written without buffers that grow.

The event loop's own transports read up to 256 KiB ahead of their reader. Here at most one chunk and the beginning of a
line are held in each direction: a sender waits until its receiver has taken the last one. What was read and not used
yet is cut from the front of one buffer, which costs what is cut.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Final

from agentenv.errors import InvalidArgumentsError
from agentenv.sandbox.proxy.chunks import Chunks
from agentenv.sandbox.proxy.heads import MAX_HEAD_BYTES
from agentenv.wire.addresses import Address

CHUNK_BYTES: Final = 64 * 1024
_SLOT_BUFFER_BYTES: Final = 128 * 1024
_HEAD_END: Final = b"\r\n\r\n"
_LINGER_S: Final = 2.0
_LINGER_BYTES: Final = 1024 * 1024


class Stream:
    """Owns the socket. Methods raise OSError when the connection fails."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._unread = bytearray()

    @classmethod
    def accepted(cls, sock: socket.socket) -> Stream:
        """Of a slot's. Its kernel buffers are bounded: a slot that does not read would fill megabytes in each."""
        for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, buffer, _SLOT_BUFFER_BYTES)
        return cls(sock)

    @classmethod
    async def connect(cls, address: Address, port: int) -> Stream:
        """Connect to this address and no other."""
        sock = socket.socket(socket.AF_INET if address.version == 4 else socket.AF_INET6, socket.SOCK_STREAM)
        try:
            stream = cls(sock)
            await stream._loop.sock_connect(sock, (str(address), port))
        except BaseException:
            sock.close()
            raise
        return stream

    async def receive(self, most: int = CHUNK_BYTES) -> bytes:
        """The next bytes, at most ``most``; empty at the end. Other connections run in between."""
        if self._unread:
            taken = bytes(self._unread[:most])
            del self._unread[:most]
        else:
            taken = await self._loop.sock_recv(self._sock, most)
        await asyncio.sleep(0)  # it returned at once if there was something
        return taken

    async def receive_head(self) -> bytes:
        """Everything to the next empty line, which is included; empty if the peer ended before it.

        Raises InvalidArgumentsError when it is longer than MAX_HEAD_BYTES.
        """
        looked = 0
        while (at := self._unread.find(_HEAD_END, looked, MAX_HEAD_BYTES)) < 0:
            if len(self._unread) >= MAX_HEAD_BYTES:
                raise InvalidArgumentsError(f"The request's header is longer than {MAX_HEAD_BYTES} bytes.")
            looked = max(0, len(self._unread) - len(_HEAD_END) + 1)
            if not await self._receive_more():
                return b""
        return await self.receive(at + len(_HEAD_END))

    async def receive_decoded(self, chunks: Chunks) -> bytes:
        """The next data of a body in chunks, at most what one read brings; empty at its end. Raises
        InvalidArgumentsError when it ends early, is malformed, or too much of it is not data."""
        found = bytearray()
        while not chunks.ended:
            data, more = chunks.take(self._unread)
            found += data
            await asyncio.sleep(0)
            if found and (more or len(found) >= CHUNK_BYTES):
                break
            if more and not await self._receive_more():
                raise InvalidArgumentsError("The chunked body ends early.")
        return bytes(found)

    async def _receive_more(self) -> bool:
        """Wait for more to be unread; False at the end."""
        received = await self._loop.sock_recv(self._sock, CHUNK_BYTES)
        self._unread += received
        await asyncio.sleep(0)
        return bool(received)

    async def send(self, data: bytes) -> None:
        """Returns when the kernel has taken all of it."""
        await self._loop.sock_sendall(self._sock, data)

    def end(self) -> None:
        """Close the sending side."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    async def linger(self) -> None:
        """:meth:`end`, and give the peer a moment to read: closing while something of it is unread would discard what
        it has not read yet."""
        self.end()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(_LINGER_S):
                left = _LINGER_BYTES
                while left > 0 and (received := await self.receive()):
                    left -= len(received)

    def close(self) -> None:
        """Close at once. Repeatable."""
        self._sock.close()
