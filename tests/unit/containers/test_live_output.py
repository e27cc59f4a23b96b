"""What a view has shown plus the rest that the result brings is the output, each byte once."""

from __future__ import annotations

from base64 import b64encode

import pytest

from agentenv.containers.live_output import Shown, stdout_of
from agentenv.sessions.head_tail import HeadTail, seam
from agentenv.wire.calls import CallResult

STREAM = ("é€𝄞\n" * 200).encode()


def kept(cap_bytes: int, stream: bytes = STREAM) -> HeadTail:
    made = HeadTail(cap_bytes)
    for begin in range(0, len(stream), 37):
        made.feed(stream[begin : begin + 37])
    return made


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("seen", [0, 1, 500, len(STREAM)])
def test_nothing_is_shown_twice_or_missing(piece: int, seen: int) -> None:
    pieces: list[str] = []
    shown = Shown(pieces.append)
    for begin in range(0, seen, piece):
        shown.add(STREAM[begin : min(begin + piece, seen)], begin)
    shown.finish(STREAM.decode(), 0)
    assert "".join(pieces) == STREAM.decode()
    assert "" not in pieces


def test_bytes_that_are_no_text_are_replaced_once() -> None:
    pieces: list[str] = []
    shown = Shown(pieces.append)
    stream = b"a\xffb\xe2\x82"
    shown.add(stream[:4], 0)
    shown.finish(stream.decode("utf-8", "replace"), 0)
    assert "".join(pieces) == stream.decode("utf-8", "replace")


def test_what_the_capture_dropped_is_said() -> None:
    head_tail = kept(200)
    text, dropped = head_tail.text()
    for seen in (0, 50):
        pieces: list[str] = []
        shown = Shown(pieces.append)
        shown.add(head_tail.read(0, seen)[1], 0)
        shown.finish(text, dropped)
        assert "".join(pieces) == text
    begin, tail = head_tail.read(150, 1000)
    assert (begin, tail) == (len(STREAM) - 100, STREAM[-100:])
    pieces = []
    shown = Shown(pieces.append)
    shown.add(STREAM[:150], 0)
    shown.add(tail[:50], begin)
    shown.finish(text, dropped)
    assert seam(begin - 150) in "".join(pieces)
    assert "".join(pieces).endswith(STREAM[-40:].decode())
    assert "".join(pieces).count("\n") < STREAM.count(b"\n")


def test_a_view_that_saw_everything_live_gets_no_rest() -> None:
    text, dropped = kept(200).text()
    pieces: list[str] = []
    shown = Shown(pieces.append)
    shown.add(STREAM, 0)
    shown.finish(text, dropped)
    assert "".join(pieces) == STREAM.decode()


@pytest.mark.parametrize("begin", [0, 10, 99, 100, 2000, len(STREAM) - 100, len(STREAM), len(STREAM) + 5])
def test_a_capture_is_read_from_any_offset(begin: int) -> None:
    offset, data = kept(200).read(begin, 30)
    assert data == STREAM[offset : offset + len(data)]
    assert offset >= min(begin, len(STREAM))
    assert (not data) == (begin >= len(STREAM))


@pytest.mark.parametrize("cap_bytes", [100, 101, 10**6])
async def test_bytes_of_a_result_are_the_text_it_would_have(cap_bytes: int) -> None:
    stream = b"0123456789abcdef\n" * 100
    head_tail = kept(cap_bytes, stream)
    text, dropped = head_tail.text()
    data = b64encode(b"".join(head_tail.parts())).decode()
    result = CallResult(id="c1", stdout_dropped_bytes=dropped, content={"data": data})
    assert await stdout_of(result) == text
    assert await stdout_of(CallResult(id="c1", stdout="plain")) == "plain"
