"""A TCP proxy that can cut, stall, delay and slow down what passes through it."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Literal, Self

Direction = Literal["up", "down"]
"""``up``: from the client to the server."""


class Proxy:
    """Listens on ``port`` of the loopback and forwards to ``upstream_port``."""

    def __init__(self, upstream_port: int) -> None:
        self.upstream_port = upstream_port
        self.port = 0
        self.delay_s = 0.0
        self.bytes_per_s: dict[Direction, float] = {}
        """How fast each connection is in that direction; as fast as it can be unless said."""
        self.refusing = False
        """Accept connections and cut them at once."""
        self.connections = 0
        self.cuts = 0
        self.passed: dict[Direction, int] = {"up": 0, "down": 0}
        """Bytes forwarded since the last :meth:`cut_after`."""
        self._limits: dict[Direction, int | None] = {"up": None, "down": None}
        self._flowing: dict[Direction, asyncio.Event] = {"up": asyncio.Event(), "down": asyncio.Event()}
        self._writers: set[asyncio.StreamWriter] = set()
        self._pumps: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.resume()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        for pump in tuple(self._pumps):
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)
        await self._server.wait_closed()

    def cut(self) -> None:
        """Reset every connection; what is under way is lost."""
        self.cuts += 1
        for writer in tuple(self._writers):
            writer.transport.abort()
        self._writers.clear()

    def cut_after(self, direction: Direction, count: int) -> None:
        """Once: forward exactly ``count`` more bytes in that direction, then cut everything."""
        self.passed = {"up": 0, "down": 0}
        self._limits[direction] = count

    def stall(self, direction: Direction) -> None:
        """Stop reading and forwarding in that direction; connections stay open."""
        self._flowing[direction].clear()

    def resume(self) -> None:
        """End every stall."""
        for event in self._flowing.values():
            event.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        if self.refusing:
            writer.transport.abort()
            return
        try:
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self.upstream_port)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, up_writer}
        pumps = [
            asyncio.ensure_future(self._pump("up", reader, up_writer)),
            asyncio.ensure_future(self._pump("down", up_reader, writer)),
        ]
        self._pumps.update(pumps)
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        for pump in pumps:
            pump.cancel()
            self._pumps.discard(pump)
        await asyncio.gather(*pumps, return_exceptions=True)
        for one in (writer, up_writer):
            one.transport.abort()
            self._writers.discard(one)

    async def _pump(self, direction: Direction, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                await self._flowing[direction].wait()
                chunk = await reader.read(65536)
                await self._flowing[direction].wait()
                if not chunk:
                    return
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                if direction in self.bytes_per_s:
                    await asyncio.sleep(len(chunk) / self.bytes_per_s[direction])
                await self._forward(direction, chunk, writer)
        except OSError:
            return

    async def _forward(self, direction: Direction, chunk: bytes, writer: asyncio.StreamWriter) -> None:
        limit = self._limits[direction]
        last = limit is not None and self.passed[direction] + len(chunk) >= limit
        if limit is not None and last:
            chunk = chunk[: limit - self.passed[direction]]
        self.passed[direction] += len(chunk)
        writer.write(chunk)
        if last:
            self._limits[direction] = None
            # close, not abort: what was let through must arrive before the end does.
            writer.close()
            await writer.wait_closed()
            self.cut()
        else:
            await writer.drain()
