"""The client of a container's watch, against servers that do not keep to it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, suppress

import pytest
from aiohttp import test_utils, web

from agentenv.containers import watch as watching
from agentenv.containers.handle import ContainerHandle
from agentenv.containers.watch import watch
from agentenv.errors import AgentEnvError, ConnectionLostError, PolicyRefusalError, ProtocolError
from agentenv.wire.leases import SlotReport
from agentenv.wire.server import ErrorReply
from agentenv.wire.states import SlotState
from agentenv.wire.watch import GENERATION_HEADER, WatchBeat, WatchChange, WatchLine, WatchList

REPORT = SlotReport(slot=0, state=SlotState.free, epoch=3)
LIST = WatchList(boot="b", generation=7, slots=(REPORT,))
CHANGE = WatchChange(slot=REPORT)
BEAT = WatchBeat(statistics={"calls": 1})

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def _encoded(*lines: WatchLine) -> bytes:
    return b"".join(line.model_dump_json().encode() + b"\n" for line in lines)


def _sends(*pieces: bytes, then_hangs: bool = False) -> Handler:
    """Sends these pieces, each by itself, and ends or hangs."""

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
            await asyncio.sleep(0.001)
        if then_hangs:
            await asyncio.Event().wait()
        return response

    return handler


@asynccontextmanager
async def _watched(handler: Handler, silence_s: float = 30.0) -> AsyncIterator[AsyncIterator[WatchLine]]:
    application = web.Application()
    application.router.add_get("/v1/watch", handler)
    async with test_utils.TestServer(application) as server:
        handle = ContainerHandle("c", 0, str(server.make_url("")).rstrip("/"), "token", 1)
        lines = watch(handle, generation=7, silence_s=silence_s)
        async with aclosing(lines):
            yield lines


async def _until_error(handler: Handler, silence_s: float = 30.0) -> tuple[list[WatchLine], AgentEnvError]:
    """The lines that came, and the error that ended them."""
    seen: list[WatchLine] = []
    async with asyncio.timeout(60), _watched(handler, silence_s) as lines:
        try:
            async for line in lines:
                seen.append(line)
        except AgentEnvError as error:
            return seen, error
    raise AssertionError("a watch never ends by itself")


@pytest.mark.parametrize("size", [1, 7, 100_000])
async def test_lines_come_whole_however_they_are_cut(size: int) -> None:
    raw = _encoded(LIST, BEAT, CHANGE, CHANGE, BEAT)
    seen, ended = await _until_error(_sends(*(raw[at : at + size] for at in range(0, len(raw), size))))
    assert seen == [LIST, BEAT, CHANGE, CHANGE, BEAT]
    assert type(ended) is ConnectionLostError
    assert "cut" in str(ended)


async def test_the_request_names_token_and_generation() -> None:
    asked: list[tuple[str, str]] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        asked.append((request.headers["Authorization"], request.headers[GENERATION_HEADER]))
        return await _sends(_encoded(LIST))(request)

    await _until_error(handler)
    assert asked == [("Bearer token", "7")]


async def test_silence_is_a_lost_connection() -> None:
    for silence_s in (0.3, 3.0, 20.0):  # of which connecting takes its part
        seen, ended = await _until_error(_sends(_encoded(LIST), then_hangs=True), silence_s=silence_s)
        if seen:
            break
    assert seen == [LIST]
    assert type(ended) is ConnectionLostError
    assert f"nothing came for {silence_s:g} s" in str(ended)


async def test_no_answer_is_a_lost_connection() -> None:
    async def handler(_: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    _, ended = await _until_error(handler, silence_s=0.05)
    assert type(ended) is ConnectionLostError


async def test_nobody_there_is_a_lost_connection() -> None:
    handle = ContainerHandle("c", 0, "http://127.0.0.1:1", "token", 1)
    with pytest.raises(ConnectionLostError):
        await anext(watch(handle))


@pytest.mark.parametrize(
    ("raw", "error"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n", ConnectionLostError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n", ConnectionLostError),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", ConnectionLostError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf", ConnectionLostError),
        (b"", ConnectionLostError),
        (b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: Upgrade\r\n\r\n", ProtocolError),
        (b"HTTP/1.1 204 No Content\r\n\r\n", ProtocolError),
    ],
)
async def test_what_is_no_answer_of_a_container_is_no_line(raw: bytes, error: type[AgentEnvError]) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(raw)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        with pytest.raises(AgentEnvError) as raised:
            await asyncio.wait_for(anext(watch(ContainerHandle("c", 0, f"http://{host}:{port}", "token", 1))), 30)
    assert raised.type is error


async def test_a_container_that_waits_for_our_reader_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "MAX_LINE_BYTES", 100_000)
    beats = 3_000  # together above what is read ahead and what the sockets take
    beat = WatchBeat(statistics={f"calls {number}": number for number in range(60)})
    came = list[WatchLine]()
    for silence_s in (0.2, 2.0, 10.0):  # it may be connected too late, or send too slowly, for the shorter ones
        came.clear()
        async with asyncio.timeout(60), _watched(_sends(_encoded(LIST, *[beat] * beats)), silence_s) as lines:
            with suppress(ConnectionLostError):
                came.append(await anext(lines))
                await asyncio.sleep(1.0 + silence_s)
                while len(came) <= beats:
                    came.append(await anext(lines))
                break
    assert came == [LIST, *[beat] * beats]


async def test_a_loop_that_was_held_up_finds_what_came_meanwhile() -> None:
    """Our own standstill is not the container's silence."""
    go = asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(_encoded(LIST))
        await go.wait()
        await response.write(_encoded(BEAT))
        await asyncio.Event().wait()
        return response

    async with asyncio.timeout(60), _watched(handler, silence_s=3.0) as lines:
        assert await anext(lines) == LIST
        waiting = asyncio.ensure_future(anext(lines))
        await asyncio.sleep(0.01)
        go.set()
        await asyncio.sleep(0)  # it is written
        time.sleep(3.3)
        assert await waiting == BEAT


