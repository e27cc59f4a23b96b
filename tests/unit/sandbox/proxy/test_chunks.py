"""Bodies in chunks: read as h11 reads them, and never more of them at once, or with more ado, than is bounded."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.errors import InvalidArgumentsError
from agentenv.sandbox.proxy.chunks import MOST_LINES, Chunks
from agentenv.sandbox.proxy.streams import Stream

PIECES = st.sampled_from(
    (
        *(b"0", b"1", b"a", b"F", b"10", b"00", b"\r\n", b"\r", b"\n", b" ", b"\t", b";x=y", b";", b"x: y"),
        b"x",
        b"q" * 16,
    )
)
BODIES = st.lists(st.binary(min_size=1, max_size=40), max_size=20)


def read(text: bytes, cuts: list[int] | None = None) -> bytes | None:
    """The body that ``text`` holds, received in pieces cut at these places; None if it does not end."""
    chunks, buffer, found = Chunks(), bytearray(), []
    cuts = cuts or []
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        buffer += text[start:end]
        more = False
        while not (more or chunks.ended):
            data, more = chunks.take(buffer)
            found.append(data)
    return b"".join(found) if chunks.ended else None


def decoded(text: bytes, cuts: list[int]) -> bytes | None:
    """As :func:`read`; None also if it is refused."""
    try:
        return read(text, cuts)
    except InvalidArgumentsError:
        return None


def h11_decoded(text: bytes) -> bytes | None:
    """The same, as h11 reads it."""
    peer = h11.Connection(h11.SERVER)
    peer.receive_data(b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n" + text)
    found = []
    try:
        while type(event := peer.next_event()) is not h11.EndOfMessage:
            if event in (h11.NEED_DATA, h11.PAUSED):
                return None
            if isinstance(event, h11.Data):
                found.append(bytes(event.data))
    except h11.RemoteProtocolError:
        return None
    return b"".join(found)


@given(BODIES, st.data())
def test_a_body_is_read_as_h11_reads_it_wherever_it_is_cut(datas: list[bytes], draw: st.DataObject) -> None:
    text = b"".join(b"%x;e\r\n%b\r\n" % (len(data), data) for data in datas) + b"0\r\nA: b\r\n\r\n"
    cuts = sorted(draw.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    assert decoded(text, cuts) == h11_decoded(text) == b"".join(datas)


@given(st.lists(PIECES, max_size=30).map(b"".join), st.data())
def test_what_is_accepted_is_what_h11_reads_or_refuses(text: bytes, draw: st.DataObject) -> None:
    """Never another body: what follows the end would be a request that nobody judged."""
    cuts = sorted(draw.draw(st.lists(st.integers(0, len(text)), max_size=4)))
    ours, theirs = decoded(text, cuts), h11_decoded(text)
    assert ours == decoded(text, [])
    assert ours == theirs or ours is None or theirs is None


def test_what_follows_a_body_is_left() -> None:
    chunks, buffer = Chunks(), bytearray(b"1\r\nx\r\n0\r\n\r\nGET / HTTP/1.1")
    assert chunks.take(buffer) == (b"x", False)
    assert chunks.ended
    assert buffer == b"GET / HTTP/1.1"


def test_what_has_arrived_of_a_chunk_is_not_waited_with() -> None:
    chunks, buffer = Chunks(), bytearray(b"ffffff\r\nabc")
    assert chunks.take(buffer) == (b"abc", True)


def test_a_step_reads_a_number_of_lines_however_many_there_are() -> None:
    chunks, buffer = Chunks(), bytearray(b"1\r\nx\r\n" * 10_000)
    steps = 0
    while buffer:
        data, _ = chunks.take(buffer)
        assert len(data) <= MOST_LINES
        steps += 1
    assert steps >= 20_000 // MOST_LINES


@pytest.mark.parametrize(
    "text",
    [
        *(b"\r\n", b"-1\r\n", b"0x1\r\n", b"g\r\n", b"1" * 16 + b"\r\n", b"1 1\r\n", b"1\r\nxy\r\n", b"1\r\nx\r\n\r\n"),
        pytest.param(b"1;" + b"e" * 5000, id="a long extension"),
        pytest.param(b"0\r\nA: " + b"t" * 5000, id="a long trailer field"),
        pytest.param((b"1;" + b"e" * 2000 + b"\r\nx\r\n") * 20, id="many extensions"),
        pytest.param(b"0\r\n" + b"a\r\n" * 20_000, id="many trailer fields"),
    ],
)
def test_what_is_malformed_or_mostly_no_data_is_refused(text: bytes) -> None:
    with pytest.raises(InvalidArgumentsError, match="malformed"):
        read(text)


@pytest.mark.parametrize("data", [b"x", b"x" * 16, b"x" * 1000])
def test_small_chunks_with_small_extensions_are_a_body(data: bytes) -> None:
    text = b"%x;a=b\r\n%b\r\n" % (len(data), data) * 10_000 + b"0\r\n\r\n"
    assert decoded(text, []) == data * 10_000


@pytest.mark.parametrize("text", [b"1\r\nx\r\n" * 10_000, b"0\r\n" + b"a\r\n" * 10_000], ids=["chunks", "trailer"])
async def test_others_have_turns_while_a_body_is_read(text: bytes) -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as peer:
        stream, chunks = Stream(listener.accept()[0]), Chunks()
        sending = asyncio.create_task(asyncio.to_thread(_send, peer, text))
        counting = asyncio.create_task(count())
        with contextlib.suppress(InvalidArgumentsError):  # cut off, or refused
            while await stream.receive_decoded(chunks):
                pass
        counting.cancel()
        stream.close()
        await sending
    assert turns >= 10_000 // MOST_LINES


def _send(peer: socket.socket, text: bytes) -> None:
    with contextlib.suppress(OSError):
        peer.sendall(text)
        peer.shutdown(socket.SHUT_WR)
