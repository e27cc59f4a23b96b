"""One output of a program, as it is read by coroutines. Bounded: its sender waits until it is read."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Final, Self

from agentenv.wire.programs import WINDOW_BYTES

_MIN_ROOM_BYTES: Final = WINDOW_BYTES // 4
Watched = Callable[[], AbstractAsyncContextManager[object]]
"""The context of every use of the program: it records failures."""


class ByteStream:
    """Bytes in order, none missing, with the reading methods of :class:`asyncio.StreamReader`; lines may be of any
    length. One coroutine may read at a time. When the connection to the program was lost, every method returns what had
    arrived, and then raises InfraError: ConnectionLostError or LeaseLostError.
    """

    def __init__(self, make_room: Callable[[int], Awaitable[None]], watched: Watched) -> None:
        """``make_room(n)`` allows the sender n more bytes, before it first suspends."""
        self._make_room = make_room
        self._watched = watched
        self._buffer = bytearray()
        self._owed_bytes = 0
        """Bytes that were read and not yet allowed to the sender again."""
        self._over = False
        self._lost: Exception | None = None
        self._waiting: asyncio.Future[None] | None = None

    async def read(self, n: int = -1) -> bytes:
        """At most ``n`` bytes, at least one; empty at the end. Without ``n``: all until the end."""
        async with self._watched():
            if n < 0:
                while await self._more():
                    pass
                self._check()
                return await self._take(len(self._buffer))
            while n and not self._buffer and await self._more():
                pass
            if n and not self._buffer:
                self._check()
            return await self._take(n)

    async def readline(self) -> bytes:
        """The next line with its line feed, which the last may lack; empty at the end."""
        async with self._watched():
            seen = 0
            while (end := self._buffer.find(b"\n", seen)) < 0:
                seen = len(self._buffer)
                if not await self._more():
                    self._check()
                    return await self._take(seen)
            return await self._take(end + 1)

    async def readexactly(self, n: int) -> bytes:
        """``n`` bytes. Raises asyncio.IncompleteReadError, which has the rest, when there are fewer until the end."""
        async with self._watched():
            while len(self._buffer) < n:
                if not await self._more():
                    self._check()
                    raise asyncio.IncompleteReadError(await self._take(n), n)
            return await self._take(n)

    def at_eof(self) -> bool:
        """Whether everything was read."""
        return self._over and not self._buffer

    def __aiter__(self) -> Self:
        """Its lines."""
        return self

    async def __anext__(self) -> bytes:
        if line := await self.readline():
            return line
        raise StopAsyncIteration

    # -- the sender's side -------------------------------------------------------------------------

    def feed(self, data: bytes) -> None:
        """The next bytes."""
        self._buffer += data
        self._owed_bytes += len(data)
        self._wake()

    def feed_end(self) -> None:
        """All has come."""
        self._over = True
        self._wake()

    def lose(self, error: Exception) -> None:
        """Nothing more will come. No effect when all has."""
        if not self._over:
            self._lost = error
            self._wake()

    # ----------------------------------------------------------------------------------------------

    async def _more(self) -> bool:
        """Wait until more has come; False at the end."""
        if self._over or self._lost is not None:
            return False
        if self._waiting is not None:
            raise RuntimeError("another coroutine is reading this stream")
        # The reader wants more than there is, however much that is: the sender must not wait for it.
        if owed_bytes := self._owed_bytes:
            self._owed_bytes = 0
            await self._make_room(owed_bytes)
        before = len(self._buffer)
        while len(self._buffer) == before and not self._over and self._lost is None:
            self._waiting = asyncio.get_running_loop().create_future()
            try:
                await self._waiting
            finally:
                self._waiting = None
        return len(self._buffer) > before

    async def _take(self, count: int) -> bytes:
        free_bytes = self._owed_bytes - max(0, len(self._buffer) - count)
        if free_bytes >= _MIN_ROOM_BYTES and not self._over and self._lost is None:
            self._owed_bytes -= free_bytes
            await self._make_room(free_bytes)
        # Last: a reader that is cancelled has taken nothing.
        taken = bytes(memoryview(self._buffer)[:count])
        del self._buffer[:count]
        return taken

    def _check(self) -> None:
        if self._lost is not None:
            raise self._lost

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)
