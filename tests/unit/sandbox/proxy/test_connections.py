"""Connections of a slot, with names, addresses and deadlines of the tests' own."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest

from agentenv.errors import ConfigError
from agentenv.sandbox.proxy import streams
from agentenv.sandbox.proxy.connection import Deadlines
from agentenv.sandbox.proxy.names import LOOKUPS_AT_ONCE, Lookup
from agentenv.sandbox.proxy.slot import Resources, SlotConnections, connections_per_slot
from agentenv.sandbox.proxy.streams import Stream
from agentenv.wire.addresses import Address
from agentenv.wire.network import NetworkPolicy
from tests.waiting import until

PUBLIC, OTHER = "93.184.216.34", "93.184.216.35"
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], object]


class World:
    """A proxied slot, and servers behind addresses that are only reached through it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.connected: list[str] = []
        self._ports: dict[str, int] = {}
        self._servers: list[asyncio.Server] = []
        self._slots: list[SlotConnections] = []
        self._clients: list[asyncio.StreamWriter] = []
        self._threads = ThreadPoolExecutor(32)
        self.port = 0
        real = Stream.connect

        async def connect(address: Address, port: int) -> Stream:
            self.connected.append(str(address))
            if str(address) not in self._ports:
                raise ConnectionRefusedError(111, "refused")
            return await real(ipaddress.ip_address("127.0.0.1"), self._ports[str(address)])

        monkeypatch.setattr(Stream, "connect", connect)

    async def server(self, address: str, serve: Serve) -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)  # type: ignore[arg-type]
        self._servers.append(server)
        self._ports[address] = server.sockets[0].getsockname()[1]

    def slot(
        self, policy: NetworkPolicy, lookup: Lookup, *, connections: int = 8, deadlines: Deadlines | None = None
    ) -> SlotConnections:
        listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port = listener.getsockname()[1]
        made = SlotConnections(
            0, listener, policy, Resources(lookup, self._threads, list, connections, deadlines or Deadlines())
        )
        self._slots.append(made)
        return made

    async def ask(self, request: str) -> str:
        reader, _ = await self.open(request)
        return (await reader.read()).decode()

    async def open(self, request: str = "") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=4096)
        self._clients.append(writer)
        writer.write(request.encode())
        return reader, writer

    async def aclose(self) -> None:
        for client in self._clients:
            client.transport.abort()
        for slot in self._slots:
            await slot.aclose()
        for server in self._servers:
            server.close()
        self._threads.shutdown()


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    made = World(monkeypatch)
    yield made
    await made.aclose()


