"""HeadTail against a model, and outputs of every size."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentenv.sandbox.server import process
from agentenv.sandbox.server.poller import Lane, Poller
from agentenv.sandbox.server.process import OutputReader
from agentenv.sessions.head_tail import HeadTail, seam
from tests.waiting import until

CAP = 64


@given(cap=st.integers(2, 40), pieces=st.lists(st.binary(max_size=60), max_size=12))
def test_head_and_tail_are_the_stream_cut_in_the_middle(cap: int, pieces: list[bytes]) -> None:
    kept = HeadTail(cap)
    for piece in pieces:
        kept.feed(piece)
    stream = b"".join(pieces)
    head, tail = kept.parts()
    assert kept.total_bytes == len(stream)
    if len(stream) <= cap:
        assert (head, tail) == (stream, b"")
    else:
        assert len(head) == cap // 2
        assert len(head) + len(tail) == cap
        assert stream.startswith(head)
        assert stream.endswith(tail)


@given(cap=st.integers(2, 40), text=st.text(max_size=60), sizes=st.lists(st.integers(1, 7), min_size=1))
@settings(max_examples=300)
def test_the_cut_never_splits_a_character(cap: int, text: str, sizes: list[int]) -> None:
    kept = HeadTail(cap)
    stream = text.encode("utf-8", "surrogatepass")
    at = 0
    for size in sizes * 60:
        kept.feed(stream[at : at + size])
        at += size
    kept.feed(stream[at:])
    shown, dropped = kept.text()
    if "\ufffd" not in text and not any(0xD800 <= ord(c) < 0xE000 for c in text):
        assert "\ufffd" not in shown
        missing = seam(dropped) if dropped else ""
        assert missing in shown
        assert dropped == len(stream) - len(shown.encode()) + len(missing)


@given(st.binary(max_size=100))
def test_any_bytes_become_text(noise: bytes) -> None:
    kept = HeadTail(CAP)
    kept.feed(noise)
    shown, dropped = kept.text()
    assert (dropped > 0) == (len(noise) > CAP)
    shown.encode()


def test_memory_is_bounded_by_the_cap_however_small_the_pieces() -> None:
    kept = HeadTail(1000)
    for _ in range(5000):
        kept.feed(b"x")
    head, tail = kept.parts()
    assert len(head) + len(tail) == 1000
    assert kept.total_bytes == 5000


@pytest.mark.parametrize("cap", [-1, 0, 1])
def test_a_cap_that_cannot_hold_two_bytes_is_refused(cap: int) -> None:
    with pytest.raises(ValueError, match="at least 2"):
        HeadTail(cap)


@asynccontextmanager
async def reading(cap_bytes: int = CAP) -> AsyncIterator[tuple[OutputReader, socket.socket]]:
    poller = Poller(asyncio.get_running_loop())
    ours, theirs = socket.socketpair()
    reader = OutputReader(Lane(poller), ours.detach(), cap_bytes)
    with theirs:
        yield reader, theirs
    reader.close()
    poller.close()


async def test_what_is_there_at_the_end_is_read_without_waiting_for_more() -> None:
    async with reading() as (reader, theirs):
        reader.watch()
        theirs.send(b"hello")
        reader.finish()
        assert reader.kept.text() == ("hello", 0)
        with pytest.raises(BrokenPipeError):
            theirs.send(b"more")


async def test_all_that_the_socket_holds_is_read_at_the_end() -> None:
    async with reading(2 * 1024 * 1024) as (reader, theirs):
        theirs.setblocking(False)
        sent = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                sent += theirs.send(b"x" * 65_536)
        theirs.close()
        reader.finish()
        assert reader.kept.total_bytes == sent > 65_536
        reader.finish()


async def test_what_is_kept_is_read_at_any_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_FLOOD_BURST_BYTES", 1)
    monkeypatch.setattr(process, "_FLOOD_BYTES_PER_S", 1)
    size = 1024 * 1024
    async with reading(size) as (reader, theirs):
        reader.watch()
        await asyncio.to_thread(theirs.sendall, bytes(size))
        await until(lambda: reader.kept.total_bytes == size)


async def test_a_flood_is_throttled_and_keeps_its_head_and_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_FLOOD_BURST_BYTES", 128 * 1024)
    monkeypatch.setattr(process, "_FLOOD_BYTES_PER_S", 4 * 1024 * 1024)
    async with reading() as (reader, theirs):
        reader.watch()
        total = 64 * 65536 + 10

        def flood() -> None:
            theirs.sendall(b"first" + b"y" * (total - 10) + b"last!")
            theirs.close()

        began = time.monotonic()
        await asyncio.to_thread(flood)
        await until(lambda: reader.kept.total_bytes == total)
        # 4 MiB at 4 MiB/s, but for the burst and what the socket holds
        assert time.monotonic() - began > 0.5
        shown, dropped = reader.kept.text()
        assert shown.startswith("first")
        assert shown.endswith("last!")
        assert dropped == total - CAP
