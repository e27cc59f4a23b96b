"""What an agent or a supervisor may say, and what becomes of the rest. No descriptor ever leaks."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from agentenv.errors import ProtocolError
from agentenv.sandbox import control_protocol, descriptors
from agentenv.sandbox.control_protocol import Hello, SlotReady
from agentenv.sandbox.limit_watch import LimitFiles
from agentenv.sandbox.server.agent_link import RUN_IDS, AgentLink, TooManyRunsError
from agentenv.sandbox.server.poller import Lane, Poller
from agentenv.sandbox.server.supervisor_link import SlotHandedOver, SupervisorLink
from agentenv.sandbox.slot_loss import LossReason
from agentenv.sandbox.slotagent.protocol import (
    SCRIPT_PIPE,
    STDIN,
    Kind,
    SpawnStep,
    Usage,
    decode,
    encode,
    receive,
    send,
    spawn_text,
)
from tests.waiting import until

PAYLOAD = spawn_text(["true"], {}, "/")
USAGE = struct.pack("<QQQ", 1_000_000, 500_000, 10)


def open_fds() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


class Events:
    def __init__(self) -> None:
        self.heard: list[object] = []

    def answered(self) -> bool:
        return bool(self.heard)

    def on_spawned(self, fds: tuple[int, ...], input_inode: int, pid: int) -> None:
        for fd in fds:
            os.close(fd)
        self.heard.append(("spawned", len(fds)))

    def on_spawn_failed(self, error: int, step: SpawnStep) -> None:
        self.heard.append(("failed", error, step))

    def on_exit(self, status: int, usage: Usage) -> None:
        self.heard.append(("exit", status, usage.user_s, usage.max_rss_bytes))

    def on_lost(self) -> None:
        self.heard.append("lost")


class Linked:
    def __init__(self, era: int = 0, **more: int) -> None:
        ours, self.agent = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.agent.settimeout(10)
        self.poller = Poller(asyncio.get_running_loop())
        self.lost: list[tuple[LossReason, str]] = []
        self.link = AgentLink(
            ours, Lane(self.poller), era, lambda loss, reason: self.lost.append((loss, reason)), **more
        )

    def say(self, kind: Kind, run: int = 0, arg: int = 0, payload: bytes = b"", fds: Sequence[int] = ()) -> int:
        """For lambdas that say two things: 0."""
        send(self.agent, encode(kind, run, arg, payload), fds)
        return 0

    def say_pipe(self, run: int, sock: int) -> None:
        read, write = os.pipe()
        self.say(Kind.SPAWNED, run, 1, INODE, fds=[sock, read])
        os.close(read)
        os.close(write)

    def heard(self) -> tuple[Kind, int]:
        message = receive(self.agent)
        assert message is not None
        return message.kind, message.run


@asynccontextmanager
async def linked(era: int = 0, **more: int) -> AsyncIterator[Linked]:
    made = Linked(era, **more)
    try:
        yield made
    finally:
        made.link.close()
        made.agent.close()
        made.poller.close()


INODE = struct.pack("<Q", 4711)


@pytest.fixture
def sockets() -> Iterator[list[int]]:
    """Six of them."""
    pairs = [socket.socketpair() for _ in range(3)]
    yield [end.fileno() for pair in pairs for end in pair]
    for pair in pairs:
        for end in pair:
            end.close()


async def test_a_run_from_spawn_to_exit(sockets: list[int]) -> None:
    async with linked() as it:
        events = Events()
        run = it.link.spawn(PAYLOAD, 0, (), events)
        assert it.heard() == (Kind.SPAWN, run)
        it.say(Kind.SPAWNED, run, 7, INODE, fds=sockets[:2])
        it.say(Kind.EXIT, run, 256, USAGE)
        it.say(Kind.KILLED, run, 3)
        await until(lambda: len(events.heard) == 2)
        assert events.heard == [("spawned", 2), ("exit", 256, 1.0, 10 * 1024)]
        assert it.lost == []


async def test_a_failed_spawn_says_where_it_failed() -> None:
    async with linked() as it:
        events = Events()
        run = it.link.spawn(PAYLOAD, 0, (), events)
        it.say(Kind.SPAWN_FAILED, run, 2, struct.pack("<I", 2))
        await until(lambda: events.heard)
        assert events.heard == [("failed", 2, 2)]


Breach = Callable[[Linked, int, list[int]], object]
BREACHES: dict[str, Breach] = {
    "exit of a run nobody started": lambda it, run, p: it.say(Kind.EXIT, run + 1, 0, USAGE),
    "exit before spawned": lambda it, run, p: it.say(Kind.EXIT, run, 0, USAGE),
    "exit without usage": lambda it, run, p: (
        it.say(Kind.SPAWNED, run, 1, INODE, fds=p[:2]),
        it.say(Kind.EXIT, run, 0, b"x"),
    ),
    "spawned twice": lambda it, run, p: (
        it.say(Kind.SPAWNED, run, 1, INODE, fds=p[:2]),
        it.say(Kind.SPAWNED, run, 1, INODE, fds=p[:2]),
    ),
    "spawned without sockets": lambda it, run, p: it.say(Kind.SPAWNED, run, 1, INODE),
    "spawned without an inode": lambda it, run, p: it.say(Kind.SPAWNED, run, 1, fds=p[:2]),
    "spawned with too many": lambda it, run, p: it.say(Kind.SPAWNED, run, 1, INODE, fds=p[:4]),
    "spawned with a pipe": lambda it, run, p: it.say_pipe(run, p[0]),
    "spawned for an unknown run": lambda it, run, p: it.say(Kind.SPAWNED, run + 1, 1, INODE, fds=p[:2]),
    "descriptors where none belong": lambda it, run, p: it.say(Kind.PONG, fds=p[:1]),
    "a failure without its step": lambda it, run, p: it.say(Kind.SPAWN_FAILED, run, 2),
    "a second hello": lambda it, run, p: it.say(Kind.HELLO, 0, 1),
    "what only a server says": lambda it, run, p: it.say(Kind.KILL, run),
    "garbage": lambda it, run, p: it.agent.send(b"garbage"),
    "a packet of 64 KiB": lambda it, run, p: it.agent.send(b"\0" * 65536),
}


@pytest.mark.parametrize("breach", BREACHES.values(), ids=BREACHES.keys())
async def test_a_breach_loses_the_slot_and_leaks_nothing(breach: Breach, sockets: list[int]) -> None:
    before = open_fds()
    async with linked() as it:
        events = Events()
        run = it.link.spawn(PAYLOAD, 0, (), events)
        breach(it, run, sockets)
        await until(lambda: it.lost)
        assert events.heard[-1] == "lost"
        assert [loss for loss, _ in it.lost] == [LossReason.broken]
        assert it.link.closed
    assert open_fds() == before


async def test_an_agent_that_dies_is_told_from_one_that_misbehaves() -> None:
    async with linked() as it:
        events = Events()
        it.link.spawn(PAYLOAD, 0, (), events)
        it.agent.close()
        await until(lambda: it.lost)
        assert it.lost[0][0] is LossReason.ended
        assert events.heard == ["lost"]


async def test_a_spawn_on_a_lost_agent_is_answered() -> None:
    async with linked() as it:
        it.link.close()
        events = Events()
        it.link.spawn(PAYLOAD, 0, (), events)
        await until(lambda: events.heard)
        assert events.heard == ["lost"]


async def test_an_agent_that_does_not_read_is_lost_and_nobody_waits_for_it() -> None:
    async with linked() as it:
        events = [Events() for _ in range(RUN_IDS - 1)]
        payload = spawn_text(["true", "x" * 60_000], {}, "/")
        for each in events:
            it.link.spawn(payload, 0, (), each)
        await until(lambda: it.lost)
        assert it.lost == [(LossReason.deaf, "the slot agent does not read")]
        assert all(each.heard == ["lost"] for each in events)


async def test_more_than_the_socket_holds_waits_for_an_agent_that_is_busy() -> None:
    before = open_fds()
    async with linked() as it:
        payload = spawn_text(["true", "x" * 50_000], {}, "/")
        null = os.open(os.devnull, os.O_RDONLY)
        runs = [it.link.spawn(payload, STDIN, [null], Events()) for _ in range(40)]
        os.close(null)
        it.agent.setblocking(False)
        heard: list[int] = []

        def read() -> bool:
            with suppress(BlockingIOError):
                packet, fds, _, _ = socket.recv_fds(it.agent, 65_536, 4)
                heard.append(decode(packet).run)
                os.close(fds[0])
            return len(heard) == len(runs)

        await until(read)
        assert heard == runs
        assert it.lost == []
    assert open_fds() == before


async def test_run_ids_are_reused_but_never_while_in_use() -> None:
    async with linked() as it:
        held = it.link.spawn(PAYLOAD, 0, (), Events())
        seen = set()
        for _ in range(3 * RUN_IDS):
            events = Events()
            run = it.link.spawn(PAYLOAD, 0, (), events)
            assert run not in (0, held)
            seen.add(run)
            it.say(Kind.SPAWN_FAILED, run, 1, struct.pack("<I", 1))
            await until(events.answered)
        assert len(seen) == RUN_IDS - 2


async def test_a_server_that_comes_back_kills_and_ignores_what_ran_before(sockets: list[int]) -> None:
    async with linked(era=1) as it:
        it.link.kill_former_runs()
        assert it.heard() == (Kind.KILL_BEFORE, RUN_IDS)
        events = Events()
        run = it.link.spawn(PAYLOAD, SCRIPT_PIPE, (), events)
        assert run > RUN_IDS
        it.say(Kind.SPAWNED, 3, 5, INODE, fds=sockets[:2])  # the former server's
        it.say(Kind.EXIT, 3, 9, USAGE)
        it.say(Kind.SPAWNED, run, 6, INODE, fds=sockets[:3])
        await until(lambda: events.heard)
        assert events.heard == [("spawned", 3)]
        assert it.lost == []


# -- the supervisor


READY = SlotReady(1, 2, None, kept=False, limits=LimitFiles(2, "/x", None))
HELLO = Hello({}, "t", "full", ["w"], [])
(READY_PACKET,), (HELLO_PACKET,) = control_protocol.encode(READY), control_protocol.encode(HELLO)


def test_a_slot_comes_with_its_agent_and_a_refused_packet_leaks_nothing() -> None:
    before = open_fds()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    agent, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link = SupervisorLink(ours)
    send(theirs, READY_PACKET, [agent.fileno()])
    ready = link.receive()
    assert isinstance(ready, SlotHandedOver)
    assert ready.ready == READY
    ready.agents[""].close()
    for packet, fds in (
        (READY_PACKET, 0),
        (READY_PACKET, 2),
        (b'{"op":"slot_ready"}', 1),
        (HELLO_PACKET, 1),
        (b"+part of one", 1),
    ):
        send(theirs, packet, [agent.fileno()] * fds)
        with pytest.raises(ProtocolError):
            link.receive()
    with pytest.raises(BlockingIOError):
        link.receive()
    theirs.close()
    assert link.receive() is None
    for sock in (link, agent, other):
        sock.close()
    assert open_fds() == before


def test_requests_wait_for_a_supervisor_that_is_busy() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.settimeout(10)
    waits = []
    link = SupervisorLink(ours, lambda: waits.append(True))
    count = 2000
    for number in range(count):
        link.reset(number, 1)
    assert waits
    read = [json.loads(theirs.recv(65536)) for _ in range(20)]
    while not link.flush():
        read.append(json.loads(theirs.recv(65536)))
    while len(read) < count:
        read.append(json.loads(theirs.recv(65536)))
    assert [request["slot"] for request in read] == list(range(count))
    link.close()
    theirs.close()


async def test_a_slot_holds_no_more_descriptors_than_its_share() -> None:
    async with linked(max_descriptors=8) as it:
        for _ in range(3):
            it.link.spawn(PAYLOAD, 0, (), Events())
        with pytest.raises(TooManyRunsError):
            it.link.spawn(PAYLOAD, 0, (), Events(), keep_free=1)
        events = Events()
        last = it.link.spawn(PAYLOAD, 0, (), events)
        with pytest.raises(TooManyRunsError):
            it.link.spawn(PAYLOAD, 0, (), Events())
        it.say(Kind.SPAWN_FAILED, last, 11, struct.pack("<I", 1))
        await until(events.answered)
        it.link.spawn(PAYLOAD, 0, (), Events())
        assert it.lost == []


@pytest.mark.parametrize(
    ("limit", "slots", "share"), [(1_048_576, 10, 1024), (4096, 10, 396), (299, 2, 85), (100, 3, 0)]
)
def test_each_slot_s_share_of_the_descriptors(limit: int, slots: int, share: int) -> None:
    assert descriptors.per_slot(limit, slots) == share
    assert (limit >= descriptors.needed(slots)) == (share >= descriptors.LEAST_PER_SLOT)
