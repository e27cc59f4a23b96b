"""A stream returns what came, each byte once, however it is read, and makes room for no more than is read."""

from __future__ import annotations

import asyncio
import io
import random
from collections.abc import Callable
from contextlib import nullcontext

import pytest

from agentenv.containers.byte_stream import ByteStream
from agentenv.errors import ConnectionLostError
from agentenv.wire.programs import WINDOW_BYTES
from tests.waiting import loop_turns, until

LOST = ConnectionLostError("cut")


class Sent:
    """A sender that keeps to the window."""

    def __init__(self, data: bytes) -> None:
        self.stream = ByteStream(self._make_room, nullcontext)
        self.ahead_bytes = 0
        self._rest = data
        self._room = WINDOW_BYTES
        self._chosen = random.Random(len(data))
        self._more = asyncio.Event()

    async def send(self, end: Callable[[ByteStream], None] = ByteStream.feed_end) -> None:
        while self._rest:
            while not self._room:
                self._more.clear()
                await self._more.wait()
            count = min(self._room, self._chosen.choice([1, 4096, 65_537, 262_144]))
            piece, self._rest = self._rest[:count], self._rest[count:]
            self._room -= len(piece)
            self.stream.feed(piece)
            self.ahead_bytes = max(self.ahead_bytes, len(self.stream._buffer))
            await asyncio.sleep(0)
        end(self.stream)

    async def _make_room(self, count: int) -> None:
        self._room += count
        self._more.set()
        await asyncio.sleep(0)  # as sending: it is written at once, and then perhaps waits


def text(size: int) -> bytes:
    chosen = random.Random(size)
    return bytes(chosen.choice(b"ab\n\xff\x00") for _ in range(min(size, 999))) * (size // 999 + 1)


@pytest.mark.parametrize(
    "size", [0, 1, 999, 65_536, WINDOW_BYTES - 1, WINDOW_BYTES, WINDOW_BYTES + 1, 5 * WINDOW_BYTES]
)
async def test_what_is_read_is_what_was_sent(size: int) -> None:
    data = text(size)[:size]
    for count in (1000, 65_536, 10**9):
        sent = Sent(data)
        sending = asyncio.create_task(sent.send())
        read = bytearray()
        while piece := await sent.stream.read(count):
            assert len(piece) <= count
            read += piece
        await sending
        assert bytes(read) == data
        assert sent.ahead_bytes <= 2 * WINDOW_BYTES
        assert sent.stream.at_eof()


async def test_lines_are_those_of_a_file() -> None:
    data = text(300_000) + b"x" * (3 * WINDOW_BYTES) + b"\nlast"
    sent = Sent(data)
    sending = asyncio.create_task(sent.send())
    assert [line async for line in sent.stream] == io.BytesIO(data).readlines()
    await sending
    assert await sent.stream.readline() == b""


async def test_all_of_it_and_exactly_so_much() -> None:
    data = text(3 * WINDOW_BYTES)
    sent = Sent(data)
    sending = asyncio.create_task(sent.send())
    assert await sent.stream.readexactly(2 * WINDOW_BYTES) == data[: 2 * WINDOW_BYTES]
    assert await sent.stream.read(0) == b""
    assert await sent.stream.read() == data[2 * WINDOW_BYTES :]
    await sending
    with pytest.raises(asyncio.IncompleteReadError):
        await sent.stream.readexactly(1)


async def test_nobody_reads_and_it_comes_no_further_than_the_window() -> None:
    sent = Sent(bytes(10 * WINDOW_BYTES))
    sending = asyncio.create_task(sent.send())
    await until(lambda: sent.ahead_bytes == WINDOW_BYTES)
    await loop_turns(20)
    assert (sent.ahead_bytes, sending.done()) == (WINDOW_BYTES, False)
    await sent.stream.read()
    await sending


@pytest.mark.parametrize("how", ["read", "readline", "readexactly"])
async def test_what_came_before_a_loss_is_read_first(how: str) -> None:
    sent = Sent(b"line\nrest")
    await sent.send(lambda stream: stream.lose(LOST))
    assert await sent.stream.readline() == b"line\n"
    if how == "read":
        assert await sent.stream.read(100) == b"rest"
    for _ in range(2):
        with pytest.raises(ConnectionLostError):
            await (sent.stream.readexactly(9) if how == "readexactly" else getattr(sent.stream, how)())
    sent.stream.feed_end()


async def test_a_reader_that_is_cancelled_has_taken_nothing() -> None:
    """At every step of it."""
    data = text(4 * WINDOW_BYTES)
    sent = Sent(data)
    sending = asyncio.create_task(sent.send())
    read, chosen = bytearray(), random.Random(1)
    while len(read) < len(data):
        reading = asyncio.create_task(sent.stream.read(300_000))
        for _ in range(chosen.randint(0, 3)):
            await asyncio.sleep(0)
        reading.cancel()
        try:
            read += await reading
        except asyncio.CancelledError:
            read += await sent.stream.read(1)
    await sending
    assert bytes(read) == data


async def test_two_readers_at_once_are_a_mistake() -> None:
    stream = Sent(b"").stream
    first = asyncio.create_task(stream.read(1))
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="another coroutine"):
        await stream.read(1)
    stream.feed_end()
    assert await first == b""
