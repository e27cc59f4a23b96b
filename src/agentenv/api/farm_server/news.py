"""News for the clients of a farm: who listens, and what they still have to hear."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Final

from agentenv.errors import TooManyRequestsError
from agentenv.wire import farm as wire

MOST_UNREAD_BYTES: Final = 16 * 1024 * 1024
"""News kept for a client that does not read: beyond it, the client is sent away, and repeats its asks when it is
back."""
MOST_STREAMS: Final = 256
"""Open connections of one token. A trainer has one; those of clients that do not read stay open."""
_FULL_S: Final = 10.0
"""When a client that finds no room may try again."""


class Listener:
    """One connection of one client."""

    def __init__(self) -> None:
        self._lines: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._unread_bytes = 0
        self.closed = False

    def put(self, line: bytes) -> None:
        """Add a line."""
        if self.closed:
            return
        self._unread_bytes += len(line)
        if self._unread_bytes > MOST_UNREAD_BYTES:
            self.close()
        else:
            self._lines.put_nowait(line)

    def close(self) -> None:
        """End the connection, without what has not been read."""
        while not self._lines.empty():
            self._lines.get_nowait()
        self.end()

    def end(self) -> None:
        """End the connection once everything has been read."""
        self.closed = True
        self._lines.put_nowait(None)

    async def lines(self) -> AsyncIterator[bytes]:
        """Lines as they come, with a beat where none came for a while."""
        while True:
            try:
                async with asyncio.timeout(wire.NEWS_BEAT_S):
                    line = await self._lines.get()
            except TimeoutError:
                yield encoded(wire.NewsBeat())
                continue
            if line is None:
                return
            self._unread_bytes -= len(line)
            yield line


class NewsHub:
    """Who listens. A client is named by its run and its own choice; its latest connection counts."""

    def __init__(self, hello: wire.NewsHello) -> None:
        self.hello = hello
        self._listeners: dict[tuple[str, str], Listener] = {}
        self._streams: Counter[str] = Counter()
        """Open connections by token."""

    def __len__(self) -> int:
        """Clients connected."""
        return len(self._listeners)

    def listens(self, run: str, client: str) -> bool:
        """Whether the client is connected."""
        listener = self._listeners.get((run, client))
        return listener is not None and not listener.closed

    def tell(self, run: str, client: str, line: wire.NewsLine) -> None:
        """Tell a client; it may not listen."""
        if (listener := self._listeners.get((run, client))) is not None:
            listener.put(encoded(line))

    def streams(self, by: str) -> int:
        """Open connections of a token."""
        return self._streams[by]

    def check_room(self, by: str) -> None:
        """Raises TooManyRequestsError when a token has as many connections as it may."""
        if self.streams(by) >= MOST_STREAMS:
            raise TooManyRequestsError(
                f"the token has {MOST_STREAMS} open streams of news",
                next_step="use one client for many rollouts",
                retry_after_s=_FULL_S,
            )

    async def follow(self, run: str, client: str, by: str = "") -> AsyncIterator[bytes]:
        """The news of a client, for the response of its request. ``by``: the token's id."""
        if (former := self._listeners.get((run, client))) is not None:
            former.close()
        listener = self._listeners[run, client] = Listener()
        self._streams[by] += 1
        try:
            listener.put(encoded(self.hello))
            async for line in listener.lines():
                yield line
        finally:
            self._streams[by] -= 1
            if not self._streams[by]:
                del self._streams[by]
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
