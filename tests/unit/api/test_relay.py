"""What a relay passes on, to whom, and how much of it waits in the relay; over a container that is a stub."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict

from agentenv.api.farm_server.relay import FarmContainers, Known, container_and_path, serve_relay
from agentenv.api.passing import close_code, passed_on
from agentenv.containers.attachments import Attachments
from agentenv.containers.connection import ContainerConnection
from agentenv.containers.handle import ContainerHandle
from agentenv.errors import ConnectionLostError, ProtocolError
from agentenv.farm_client.client import FarmClient
from agentenv.wire.farm import ContainerList, ContainerSeen
from tests.waiting import until

MIB = 1024 * 1024


# -- pure -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw_path", "found"),
    [
        ("/c/a-1.b_2/v1/info", ("a-1.b_2", "/v1/info")),
        ("/c/a/v1/x?path=../y&b=%2e%2e/", ("a", "/v1/x?path=../y&b=%2e%2e/")),
        ("/c/a/", ("a", "/")),
        ("/c/a/v1/attachments/i%20d/content.text", ("a", "/v1/attachments/i%20d/content.text")),
        ("/c/a", None),
        ("/c//v1/info", None),
        ("/c/a/../b", None),
        ("/c/a/v1/..", None),
        ("/c/a/%2e%2E/b", None),
        ("/c/a/./b", None),
        ("/c/a%2fb/v1", None),
        ("/c/a@evil/v1", None),
        ("/c/a:80/v1", None),
        ("http://evil/c/a/v1", None),
        ("//evil/c/a/v1", None),
        ("/v1/info", None),
    ],
)
def test_which_container_and_what_of_it(raw_path: str, found: tuple[str, str] | None) -> None:
    assert container_and_path(raw_path) == found


@given(st.text(st.sampled_from("/c.%2eE?#@:\\ \n"), max_size=30).map("/c/".__add__))
def test_no_way_leads_out_of_the_container(raw_path: str) -> None:
    if (found := container_and_path(raw_path)) is not None:
        container, path = found
        assert raw_path == f"/c/{container}{path}"
        assert path.startswith("/")
        steps = path.partition("?")[0].lower().replace("%2e", ".").split("/")
        assert not {".", ".."} & set(steps)


def test_headers_between_neighbours_end_here() -> None:
    given_headers = CIMultiDict(
        [
            ("Host", "relay"), ("Authorization", "Bearer x"), ("Connection", "keep-alive, X-Mine"), ("X-Mine", "1"),
            ("Transfer-Encoding", "chunked"), ("TE", "trailers"), ("X-Two", "a"), ("X-Two", "b"), ("Upgrade", "h2c"),
            ("Sec-WebSocket-Key", "k"),
        ]
    )  # fmt: skip
    assert passed_on(given_headers, ["sec-websocket-key"]) == [
        ("Authorization", "Bearer x"), ("X-Two", "a"), ("X-Two", "b"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("code", "passed"),
    [(1000, 1000), (1001, 1001), (1009, 1009), (4321, 4321), (None, 1014), (1005, 1014), (1006, 1014), (0, 1014)],
)
def test_a_close_code_is_passed_on_if_it_may_be_sent(code: int | None, passed: int) -> None:
    assert close_code(code) == passed


# -- a stub behind it -------------------------------------------------------------------------------


@dataclass
class Stub:
    """A container that does what a test says, and its relay."""

    stack: AsyncExitStack
    http: aiohttp.ClientSession
    url: str = ""
    """Of the container, through the relay."""
    asked: list[web.BaseRequest] = field(default_factory=list)

    async def serve(self, handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]) -> None:
        async def remember(request: web.BaseRequest) -> web.StreamResponse:
            self.asked.append(request)
            return await handler(request)

        runner = web.ServerRunner(web.Server(remember, auto_decompress=False), shutdown_timeout=0.1)
        await runner.setup()
        self.stack.push_async_callback(runner.cleanup)
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        await self.relay(f"{site.name}/prefix")

    async def relay(self, base_url: str) -> None:
        async def lookup(container: str) -> str | None:
            return base_url if container == "c1" else None

        self.url = await self.stack.enter_async_context(serve_relay(lookup, drain_s=0.1)) + "/c/c1"


@pytest.fixture
async def stub() -> AsyncIterator[Stub]:
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(aiohttp.ClientSession(auto_decompress=False))
        yield Stub(stack, http)


async def test_a_request_and_its_answer_are_as_they_were(stub: Stub) -> None:
    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        body = await request.read()
        return web.Response(status=409, reason="Mine", body=body[::-1], headers={"X-Back": "b", "Set-Cookie": "a=1"})

    await stub.serve(handler)
    headers = {"Authorization": "Bearer pass", "Content-Encoding": "gzip", "Cookie": "x=y"}
    for _ in range(2):
        url = stub.url + "/v1/a%2Fb?c=%20d"
        async with stub.http.put(url, data=b"not gzip", headers=headers) as answer:
            assert (answer.status, answer.reason, await answer.read()) == (409, "Mine", b"pizg ton")
            assert (answer.headers["X-Back"], answer.headers["Content-Length"]) == ("b", "8")
    first, second = stub.asked
    assert (first.method, first.raw_path) == ("PUT", "/prefix/v1/a%2Fb?c=%20d")
    assert first.headers["Authorization"] == "Bearer pass"
    assert (first.headers["Content-Encoding"], first.headers["Content-Length"]) == ("gzip", "8")
    assert second.headers["Cookie"] == "x=y"  # the client's own, nothing of the first answer's
    assert "relay" not in first.host


async def test_a_redirect_is_an_answer_and_not_a_way(stub: Stub) -> None:
    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        if request.path.endswith("/elsewhere"):
            return web.Response(text="got there")
        raise web.HTTPTemporaryRedirect(str(request.url.with_path("/elsewhere")))

    await stub.serve(handler)
    async with stub.http.get(stub.url + "/v1/info", allow_redirects=False) as answer:
        assert answer.status == 307
    with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
        await stub.http.ws_connect(stub.url + "/v1/stream")
    assert refused.value.status == 502
    assert not any(request.path == "/elsewhere" for request in stub.asked)


async def test_an_answer_that_is_cut_is_cut_for_the_client(stub: Stub) -> None:
    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        await answer.write(b"some")
        assert request.transport is not None
        request.transport.abort()
        return answer

    await stub.serve(handler)
    async with stub.http.get(stub.url + "/v1/x") as answer:
        assert await answer.content.readany() == b"some"
        with pytest.raises(aiohttp.ClientPayloadError):
            await answer.read()


async def test_only_known_containers_and_their_paths(stub: Stub) -> None:
    await stub.relay("http://127.0.0.1:9")  # nobody listens there
    root = stub.url.removesuffix("/c/c1")
    for path, status in (("/c/c1/v1/info", 502), ("/c/c2/v1/info", 503), ("/c/c1", 404), ("/v1/info", 404)):
        async with stub.http.get(root + path) as answer:
            assert answer.status == status, path
    async with stub.http.get(root + "/health") as answer:
        assert (await answer.json())["status"] == "ok"
    async with stub.http.get(root + "/ready") as answer:
        assert answer.status == 200


async def echo(request: web.BaseRequest) -> web.StreamResponse:
    stream = web.WebSocketResponse(max_msg_size=4 * MIB, compress=False)
    await stream.prepare(request)
    async for message in stream:
        if message.data == "close":
            await stream.close(code=4000)
        else:
            await stream.send_frame(message.data.encode(), aiohttp.WSMsgType.TEXT)
    return stream


async def test_messages_pings_and_closes_go_through(stub: Stub) -> None:
    await stub.serve(echo)
    async with stub.http.ws_connect(stub.url + "/v1/stream", max_msg_size=0, autoping=False) as stream:
        for text in ("", "ü", "x" * 4_000_000):
            await stream.send_str(text)
            assert (await stream.receive()).data == text
        await stream.ping(b"mine")
        pong = await stream.receive()
        assert (pong.type, bytes(pong.data)) == (aiohttp.WSMsgType.PONG, b"mine")
        await stream.send_str("close")
        assert (await stream.receive()).type is aiohttp.WSMsgType.CLOSE
        assert stream.close_code == 4000


async def test_a_message_that_is_too_large_is_refused_as_a_container_does(stub: Stub) -> None:
    await stub.serve(echo)
    async with stub.http.ws_connect(stub.url + "/v1/stream") as stream:
        raw = stream.get_extra_info("socket")
        # The head of a frame, without the content: that would be in the way of the answer.
        with socket.socket(fileno=os.dup(raw.fileno())) as twin:
            assert twin.send(b"\x81\xff" + struct.pack("!Q", 4 * MIB + 1) + b"mask") == 14
        assert (await stream.receive()).type is aiohttp.WSMsgType.CLOSE
        assert stream.close_code == 1009


async def test_a_container_that_is_cut_off_is_no_orderly_end(stub: Stub) -> None:
    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        stream = web.WebSocketResponse()
        await stream.prepare(request)
        await stream.receive()
        assert request.transport is not None
        request.transport.abort()
        return stream

    await stub.serve(handler)
    async with stub.http.ws_connect(stub.url + "/v1/stream") as stream:
        await stream.send_str("now")
        assert (await stream.receive()).type is aiohttp.WSMsgType.CLOSE
        assert stream.close_code == 1014


async def test_a_client_that_goes_away_is_noticed_by_the_container(stub: Stub) -> None:
    ended = asyncio.Event()

    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        await answer.write(b"x")
        try:
            while True:
                await answer.write(b"x")
                await asyncio.sleep(0.01)
        except ConnectionError:
            ended.set()
            raise

    await stub.serve(handler)
    answer = await stub.http.get(stub.url + "/v1/x")
    await answer.content.readany()
    answer.close()
    async with asyncio.timeout(60):
        await ended.wait()


async def test_what_a_client_does_not_read_waits_at_the_container(stub: Stub) -> None:
    sent, total = 0, 256

    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        nonlocal sent
        stream = web.WebSocketResponse(compress=False)
        await stream.prepare(request)
        message = b"x" * MIB
        for sent in range(1, total + 1):  # noqa: B007 (read outside)
            await stream.send_frame(message, aiohttp.WSMsgType.TEXT)
        await stream.close()
        return stream

    await stub.serve(handler)
    tracemalloc.start()
    try:
        async with stub.http.ws_connect(stub.url + "/v1/stream") as stream:
            still = before = 0
            while still < 50:  # it has stopped sending
                await asyncio.sleep(0.01)
                still, before = (still + 1 if sent == before else 0), sent
            held_bytes, _ = tracemalloc.get_traced_memory()
            assert 0 < sent < total
            got = [len(message.data) async for message in stream]
            _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert got == [MIB] * total
    assert held_bytes < 24 * MIB  # in stub, relay and client together
    assert peak_bytes < 32 * MIB


# -- where containers are ---------------------------------------------------------------------------


def listed(*names: str) -> ContainerList:
    return ContainerList(
        containers=tuple(
            ContainerSeen(id=name, index=0, base_url=f"http://{name}", state="ready", slots={}) for name in names
        )
    )


def test_a_container_stays_known_for_a_while_after_its_last_list() -> None:
    known = Known(kept_s=60)
    known.update(listed("a", "b"), 0)
    known.update(listed("b"), 59)
    assert (known.url("a"), known.url("b"), known.url("c")) == ("http://a", "http://b", None)
    known.update(listed("b"), 61)
    assert (known.url("a"), known.url("b")) == (None, "http://b")
    known.update(listed("c"), 10_000)  # the farm was away for long: nothing was known in between
    assert (known.url("b"), known.url("c"), len(known)) == (None, "http://c", 1)


class FarmStub:
    """A farm that answers what a test says, and counts."""

    def __init__(self) -> None:
        self.asked = 0
        self.answer: Callable[[], web.Response] = lambda: web.Response(status=503)

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        assert (request.path, request.headers["Authorization"]) == ("/v1/containers", "Bearer relay-token")
        self.asked += 1
        return self.answer()

    def say(self, *names: str) -> None:
        self.answer = lambda: web.json_response(text=listed(*names).model_dump_json())


async def test_the_list_of_a_farm_is_followed() -> None:
    farm, now_s = FarmStub(), 0.0
    runner = web.ServerRunner(web.Server(farm.handle))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        async with FarmClient(site.name, "relay-token") as client, FarmContainers(client, clock=lambda: now_s) as found:
            assert "503" in found.problem
            assert await found("a") is None
            assert farm.asked == 1  # not again for each request
            farm.say("a")
            now_s = 1.0
            assert await asyncio.gather(*(found("a") for _ in range(10))) == ["http://a"] * 10
            assert (found.problem, farm.asked) == ("", 2)  # once for all that wait
            farm.say("a", "b")
            await until(lambda: farm.asked > 2)  # by itself
            farm.answer = lambda: web.Response(status=401, text="{}")
            await until(lambda: found.problem)
            assert await found("a") == "http://a"  # nothing is forgotten while there is no list
    finally:
        await runner.cleanup()


# -- what clients make of its answers ---------------------------------------------------------------


def test_a_proxy_that_does_not_reach_the_container_is_no_answer_of_it() -> None:
    connection = ContainerConnection(ContainerHandle("c", 0, "http://c", "t" * 16, slots=1))
    for status in (502, 503, 504):
        assert isinstance(connection.refusal(status, b"<html>"), ConnectionLostError)
    for status in (404, 500):
        assert isinstance(connection.refusal(status, b"<html>"), ProtocolError)


async def test_attachments_wait_for_a_relay_that_does_not_reach_its_container(stub: Stub) -> None:
    await stub.relay("http://127.0.0.1:9")
    handle = ContainerHandle("c1", 0, stub.url, "t" * 16, slots=1)
    async with ContainerConnection(handle) as connection:
        attachments = Attachments(connection, silence_s=0.5)
        with pytest.raises(ConnectionLostError):
            await attachments.put(b"{}", "call", {"content": b"x" * 300_000})
