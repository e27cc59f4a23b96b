"""HeadTail against a model, and pipes whose writers misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import resource
import sys
import termios
import time
from collections.abc import Callable
from typing import Self

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentenv.sandbox import capture
from agentenv.sandbox.capture import MAX_ORPHANS, Orphans, PipeReader
from agentenv.sandbox.poller import Poller
from agentenv.sessions.head_tail import HeadTail, seam

CAP = 64


async def until(condition: Callable[[], bool], deadline_s: float = 10.0) -> None:
    ends = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < ends, "the condition did not come true"
        await asyncio.sleep(0.001)


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


class Pipes:
    def __init__(self) -> None:
        self.poller = Poller(asyncio.get_running_loop())
        self.orphans = Orphans(self.poller)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.orphans.close()
        self.poller.close()


async def test_what_is_in_the_pipe_at_the_end_is_read_without_waiting_for_its_end() -> None:
    async with Pipes() as pipes:
        read_end, write_end = os.pipe()
        reader = PipeReader(pipes.poller, read_end, CAP)
        reader.watch()
        os.write(write_end, b"hello")
        reader.finish(pipes.orphans)
        assert reader.kept.text() == ("hello", 0)
        assert len(pipes.orphans) == 1
        os.close(write_end)
        await until(lambda: len(pipes.orphans) == 0)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(read_end)


async def test_a_pipe_nobody_holds_any_more_is_closed_at_the_end() -> None:
    async with Pipes() as pipes:
        read_end, write_end = os.pipe()
        reader = PipeReader(pipes.poller, read_end, CAP)
        os.write(write_end, b"bye")
        os.close(write_end)
        reader.finish(pipes.orphans)
        assert reader.kept.text() == ("bye", 0)
        assert len(pipes.orphans) == 0
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(read_end)


async def test_a_writer_that_never_stops_cannot_hold_the_end_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader takes about one pipe's worth at the end, however fast it is filled again."""
    async with Pipes() as pipes:
        read_end, write_end = os.pipe()
        reader = PipeReader(pipes.poller, read_end, CAP)
        read = os.read

        def refilling(fd: int, size: int) -> bytes:
            chunk = read(fd, size)
            os.write(write_end, b"y" * len(chunk))
            return chunk

        os.write(write_end, b"y" * 65536)
        with monkeypatch.context() as patched:
            patched.setattr("os.read", refilling)
            reader.finish(pipes.orphans)
        assert 65536 <= reader.kept.total_bytes <= 2 * 65536
        os.close(write_end)


async def test_orphans_are_drained_and_the_oldest_is_closed_beyond_the_limit() -> None:
    async with Pipes() as pipes:
        ends = []
        for _ in range(MAX_ORPHANS + 1):
            read_end, write_end = os.pipe()
            os.set_blocking(read_end, False)
            os.set_blocking(write_end, False)
            pipes.orphans.add(read_end)
            ends.append(write_end)
        assert len(pipes.orphans) == MAX_ORPHANS
        with pytest.raises(BrokenPipeError):
            os.write(ends[0], b"x")
        for _ in range(40):
            await until(lambda: _written(ends[1], b"x" * 65536))
        for end in ends:
            os.close(end)
        await until(lambda: len(pipes.orphans) == 0)


def _written(fd: int, chunk: bytes) -> bool:
    try:
        return os.write(fd, chunk) > 0
    except BlockingIOError:
        return False


async def test_a_flood_is_throttled_and_keeps_its_head_and_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "_FLOOD_BURST_BYTES", 128 * 1024)
    monkeypatch.setattr(capture, "_FLOOD_BYTES_PER_S", 4 * 1024 * 1024)
    async with Pipes() as pipes:
        read_end, write_end = os.pipe()
        reader = PipeReader(pipes.poller, read_end, CAP)
        reader.watch()
        writer = os.fork()
        if writer == 0:
            block = b"y" * 65536
            os.write(write_end, b"first")
            for _ in range(64):
                os.write(write_end, block)
            os.write(write_end, b"last!")
            os._exit(0)
        os.close(write_end)
        began = time.monotonic()
        total = 64 * 65536 + 10
        await until(lambda: reader.kept.total_bytes == total)
        os.waitpid(writer, 0)
        # 4 MiB at 4 MiB/s, but for the burst and a pipe's worth
        assert time.monotonic() - began > 0.5
        shown, dropped = reader.kept.text()
        assert shown.startswith("first")
        assert shown.endswith("last!")
        assert dropped == total - CAP
        reader.close()


async def test_a_pipe_that_its_writer_enlarged_is_read_to_the_end() -> None:
    poller = Poller(asyncio.get_running_loop())
    orphans = Orphans(poller)
    read_end, write_end = os.pipe()
    fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, 1024 * 1024)
    reader = PipeReader(poller, read_end, 2 * 1024 * 1024)
    written = os.write(write_end, b"x" * 900_900)
    os.close(write_end)
    reader.finish(orphans)
    assert (written, reader.kept.total_bytes) == (900_900, 900_900)
    orphans.close()
    poller.close()


async def test_a_writer_that_goes_on_does_not_hold_the_end_up() -> None:
    poller = Poller(asyncio.get_running_loop())
    orphans = Orphans(poller)
    read_end, write_end = os.pipe()
    fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, 1024 * 1024)
    os.set_blocking(write_end, False)
    full = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            full += os.write(write_end, b"x" * 65_536)
    reader = PipeReader(poller, read_end, 1024)

    class Refilling(HeadTail):
        def feed(self, chunk: bytes) -> None:
            super().feed(chunk)
            with contextlib.suppress(BlockingIOError):
                os.write(write_end, b"y" * len(chunk))

    reader.kept = Refilling(1024)
    reader.finish(orphans)
    assert full <= reader.kept.total_bytes <= full + 65_536
    assert len(orphans) == 1, "what is written later is drained and dropped"
    orphans.close()
    os.close(write_end)
    poller.close()


async def test_orphans_are_drained_when_no_descriptor_is_left() -> None:
    poller = Poller(asyncio.get_running_loop())
    orphans = Orphans(poller)
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    orphans.add(read_end)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (write_end + 20, hard))
    taken: list[int] = []
    with contextlib.suppress(OSError):
        while True:
            taken.append(os.dup(write_end))
    try:
        for _ in range(3):
            os.write(write_end, b"x" * 4096)
            await until(lambda: _waiting(read_end) == 0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in taken:
            os.close(fd)
    assert len(orphans) == 1
    orphans.close()
    os.close(write_end)
    poller.close()


def _waiting(fd: int) -> int:
    return int.from_bytes(fcntl.ioctl(fd, termios.FIONREAD, b"\0\0\0\0"), sys.byteorder)