@pytest.mark.parametrize(
    "raw",
    [
        b"\n",
        b"{}\n",
        b"nonsense\n",
        b"\xff\xfe\n",
        b'{"type":"list"}\n',
        b'{"type":"unknown"}\n',
        _encoded(BEAT),
        _encoded(LIST, LIST),
        _encoded(LIST)[:-2] + b',"extra":1}\n',
    ],
)
async def test_anything_else_violates_the_contract(raw: bytes) -> None:
    _, ended = await _until_error(_sends(raw, then_hangs=True))
    assert type(ended) is ProtocolError


async def test_a_line_without_an_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "MAX_LINE_BYTES", 100_000)
    _, ended = await _until_error(_sends(b"x" * 200_000, then_hangs=True))
    assert type(ended) is ProtocolError
    assert "above 100000 bytes" in str(ended)


async def test_a_refusal_is_the_error_it_names() -> None:
    async def handler(_: web.Request) -> web.StreamResponse:
        body = ErrorReply(error="refused", message="a pass does not allow GET /v1/watch")
        return web.json_response(text=body.model_dump_json(), status=403)

    _, ended = await _until_error(handler)
    assert type(ended) is PolicyRefusalError
    assert "a pass does not allow" in str(ended)


async def test_an_answer_that_is_no_error_of_ours_violates_the_contract() -> None:
    for text in ("", "not found"):

        async def handler(_: web.Request, text: str = text) -> web.StreamResponse:
            return web.Response(status=404, text=text)

        _, ended = await _until_error(handler)
        assert type(ended) is ProtocolError
        assert "404" in str(ended)


@pytest.mark.parametrize(("silence_s", "asked"), [(5.0, "2"), (0.1, "0.1"), (0.5, "0.2"), (1000.0, "60")])
async def test_lines_are_asked_for_well_within_what_counts_as_silence(silence_s: float, asked: str) -> None:
    seen = list[str]()

    async def handler(request: web.Request) -> web.StreamResponse:
        seen.append(request.query["beat_s"])
        return web.Response(status=503)

    with suppress(AgentEnvError):
        async with _watched(handler, silence_s) as lines:
            await anext(lines)
    assert seen == [asked]
