"""A slot's port that is answered here, against a slot that says what it likes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, Final

import pytest
from aiohttp import WSMsgType, web
from aiohttp.test_utils import TestServer

from agentenv.containers.frames import Frame, FrameReader, packed
from agentenv.containers.handle import ContainerHandle
from agentenv.containers.listen import Listener
from agentenv.errors import AgentEnvError, ConnectionLostError, LeaseLostError, ServingEndedError
from agentenv.wire.connections import (
    MAX_CONNECTIONS,
    MAX_DATA_BYTES,
    OVER,
    ROOM_BYTES,
    WINDOW_BYTES,
    ConnectionReply,
    FrameKind,
)
from agentenv.wire.leases import LeaseKey
from tests.waiting import until

PORT: Final = packed(4000, FrameKind.PORT)
K = FrameKind


class Slot:
    """The other end: sends frames, and keeps those that come."""

    def __init__(self, socket: web.WebSocketResponse) -> None:
        self.socket = socket
        self.frames: list[Frame] = []
        self.reading = asyncio.Event()
        self.reading.set()
        self.left = asyncio.Event()

    async def send(self, *frames: bytes) -> None:
        await self.socket.send_bytes(b"".join(frames))

    async def read(self) -> None:
        reader = FrameReader()
        async for message in self.socket:
            await self.reading.wait()
            if message.type is WSMsgType.BINARY:
                self.frames += reader.read(message.data)
        self.left.set()

    def of(self, number: int, kind: FrameKind) -> list[Frame]:
        return [one for one in self.frames if (one.connection, one.kind) == (number, kind)]

    def data(self, number: int) -> bytes:
        return b"".join(one.data for one in self.of(number, K.DATA))

    async def sees(self, number: int, kind: FrameKind) -> Frame:
        await until(lambda: bool(self.of(number, kind)))
        return self.of(number, kind)[0]


class Kept(asyncio.Protocol):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.received = b""
        self.eof = False
        self.lost: list[Exception | None] = []
        self.paused = False
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.received += data

    def eof_received(self) -> bool:
        self.eof = True
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.append(exc)

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False


class Both:
    """A listener, its slot, and the protocols of its connections in the order in which they were made."""

    def __init__(self) -> None:
        self.protocols: list[Kept] = []
        self.listener: Listener
        self.slot: Slot

    def made(self) -> Kept:
        self.protocols.append(Kept())
        return self.protocols[-1]

    def room_given(self, number: int) -> int:
        return sum(frame.count for frame in self.slot.of(number, K.ROOM))

    async def opened(self, number: int = 1) -> Kept:
        await self.slot.send(packed(number, K.OPEN))
        await until(lambda: len(self.protocols) >= number)
        return self.protocols[number - 1]


@asynccontextmanager
async def slot(
    speak: Callable[[web.WebSocketResponse], Awaitable[None]],
) -> AsyncIterator[Any]:
    """The lease of a slot in which ``speak`` listens."""

    async def listen(request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await speak(socket)
        return socket

    app = web.Application()
    app.router.add_get("/v1/slots/0/listen", listen)
    async with TestServer(app) as server:
        handle = ContainerHandle("c", 0, str(server.make_url("")).rstrip("/"), "t", 1)
        yield SimpleNamespace(container=handle, key=LeaseKey(slot=0, epoch=1, secret="0" * 32))


@asynccontextmanager
async def both(factory: Callable[[], asyncio.BaseProtocol] | None = None) -> AsyncIterator[Both]:
    made: asyncio.Future[Slot] = asyncio.get_running_loop().create_future()

    async def speak(socket: web.WebSocketResponse) -> None:
        await socket.send_str(ConnectionReply().model_dump_json())
        one = Slot(socket)
        await one.send(PORT)
        made.set_result(one)
        await one.read()

    async with slot(speak) as lease:
        found = Both()
        found.listener = Listener(lease)
        try:
            await found.listener.open(factory or found.made, 0, timeout_s=30)
            assert found.listener.port == 4000
            found.slot = await made
            yield found
        finally:
            await found.listener.aclose()


async def ended(listener: Listener) -> AgentEnvError:
    async with asyncio.timeout(30):
        return await listener.wait()


async def test_bytes_both_ways_and_half_closed() -> None:
    async with both() as it:
        one = await it.opened()
        await it.slot.send(packed(1, K.DATA, b"ques"), packed(1, K.DATA, b"tion"), packed(1, K.OVER))
        await until(lambda: one.eof)
        assert one.received == b"question"
        one.transport.write(b"answer")
        one.transport.write_eof()
        await it.slot.sees(1, K.OVER)
        assert it.slot.data(1) == b"answer"
        one.transport.close()
        await until(lambda: one.lost == [None])
        assert it.listener.error is None


async def test_a_frame_cut_anywhere_is_the_same_frame() -> None:
    sent = b"".join(
        (PORT, packed(1, K.OPEN), packed(1, K.DATA, b"x" * 300), packed(1, K.ROOM, room=5), packed(1, K.OVER))
    )
    whole = list(FrameReader().read(sent))
    for seed in range(50):
        reader, at = FrameReader(), 0
        found: list[Frame] = []
        draw = random.Random(seed)
        while at < len(sent):
            size = draw.randint(1, 20)
            found += reader.read(sent[at : at + size])
            at += size
        assert found == whole


@pytest.mark.parametrize(
    "frames",
    [
        (PORT,),
        (packed(1, K.DATA, b"x"),),
        (packed(0, K.OPEN),),
        (packed(2, K.OPEN),),
        (packed(1, K.OPEN), packed(1, K.OPEN)),
        (packed(1, K.OPEN), packed(1, K.DATA)),
        (packed(1, K.OPEN), packed(1, K.ROOM)),
        (packed(1, K.OPEN), packed(1, K.ROOM, room=1)),
        (packed(1, K.OPEN), packed(1, K.ROOM, room=2**24 - 1)),
        (packed(1, K.OPEN), packed(1, K.DATA, b"x" * (MAX_DATA_BYTES + 1))),
        (packed(1, K.OPEN), packed(1, K.OVER), packed(1, K.OVER)),
        (packed(1, K.OPEN), packed(1, K.OVER), packed(1, K.DATA, b"x")),
        (packed(1, K.OPEN), packed(1, K.OVER, room=1)),
        (packed(1, K.OPEN), packed(1, K.RESET), packed(2, K.RESET)),
        tuple(packed(number, K.OPEN) for number in range(1, MAX_CONNECTIONS + 2)),
        (b"\x01\0\0\0\0\0\0\0",),
        (b"\x01\0\0\0\0\0\0\x07",),
        (b"\xff" * 8,),
    ],
)
async def test_what_a_slot_may_not_say_ends_the_port(frames: tuple[bytes, ...]) -> None:
    async with both() as it:
        await it.slot.send(*frames)
        error = await ended(it.listener)
        assert type(error) is ServingEndedError
        assert it.listener.error is error
        assert all(one.lost == [error] or isinstance(one.lost[0], ConnectionResetError) for one in it.protocols)
        await asyncio.wait_for(it.slot.left.wait(), 30)


async def test_more_than_its_window_ends_the_port() -> None:
    piece = b"x" * MAX_DATA_BYTES
    async with both() as it:
        one = await it.opened()
        one.transport.pause_reading()
        await it.slot.send(*[packed(1, K.DATA, piece)] * (WINDOW_BYTES // MAX_DATA_BYTES))
        await it.opened(2)
        assert it.listener.error is None  # a whole window is its right, and holds up nobody
        assert not it.slot.of(1, K.ROOM)
        await it.slot.send(packed(1, K.DATA, b"x"))
        assert type(await ended(it.listener)) is ServingEndedError
        assert one.received == b""


async def test_whoever_reads_again_gets_everything_and_gives_room() -> None:
    piece = b"x" * MAX_DATA_BYTES
    async with both() as it:
        one = await it.opened()
        one.transport.pause_reading()
        await it.slot.send(*[packed(1, K.DATA, piece)] * 4, packed(1, K.OVER))
        await it.opened(2)
        one.transport.write_eof()
        await asyncio.sleep(0.1)
        assert not one.eof
        assert not it.slot.of(1, K.OVER)  # the slot would count it as ended while it is held here
        one.transport.resume_reading()
        await it.slot.sees(1, K.OVER)
        assert (one.received, one.eof) == (piece * 4, True)
        assert sum(frame.count for frame in it.slot.of(1, K.ROOM)) == WINDOW_BYTES


async def test_room_is_given_by_the_quarter_window() -> None:
    async with both() as it:
        one = await it.opened()
        await it.slot.send(packed(1, K.DATA, b"x" * (ROOM_BYTES - 1)))
        beside = await it.opened(2)
        beside.transport.write(b"z")
        await it.slot.sees(2, K.DATA)
        assert len(one.received) == ROOM_BYTES - 1
        assert not it.slot.of(1, K.ROOM)
        await it.slot.send(packed(1, K.DATA, b"x"))
        assert (await it.slot.sees(1, K.ROOM)).count == ROOM_BYTES


async def test_whoever_fills_its_window_exactly_gets_room_again() -> None:
    async with both() as it:
        one = await it.opened()
        draw, sent, given = random.Random(1), 0, 0
        for window in range(1, 11):
            if window % 2:
                one.transport.pause_reading()
            while left := WINDOW_BYTES - (sent - given):  # in pieces of any length, and always all that it may
                size = draw.randint(1, min(left, MAX_DATA_BYTES))
                await it.slot.send(packed(1, K.DATA, b"x" * size))
                sent += size
            one.transport.resume_reading()
            await until(lambda sent=sent: len(one.received) == sent)  # type: ignore[misc]
            await until(lambda sent=sent: sent - it.room_given(1) < ROOM_BYTES)  # type: ignore[misc]
            given = it.room_given(1)
        assert it.listener.error is None


async def test_a_slot_never_makes_it_hold_more_than_the_windows() -> None:
    async with both() as it:
        for number in range(1, MAX_CONNECTIONS + 1):
            (await it.opened(number)).transport.pause_reading()
            await it.slot.send(*[packed(number, K.DATA, b"x" * MAX_DATA_BYTES)] * (WINDOW_BYTES // MAX_DATA_BYTES))
        connections = it.listener._connections._open

        def held() -> int:
            return sum(len(data) for one in connections.values() for data in one._in)

        await until(lambda: held() == MAX_CONNECTIONS * WINDOW_BYTES)
        assert not any(frame.kind is K.ROOM for frame in it.slot.frames)
        assert it.listener.error is None
        await it.slot.send(packed(MAX_CONNECTIONS, K.DATA, b"x"))
        assert type(await ended(it.listener)) is ServingEndedError
        assert held() == 0


async def test_what_is_written_waits_for_room() -> None:
    async with both() as it:
        one = await it.opened()
        one.transport.write(b"y" * 300_000)
        assert one.paused
        await until(lambda: len(it.slot.data(1)) == WINDOW_BYTES)
        one.transport.write_eof()
        beside = await it.opened(2)
        beside.transport.write(b"z")
        await it.slot.sees(2, K.DATA)
        while len(it.slot.data(1)) < 300_000:
            assert not it.slot.of(1, K.OVER)
            before = len(it.slot.data(1))
            await it.slot.send(packed(1, K.ROOM, room=50_000))
            await until(lambda before=before: len(it.slot.data(1)) > before)  # type: ignore[misc]
        await it.slot.sees(1, K.OVER)
        assert not one.paused
        with pytest.raises(RuntimeError):
            one.transport.write(b"more")


async def test_frames_for_a_connection_that_has_gone_are_ignored() -> None:
    async with both() as it:
        one = await it.opened()
        one.transport.abort()
        await it.slot.sees(1, K.RESET)
        await it.slot.send(packed(1, K.DATA, b"late"), packed(1, K.OVER), packed(1, K.OVER))
        await it.opened(2)
        assert one.lost == [None]
        await it.slot.send(packed(2, K.RESET))
        await until(lambda: bool(it.protocols[1].lost))
        assert isinstance(it.protocols[1].lost[0], ConnectionResetError)
        assert it.listener.error is None


async def test_many_connections_one_after_the_other_leave_nothing() -> None:
    async with both() as it:
        for number in range(1, 3 * MAX_CONNECTIONS):
            await it.slot.send(packed(number, K.OPEN), packed(number, K.OVER))
            await until(lambda number=number: len(it.protocols) == number)  # type: ignore[misc]
            it.protocols[-1].transport.close()
            await it.slot.sees(number, K.OVER)
        assert it.listener.error is None


async def test_a_slot_that_opens_and_breaks_off_and_reads_nothing_makes_nothing_grow() -> None:
    async with both() as it:
        it.slot.reading.clear()
        for start in range(1, 20_001, 200):
            await it.slot.send(*(packed(n, k) for n in range(start, start + 200) for k in (K.OPEN, K.RESET)))
        await until(lambda: len(it.protocols) == 20_000)
        held = it.listener._connections
        assert (len(held._open), held.port) == (0, 4000)
        assert len(held._due) == 0


async def test_a_closed_connection_takes_a_window_more_and_is_then_reset() -> None:
    async with both() as it:
        one = await it.opened()
        one.transport.write(b"no more")
        one.transport.close()
        await it.slot.sees(1, K.OVER)
        assert (it.slot.data(1), one.lost) == (b"no more", [None])
        for _ in range(WINDOW_BYTES // MAX_DATA_BYTES):
            await it.slot.send(packed(1, K.DATA, b"x" * MAX_DATA_BYTES))
        await until(lambda: sum(frame.count for frame in it.slot.of(1, K.ROOM)) == WINDOW_BYTES)
        assert not it.slot.of(1, K.RESET)
        await it.slot.send(packed(1, K.DATA, b"x"))
        await it.slot.sees(1, K.RESET)
        assert one.received == b""


async def test_a_protocol_that_fails_ends_its_connection_only() -> None:
    class Fails(Kept):
        def data_received(self, data: bytes) -> None:
            raise ValueError(data)

    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    protocols = iter([Fails(), Kept()])
    async with both(lambda: next(protocols)) as it:
        await it.slot.send(packed(1, K.OPEN), packed(1, K.DATA, b"x"), packed(2, K.OPEN), packed(3, K.OPEN))
        await it.slot.sees(1, K.RESET)
        await it.slot.sees(3, K.RESET)  # no protocol could be made
        assert not it.slot.of(2, K.RESET)
        assert [type(one["exception"]) for one in reported] == [ValueError, StopIteration]
        assert it.listener.error is None


async def test_on_leaving_what_was_written_is_still_sent() -> None:
    async with both() as it:
        one = await it.opened()
        one.transport.write(b"a" * 100_000)
        await it.listener.aclose()
        assert len(it.slot.data(1)) == 100_000
        assert it.slot.of(1, K.OVER)
        assert one.lost == [None]
        await asyncio.wait_for(it.slot.left.wait(), 30)


async def test_on_leaving_nobody_waits_long_for_a_slot_that_takes_nothing() -> None:
    async with both() as it:
        one = await it.opened()
        one.transport.write(b"a" * 1_000_000)
        async with asyncio.timeout(30):
            await it.listener.aclose()
        assert one.lost == [None]


@pytest.mark.parametrize(
    ("last", "error"),
    [
        (OVER, ServingEndedError),
        (ConnectionReply(lost="gone").model_dump_json(), LeaseLostError),
        ("", ConnectionLostError),
    ],
)
async def test_its_end_is_named(last: str, error: type[AgentEnvError]) -> None:
    async with both() as it:
        one = await it.opened()
        if last:
            await it.slot.socket.send_str(last)
        else:
            await it.slot.socket.close()
        found = await ended(it.listener)
        assert type(found) is error
        assert one.lost == [found]


async def test_a_port_that_cannot_be_had() -> None:
    async def taken(socket: web.WebSocketResponse) -> None:
        await socket.send_str(ConnectionReply(error=98).model_dump_json())

    async def silent(socket: web.WebSocketResponse) -> None:
        await socket.send_str(ConnectionReply().model_dump_json())
        await socket.receive()

    async def wrong(socket: web.WebSocketResponse) -> None:
        await socket.send_str(ConnectionReply().model_dump_json())
        await socket.send_bytes(packed(1, K.OPEN))
        await socket.receive()

    for speak, error, timeout_s in (
        (taken, OSError, 30.0),
        (silent, TimeoutError, 0.3),
        (wrong, ServingEndedError, 30.0),
    ):
        async with slot(speak) as lease:
            listener = Listener(lease)
            try:
                with pytest.raises(error):
                    await listener.open(Kept, 1, timeout_s=timeout_s)
            finally:
                await listener.aclose()