async def hello(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello")
    await reader.read()
    writer.close()


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while received := await reader.read(65536):
        writer.write(received)
    writer.close()


def allowing(*hosts: str) -> NetworkPolicy:
    return NetworkPolicy("allow", hosts)


GET = "GET http://a.org/ HTTP/1.1\r\n\r\n"
TUNNEL = "CONNECT a.org:443 HTTP/1.1\r\n\r\n"


async def test_a_name_is_looked_up_only_if_it_is_allowed(world: World) -> None:
    """Or a slot could tell anybody anything by asking for names."""
    asked: list[str] = []
    slot = world.slot(allowing("a.org"), lambda name: asked.append(name) or [])  # type: ignore[func-returns-value]
    for host in ("secret.evil.org", "b.a.org"):
        assert (await world.ask(f"CONNECT {host}:443 HTTP/1.1\r\n\r\n")).startswith("HTTP/1.1 403")
    assert asked == []
    assert (await world.ask(GET)).startswith("HTTP/1.1 502")
    assert asked == ["a.org"]
    assert (slot.counts.refused, slot.counts.failed) == (2, 1)


async def test_the_address_that_was_judged_is_connected_to_however_often_the_name_changes(world: World) -> None:
    await world.server(PUBLIC, hello)
    answers = iter([[PUBLIC], ["127.0.0.1"], ["10.0.0.1"]])
    world.slot(allowing("a.org"), lambda _: next(answers))
    for _ in range(3):  # one lookup for all: it is kept
        assert (await world.ask(GET)).endswith("hello")
    assert world.connected == [PUBLIC] * 3


async def test_of_many_addresses_the_allowed_ones_are_tried_in_turn(world: World) -> None:
    await world.server(OTHER, hello)
    slot = world.slot(allowing("a.org"), lambda _: ["127.0.0.1", "169.254.169.254", "::1", PUBLIC, OTHER])
    assert (await world.ask(GET)).endswith("hello")
    assert world.connected == [PUBLIC, OTHER]
    await slot.change(allowing("b.org"))
    assert "may connect only to: b.org." in await world.ask(GET)


async def test_a_host_that_refuses_or_does_not_exist_is_told(world: World) -> None:
    def lookup(name: str) -> list[str]:
        if name == "a.org":
            return [PUBLIC]
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    slot = world.slot(allowing("*"), lookup)
    assert "No connection to a.org port 80: Connection refused." in await world.ask(GET)
    assert "b.org could not be resolved: Name or service" in await world.ask("GET http://b.org/ HTTP/1.1\r\n\r\n")
    assert slot.counts.failed == 2


async def test_a_server_that_answers_nonsense_or_nothing_is_told(world: World) -> None:
    async def nonsense(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"SSH-2.0-OpenSSH\r\n\r\n")
        writer.close()

    async def nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    world.slot(allowing("*"), lambda _: [PUBLIC])
    await world.server(PUBLIC, nonsense)
    assert "No response from a.org: it does not answer in HTTP/1.1." in await world.ask(GET)
    await world.server(PUBLIC, nothing)
    assert "HTTP/1.1 502" in await world.ask(GET)


async def test_a_server_that_only_has_interim_responses_is_ended(world: World) -> None:
    async def interim(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(b"HTTP/1.1 102 Processing\r\n\r\n")
                await writer.drain()
        writer.close()

    await world.server(PUBLIC, interim)
    slot = world.slot(allowing("a.org"), lambda _: [PUBLIC])
    assert (await world.ask(GET)).count("102 Processing") == 32
    assert slot.counts.failed == 0  # it was reached


async def test_a_response_cut_short_is_not_made_whole(world: World) -> None:
    async def short(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nhello")
        writer.close()

    await world.server(PUBLIC, short)
    world.slot(allowing("a.org"), lambda _: [PUBLIC])
    assert (await world.ask(GET)).endswith("Content-Length: 50\r\nConnection: close\r\n\r\nhello")


async def test_an_answer_that_comes_before_the_body_was_sent_arrives(world: World) -> None:
    async def too_large(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    await world.server(PUBLIC, too_large)
    world.slot(allowing("a.org"), lambda _: [PUBLIC])
    body = "x" * 1_000_000
    assert "413" in await world.ask(f"POST http://a.org/ HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n{body}")


async def test_back_pressure_reaches_the_sender(world: World) -> None:
    """The slot does not read: what the proxy takes from the server stays far below what the server would send."""
    enough = asyncio.Event()

    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                writer.write(bytes(1 << 20))
                await writer.drain()
        except (ConnectionError, asyncio.CancelledError):
            enough.set()

    await world.server(PUBLIC, endless)
    slot = world.slot(allowing("a.org"), lambda _: [PUBLIC])
    _, writer = await world.open(TUNNEL)
    await until(lambda: slot.counts.received_bytes > 0)
    seen = -1
    while seen != slot.counts.received_bytes < 64 << 20:  # until nothing moves any more
        seen = slot.counts.received_bytes
        for _ in range(200):
            await asyncio.sleep(0.001)
    assert slot.counts.received_bytes < 64 << 20
    writer.transport.abort()
    await enough.wait()


async def test_a_change_while_a_name_is_looked_up_or_a_host_is_connected_to_counts(world: World) -> None:
    asked, answer = threading.Event(), threading.Event()

    def lookup(_: str) -> list[str]:
        asked.set()
        answer.wait(60)
        return [PUBLIC]

    await world.server(PUBLIC, echo)
    slot = world.slot(allowing("a.org"), lookup)
    reader, _ = await world.open(TUNNEL)
    await until(asked.is_set)
    await slot.change(allowing("b.org"))
    answer.set()
    assert await reader.read() == b""
    assert world.connected == []
    assert (slot.counts.open, slot.counts.refused) == (0, 1)


async def test_a_change_that_takes_away_only_a_network_closes_what_went_there(world: World) -> None:
    await world.server("10.0.0.1", echo)
    slot = world.slot(allowing("a.org", "10.0.0.0/8"), lambda _: ["10.0.0.1"])
    reader, writer = await world.open(TUNNEL + "x")
    assert (await reader.readuntil(b"x")).startswith(b"HTTP/1.1 200")
    await slot.change(allowing("a.org", "10.0.0.1"))
    writer.write(b"y")
    assert await reader.readexactly(1) == b"y"
    await slot.change(allowing("a.org"))
    assert slot.counts.open == 0
    assert await reader.read() == b""


async def test_a_request_that_never_ends_is_ended(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_LINGER_S", 1.0)
    impatient = world.slot(allowing("a.org"), lambda _: [], deadlines=Deadlines(head_s=0.05))
    assert (await world.ask("GET http://a.org/ HTTP/1.1\r\nX: ")).startswith("HTTP/1.1 408")
    patient = world.slot(allowing("a.org"), lambda _: [])
    assert (await world.ask("GET http://a.org/ HTTP/1.1\r\n" + "X: y\r\n" * 10_000)).startswith("HTTP/1.1 400")
    await until(lambda: (impatient.counts.open, patient.counts.open) == (0, 0))


async def test_a_silent_tunnel_is_ended(world: World) -> None:
    await world.server(PUBLIC, echo)
    slot = world.slot(allowing("a.org"), lambda _: [PUBLIC], deadlines=Deadlines(idle_s=8.0))
    reader, _ = await world.open(TUNNEL)
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
    for connection in slot._serving.values():  # not by a short time, in which it may not be open yet
        connection.moved_s -= 100
    assert await reader.read() == b""


async def test_connections_beyond_the_slots_number_wait_and_are_served_later(world: World) -> None:
    await world.server(PUBLIC, hello)
    slot = world.slot(allowing("a.org"), lambda _: [PUBLIC], connections=4)
    held = [await world.open() for _ in range(4)]
    await until(lambda: slot.counts.open == 4)
    waiting = asyncio.create_task(world.ask(GET))
    for _ in range(20):
        await asyncio.sleep(0)
    assert slot.counts.connections == 4
    held[0][1].close()
    assert (await waiting).endswith("hello")


async def test_one_slots_slow_names_do_not_delay_another_slots(world: World) -> None:
    release, asked = threading.Event(), []

    def slow(name: str) -> list[str]:
        asked.append(name)
        release.wait(60)
        return []

    await world.server(PUBLIC, hello)
    world.slot(allowing("*.org"), slow, connections=64)
    clients = [await world.open(f"CONNECT n{number}.org:1 HTTP/1.1\r\n\r\n") for number in range(40)]
    await until(lambda: len(asked) == LOOKUPS_AT_ONCE)
    world.slot(allowing("a.org"), lambda _: [PUBLIC])
    try:
        assert (await world.ask(GET)).endswith("hello")
        assert len(asked) == LOOKUPS_AT_ONCE
    finally:
        release.set()
    for reader, _ in clients:
        assert (await reader.read()).startswith(b"HTTP/1.1 502")


async def test_a_slot_that_is_dropped_is_gone(world: World) -> None:
    await world.server(PUBLIC, echo)
    slot = world.slot(allowing("a.org"), lambda _: [PUBLIC])
    reader, _ = await world.open(TUNNEL)
    await reader.readuntil(b"\r\n\r\n")
    await slot.aclose()
    await slot.aclose()
    assert await reader.read() == b""
    with pytest.raises(ConnectionRefusedError):
        await world.open()


REQUESTS = (
    b"GET http://a.org/ HTTP/1.1\r\nHost: a.org\r\nAccept: */*\r\n\r\n",
    b"POST http://a.org/x HTTP/1.1\r\nContent-Length: 10\r\n\r\n0123456789",
    b"PUT http://a.org/ HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\na;x=y\r\n0123456789\r\n0\r\nA: b\r\n\r\n",
    b"CONNECT a.org:443 HTTP/1.1\r\n\r\nhello",
)
RESPONSES = (
    b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.0 404 Not Found\r\n\r\nhello",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
)


def mutated(random: Random, text: bytes) -> bytes:
    for _ in range(random.randrange(4)):
        at, count = random.randrange(len(text) + 1), random.randrange(4)
        text = text[:at] + random.choice((b"", b"\r\n", b"\0", b"\xff", b":", b"9" * 20, text)) + text[at + count :]
    return text


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_either_side_sends_it_goes_on_serving(
    world: World, caplog: pytest.LogCaptureFixture, seed: int
) -> None:
    random = Random(seed)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(random.choice((1, 100)))
        writer.write(mutated(random, random.choice(RESPONSES)))
        writer.close()

    await world.server(PUBLIC, answer)
    slot = world.slot(allowing("a.org"), lambda _: [PUBLIC], connections=200)
    for _ in range(100):
        _, writer = await world.open()
        writer.write(mutated(random, random.choice(REQUESTS)))
        writer.write_eof()
    await until(lambda: slot.counts.connections == 100 and slot.counts.open == 0)
    assert [record.getMessage() for record in caplog.records] == []
    await world.server(PUBLIC, hello)
    assert (await world.ask(GET)).endswith("hello")


def test_each_slot_has_its_share_of_connections() -> None:
    assert [connections_per_slot(slots, 1 << 20) for slots in (1, 10, 100, 1000)] == [256, 256, 40, 4]
    assert connections_per_slot(10, 400) == 136
    with pytest.raises(ConfigError, match="needs 136 open files, 130 are allowed"):
        connections_per_slot(10, 130)
