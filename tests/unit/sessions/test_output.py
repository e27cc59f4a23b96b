"""Reading what sessions print: windows, markers, rolling buffers, floods."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agentenv.sessions.head_tail import HeadTail, Rolling, seam
from agentenv.sessions.output_window import MAX_MARKER_BYTES, OutputWindow
from agentenv.sessions.shell_protocol import marker_line
from agentenv.sessions.unread import Unread
from tests.unit.sessions.session_box import BoxHost
from tests.waiting import DEADLINE_S

NONCE = "0123456789abcdef"
MARKER = f"bash: /{NONCE}: No such file or directory\r\n".encode()


class Wired:
    """A tap on a pipe."""

    def __init__(self, *, terminal: bool, cap_bytes: int = 1000) -> None:
        self.host = BoxHost(Path("/"), {})
        read, self.write_fd = os.pipe()
        self.marked = 0
        self.tap = OutputWindow(self.host, read, cap_bytes, lambda: None, terminal=terminal, unread=Unread())

    def expect(self) -> None:
        self.tap.expect(NONCE, marker_line(NONCE), self._mark)

    def _mark(self) -> None:
        self.marked += 1

    def say(self, data: bytes) -> None:
        os.write(self.write_fd, data)
        self.tap.drain()

    def close(self) -> None:
        self.tap.close()
        os.close(self.write_fd)
        self.host.close()


@pytest.fixture
async def wired() -> Iterator[Callable[..., Wired]]:  # type: ignore[misc]
    made: list[Wired] = []

    def make(**more: object) -> Wired:
        made.append(Wired(**more))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for each in made:
        each.close()


async def test_a_marker_is_cut_out_wherever_the_reads_fall(wired: Callable[..., Wired]) -> None:
    chosen = random.Random(3)
    text = b"out\r\nba\r\nbash: /0 is not it, " + MARKER + b"later\r\n"
    for _ in range(300):
        tapped = wired(terminal=True)
        tapped.expect()
        rest = text
        while rest:
            count = chosen.randint(1, len(rest))
            tapped.say(rest[:count])
            rest = rest[count:]
        assert tapped.tap.take() == ("out\nba\nbash: /0 is not it, later\n", 0)
        assert tapped.marked == 1
        tapped.close()
        tapped.close = lambda: None  # type: ignore[method-assign]


async def test_no_output_passes_for_a_marker(wired: Callable[..., Wired]) -> None:
    tapped = wired(terminal=True)
    tapped.expect()
    tapped.say(MARKER.replace(b"0", b"1") + b"/" + NONCE[:-1].encode() + b": x\r\n")
    assert tapped.marked == 0
    assert "/1123456789abcdef" in tapped.tap.take()[0]


async def test_parts_of_characters_and_line_ends_wait_for_the_rest(wired: Callable[..., Wired]) -> None:
    tapped = wired(terminal=True)
    tapped.say("€".encode()[:2])
    assert tapped.tap.take() == ("", 0)
    tapped.say("€".encode()[2:] + b"\r")
    assert tapped.tap.take() == ("€", 0)
    tapped.say(b"\nx\xe2")
    assert tapped.tap.take() == ("\nx", 0)
    assert tapped.tap.take(last=True) == ("\ufffd", 0)


async def test_what_is_left_out_is_counted(wired: Callable[..., Wired]) -> None:
    tapped = wired(terminal=False, cap_bytes=100)
    tapped.say("é".encode() * 1000)
    text, dropped = tapped.tap.take()
    assert text.count(seam(dropped)) == 1
    kept = text.replace(seam(dropped), "")
    assert len(kept.encode()) + dropped == 2000
    assert set(kept) == {"é"}
    tapped.say(b"next")
    assert tapped.tap.take() == ("next", 0)


async def test_what_bash_says_of_its_missing_terminal_is_not_output(wired: Callable[..., Wired]) -> None:
    tapped = wired(terminal=False)
    tapped.say(b"bash: [12: 1 (255)] tcsetattr: Inappropriate ioctl for device\nTerminated\n")
    assert tapped.tap.take() == ("Terminated\n", 0)


async def test_a_flood_is_read_no_faster_than_is_good(wired: Callable[..., Wired]) -> None:
    tapped = wired(terminal=False)
    os.set_blocking(tapped.write_fd, False)
    loop = asyncio.get_running_loop()
    written, began_s = 0, loop.time()
    async with asyncio.timeout(DEADLINE_S):
        while written <= 1_000_000 or loop.time() < began_s + 1.0:
            try:
                written += os.write(tapped.write_fd, b"y" * 65_536)
            except BlockingIOError:
                await asyncio.sleep(0)
    assert written < 64_000_000 * (loop.time() - began_s)


def test_a_rolling_buffer_keeps_the_last_and_knows_where_everything_was() -> None:
    chosen = random.Random(5)
    everything = b"".join(f"{number:05d}\n".encode() for number in range(20_000))
    rolling = Rolling(10_000)
    rest = everything
    while rest:
        count = chosen.randint(1, 9_000)
        rolling.feed(rest[:count])
        rest = rest[count:]
        assert rolling.dropped_bytes == max(0, rolling.total_bytes - 10_000)
    for _ in range(200):
        offset, limit = chosen.randint(0, len(everything)), chosen.randint(1, 20_000)
        text, begin, end, more = rolling.read(offset, limit)
        assert begin == min(max(offset, len(everything) - 10_000), len(everything))
        assert text.encode() == everything[begin:end]
        assert end == min(begin + limit, len(everything))
        assert more == (end < len(everything))


def test_a_rolling_buffer_splits_no_character() -> None:
    rolling = Rolling(10)
    rolling.feed("ääääääää".encode() + b"x")  # 17 bytes: the cut falls inside one
    assert rolling.read(0, 4) == ("ää", 8, 12, True)
    assert rolling.read(12, 100) == ("ääx", 12, 17, False)
    empty = Rolling(10, terminal=True)
    empty.feed(b"a\r")
    empty.feed(b"\nb")
    assert empty.read(0, 10) == ("a\nb", 0, 3, False)


MIXED = "a é€𝄞\n".encode() + b"\xff\xe2\x82\xf0\x9f\xe2\x82\xac\x80\xc3(\xed\xa0\x80" + "𝄞€é".encode()


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5, 7, 1000])
@pytest.mark.parametrize("step", [1, 2, 3, 5, 1000])
def test_polls_join_to_what_a_decoder_of_the_whole_stream_says(step: int, limit: int) -> None:
    """However the stream comes and is read, also where it is no UTF-8, and where it ends inside a character."""
    for stream in (MIXED, *(MIXED[:end] for end in range(len(MIXED)))):
        rolling, polled, at = Rolling(10_000), "", 0
        for begin in [*range(0, len(stream), step), None]:
            rolling.end() if begin is None else rolling.feed(stream[begin : begin + step])
            more = True
            while more:
                text, start, end, more = rolling.read(at, limit)
                assert start == at
                assert end > at or not text
                polled, at = polled + text, end
        assert polled == stream.decode("utf-8", "replace")
        assert at == len(stream)


@pytest.mark.parametrize("offset", range(12))
def test_a_read_that_begins_inside_a_character_has_all_of_it(offset: int) -> None:
    stream = "é€𝄞ab".encode()
    rolling = Rolling(10_000)
    rolling.feed(stream)
    text, begin, end, _ = rolling.read(offset, 100)
    assert begin <= min(offset, len(stream)) < begin + 4
    assert text == stream[begin:end].decode()
    assert end == len(stream)


@pytest.mark.parametrize("stream", [b"abc\r", b"\r", b"a\r\r\n\r", b"a\r\nb"])
@pytest.mark.parametrize("step", [1, 2, 100])
def test_the_last_carriage_return_of_a_terminal_is_kept(stream: bytes, step: int) -> None:
    rolling = Rolling(10_000, terminal=True)
    for begin in range(0, len(stream), step):
        rolling.feed(stream[begin : begin + step])
    rolling.end()
    rolling.end()
    assert rolling.read_bytes(0, 100) == (stream.replace(b"\r\n", b"\n"), 0)


@pytest.mark.parametrize("cap", [0, 1])
def test_a_window_has_room_for_something(cap: int) -> None:
    with pytest.raises(ValueError, match="at least 2"):
        HeadTail(cap)


async def test_the_beginning_of_a_marker_holds_back_no_more_than_a_line(wired: Callable[..., Wired]) -> None:
    """Whatever prints one and never its end: neither memory nor work grow with what follows."""
    tapped = wired(terminal=True, cap_bytes=100_000)
    tapped.expect()
    tapped.say(b"\r\n/" + NONCE.encode())
    searched = 0
    for _ in range(300):
        tapped.say(b"x" * 4096)
        assert len(tapped.tap._held) <= MAX_MARKER_BYTES
        searched += len(tapped.tap._held)
    assert searched <= 300 * MAX_MARKER_BYTES
    tapped.say(b"\r\n" + MARKER)
    assert tapped.marked == 1
    text, dropped = tapped.tap.take()
    kept = text.replace(seam(dropped), "") if dropped else text
    assert len(kept) + dropped == len(f"\n/{NONCE}\n") + 300 * 4096


async def test_many_beginnings_of_markers_are_output(wired: Callable[..., Wired]) -> None:
    tapped = wired(terminal=True, cap_bytes=1_000_000)
    tapped.expect()
    forged = f"/{NONCE}: ".encode() * 200
    for _ in range(20):
        tapped.say(forged)
    tapped.say(b"z" * MAX_MARKER_BYTES + b"\n" + MARKER)
    assert tapped.marked == 1
    assert tapped.tap.take()[0].count(NONCE) == 20 * 200
