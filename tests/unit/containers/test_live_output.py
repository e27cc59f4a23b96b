"""What a view has shown plus the rest that the result brings is the output, each byte once."""

from __future__ import annotations

import random
import re
from base64 import b64encode
from itertools import pairwise

import pytest

from agentenv.containers.live_output import Kept, Shown, as_text, kept_of
from agentenv.sessions.head_tail import HeadTail, seam
from agentenv.wire.calls import CallResult
from agentenv.wire.tools import BashReply

STREAM = ("é€𝄞\n" * 200).encode()
GARBAGE = b"\xff"


def capture(cap_bytes: int, stream: bytes = STREAM) -> HeadTail:
    made = HeadTail(cap_bytes)
    for begin in range(0, len(stream), 37):
        made.feed(stream[begin : begin + 37])
    return made


def kept(head_tail: HeadTail) -> Kept:
    return Kept(*head_tail.parts(), head_tail.total_bytes - head_tail.kept_bytes)


def printed_bytes(text: str) -> int:
    """How many bytes a shown text stands for: its marks, and its characters; U+FFFD is one byte of GARBAGE."""
    marks = re.findall(r"\n\[\.\.\. (\d+) bytes dropped \.\.\.\]\n", text)
    for mark in marks:
        text = text.replace(seam(int(mark)), "", 1)
    return sum(map(int, marks)) + sum(1 if each == "\ufffd" else len(each.encode()) for each in text)


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("seen", [0, 1, 500, len(STREAM)])
def test_nothing_is_shown_twice_or_missing(piece: int, seen: int) -> None:
    pieces: list[str] = []
    shown = Shown(pieces.append)
    for begin in range(0, seen, piece):
        shown.add(STREAM[begin : min(begin + piece, seen)], begin)
    shown.finish(Kept(STREAM))
    assert "".join(pieces) == STREAM.decode()
    assert "" not in pieces


def test_bytes_that_are_no_text_are_replaced_once() -> None:
    pieces: list[str] = []
    shown = Shown(pieces.append)
    stream = b"a\xffb\xe2\x82"
    shown.add(stream[:4], 0)
    shown.finish(Kept(stream))
    assert "".join(pieces) == stream.decode("utf-8", "replace")


def test_what_the_capture_dropped_is_said() -> None:
    head_tail = capture(200)
    for seen in (0, 50, 100):
        pieces: list[str] = []
        shown = Shown(pieces.append)
        shown.add(head_tail.read(0, seen)[1], 0)
        shown.finish(kept(head_tail))
        assert "".join(pieces) == head_tail.text()[0]


def test_a_view_that_saw_everything_live_gets_no_rest() -> None:
    pieces: list[str] = []
    shown = Shown(pieces.append)
    shown.add(STREAM, 0)
    shown.finish(kept(capture(200)))
    assert "".join(pieces) == STREAM.decode()


@pytest.mark.parametrize("seed", range(20))
def test_each_byte_is_shown_once_or_counted_once(seed: int) -> None:
    """A command that prints while a view looks at random moments, at what the capture then has; text, no text, and
    both mixed."""
    chosen = random.Random(seed)
    symbols = [each.encode() for each in "aé€𝄞"] + [GARBAGE]
    for size in (0, 1, 99, 100, 101, 102, 200, 500, 5000):
        for alphabet in (symbols, symbols[:-1], [GARBAGE]):
            stream = b"".join(chosen.choice(alphabet) for _ in range(size))
            cuts = [0, *sorted(chosen.choices(range(len(stream) + 1), k=chosen.randint(0, 9))), len(stream)]
            head_tail, pieces = HeadTail(100), list[str]()
            shown = Shown(pieces.append)
            for begin, end in pairwise(cuts):
                head_tail.feed(stream[begin:end])
                if chosen.random() < 0.7:
                    start, data = head_tail.read(shown.bytes, chosen.choice([1, 30, 1000]))
                    shown.add(data, start)
            shown.finish(kept(head_tail))
            text = "".join(pieces)
            assert printed_bytes(text) == len(stream)
            assert text.endswith(stream[-40:].decode("utf-8", "replace")[-9:])
            if alphabet is not symbols and alphabet != [GARBAGE]:
                assert "\ufffd" not in text


@pytest.mark.parametrize("begin", [0, 10, 99, 100, 2000, len(STREAM) - 100, len(STREAM), len(STREAM) + 5])
def test_a_capture_is_read_from_any_offset(begin: int) -> None:
    offset, data = capture(200).read(begin, 30)
    assert data == STREAM[offset : offset + len(data)]
    assert offset >= min(begin, len(STREAM))
    assert (not data) == (begin >= len(STREAM))


@pytest.mark.parametrize("cap_bytes", [100, 101, 10**6])
async def test_bytes_of_a_result_are_the_text_it_would_have(cap_bytes: int) -> None:
    stdout, stderr = capture(cap_bytes), capture(cap_bytes, b"0123456789abcdef\n" * 100)
    parts = (*stdout.parts(), *stderr.parts())
    out_head, out_tail, err_head, err_tail = map(len, parts)
    reply = BashReply(parts=(out_head, out_tail, err_head, err_tail))
    result = CallResult(
        id="c1",
        stdout_dropped_bytes=stdout.total_bytes - stdout.kept_bytes,
        stderr_dropped_bytes=stderr.total_bytes - stderr.kept_bytes,
        content={**reply.model_dump(mode="json"), "data": b64encode(b"".join(parts)).decode()},
    )
    text = await as_text(result)
    assert (text.stdout, text.stdout_dropped_bytes) == stdout.text()
    assert (text.stderr, text.stderr_dropped_bytes) == stderr.text()
    assert text.content is None
    assert await kept_of(result) == (kept(stdout), kept(stderr))
    assert (await kept_of(CallResult(id="c1", stdout="plain")))[0] == Kept(b"plain")
