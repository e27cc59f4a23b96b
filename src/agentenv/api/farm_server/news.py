"""News for the clients of a farm: who listens, and what they still have to hear."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from agentenv.wire import farm as wire

_MOST_LINES = 10_000
"""News kept for a client that does not read: then it is sent away, and repeats its asks when it is back."""


class Listener:
    """One connection of one client."""

    def __init__(self) -> None:
        self._lines: asyncio.Queue[bytes | None] = asyncio.Queue(_MOST_LINES)
        self.closed = False

    def put(self, line: bytes) -> None:
        """Add a line."""
        try:
            self._lines.put_nowait(line)
        except asyncio.QueueFull:
            self.close()

    def close(self) -> None:
        """End the connection, at once if it is not read."""
        self.closed = True
        while not self._lines.empty():
            self._lines.get_nowait()
        self._lines.put_nowait(None)

    def end(self) -> None:
        """End the connection once everything has been read."""
        try:
            self._lines.put_nowait(None)
        except asyncio.QueueFull:
            self.close()

    async def lines(self) -> AsyncIterator[bytes]:
        """Lines as they come, with a beat where none came for a while."""
        while True:
            try:
                async with asyncio.timeout(wire.NEWS_BEAT_S):
                    line = await self._lines.get()
            except TimeoutError:
                line = encoded(wire.NewsBeat())
            if line is None:
                return
            yield line


class Newsroom:
    """Who listens. A client is named by its run and its own choice; its latest connection counts."""

    def __init__(self, hello: wire.NewsHello) -> None:
        self.hello = hello
        self._listeners: dict[tuple[str, str], Listener] = {}

    def __len__(self) -> int:
        """Clients connected."""
        return len(self._listeners)

    def listens(self, run: str, client: str) -> bool:
        """Whether the client is connected."""
        return (run, client) in self._listeners

    def tell(self, run: str, client: str, line: wire.NewsLine) -> None:
        """Tell a client; it may not listen."""
        if (listener := self._listeners.get((run, client))) is not None:
            listener.put(encoded(line))

    async def follow(self, run: str, client: str) -> AsyncIterator[bytes]:
        """The news of a client, for the response of its request."""
        if (former := self._listeners.get((run, client))) is not None:
            former.close()
        listener = self._listeners[run, client] = Listener()
        try:
            listener.put(encoded(self.hello))
            async for line in listener.lines():
                yield line
        finally:
            if self._listeners.get((run, client)) is listener:
                del self._listeners[run, client]

    def close(self) -> None:
        """Tell everybody that the farm ends, and end the connections."""
        for listener in self._listeners.values():
            listener.put(encoded(wire.NewsLeaving()))
            listener.end()


def encoded(line: wire.NewsLine) -> bytes:
    """One line of news."""
    return line.model_dump_json().encode() + b"\n"
