"""What a service does with connections of which it knows nothing yet."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from agentenv.api import serving
from agentenv.api.door import ConnectionLimits, Door, peer_of
from agentenv.api.serving import HEADER_BYTES
from agentenv.listening import listen
from tests.waiting import DEADLINE_S

GET = b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"
HEAD = b"POST / HTTP/1.1\r\nHost: here\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


async def _hello(scope: Any, receive: Any, send: Any) -> None:
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@asynccontextmanager
async def _served(per_peer: int = 100, in_all: int = 100) -> AsyncIterator[int]:
    listening = listen("127.0.0.1", 0)
    port: int = listening.getsockname()[1]
    async with serving.served_on(listening, _hello, "test", limits=ConnectionLimits(in_all, per_peer)):
        yield port


async def _answer(sent: bytes, port: int) -> bytes:
    """All that comes back until the service closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(sent)
        async with asyncio.timeout(DEADLINE_S):
            return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(HEAD + b"X: " + b"x" * HEADER_BYTES, id="one without an end"),
        pytest.param(HEAD + b"X: " + b"x" * HEADER_BYTES + b"\r\n\r\n", id="one"),
        pytest.param(HEAD + b"X: y\r\n" * (HEADER_BYTES // 5), id="many"),
        pytest.param(b"GET /" + b"x" * HEADER_BYTES, id="the address"),
        pytest.param(CHUNKED + b"1\r\nx\r\n0\r\nX: " + b"x" * HEADER_BYTES * 20, id="a trailer"),
        pytest.param(CHUNKED + b"1\r\nx\r\n0\r\n" + b"X: y\r\n" * (HEADER_BYTES // 5), id="many trailers"),
        pytest.param(CHUNKED + b"1;" + b"x" * HEADER_BYTES * 20, id="an extension of a chunk"),
        pytest.param(b"\r\n" * HEADER_BYTES, id="empty lines"),
    ],
)
async def test_headers_are_limited(sent: bytes) -> None:
    async with _served() as port:
        answer = await _answer(sent, port)
        assert answer == b"" or answer.startswith(b"HTTP/1.1 431")
        assert (await _answer(GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"), port)).endswith(b"ok")


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(HEAD, id="half of them"),
        pytest.param(GET + HEAD, id="half of the next ones"),
    ],
)
async def test_headers_are_waited_for_only_so_long(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "HEADER_S", 1.0)
    async with _served() as port:
        assert (await _answer(sent, port)).count(b"ok") == sent.count(GET)


async def test_a_body_may_be_larger_and_later_than_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "HEADER_S", 1.0)
    async with _served() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        body = b"x" * HEADER_BYTES * 4
        writer.write(HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body))
        await asyncio.sleep(1.5)
        writer.write(body)
        assert (await asyncio.wait_for(reader.read(), DEADLINE_S)).endswith(b"ok")
        writer.close()


async def test_connections_that_ask_nothing_make_room(caplog: pytest.LogCaptureFixture) -> None:
    began_s = time.monotonic()
    async with _served(per_peer=4) as port:
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET)
        assert (await asyncio.wait_for(reader.readuntil(b"ok"), DEADLINE_S)).endswith(b"ok")
        assert await asyncio.wait_for(_read(silent[0][0]), DEADLINE_S) == b""  # the oldest was closed
        for _, each in [*silent, (reader, writer)]:
            each.close()
    refusals = [record for record in caplog.records if "connections are open" in record.message]
    assert len(refusals) <= 2 + (time.monotonic() - began_s), "one a second"


async def test_connections_that_are_answered_are_kept() -> None:
    async with _served(per_peer=2) as port:
        busy = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        for _, writer in busy:
            writer.write(HEAD + b"Connection: close\r\nContent-Length: 1\r\n\r\n")
        for _ in range(3):  # both are busy once a newcomer is closed
            newcomer, other = await asyncio.open_connection("127.0.0.1", port)
            closed = await asyncio.wait_for(_read(newcomer), DEADLINE_S)
            other.close()
            assert closed == b""
        for reader, writer in busy:
            writer.write(b"x")
            assert (await asyncio.wait_for(reader.read(), DEADLINE_S)).endswith(b"ok")
            writer.close()


async def test_no_descriptors_is_logged_once_a_second_and_passes(caplog: pytest.LogCaptureFixture) -> None:
    class Full:
        """A listening socket of a process without descriptors."""

        def __init__(self, real: socket.socket) -> None:
            self.real, self.full, self.tries = real, True, 0

        def accept(self) -> Any:
            self.tries += 1
            if self.full:
                raise OSError(errno.EMFILE, "too many open files")
            return self.real.accept()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.real, name)

    listening = listen("127.0.0.1", 0)
    full: Any = Full(listening)
    made = asyncio.Event()
    make: Callable[[], asyncio.Protocol] = lambda: made.set() or asyncio.Protocol()  # type: ignore[func-returns-value]  # noqa: E731
    with caplog.at_level(logging.WARNING), Door(full, make, limits=ConnectionLimits()):
        _, writer = await asyncio.open_connection("127.0.0.1", listening.getsockname()[1])
        await asyncio.sleep(0.3)
        assert full.tries == 1
        assert "cannot be accepted" in caplog.text
        full.full = False
        await asyncio.wait_for(made.wait(), DEADLINE_S)
        writer.close()
    listening.close()


async def test_requests_that_are_none_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with _served() as port:
        for _ in range(5):
            assert (await _answer(b"no request\r\n\r\n", port)).startswith(b"HTTP/1.1 400")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("address", "peer"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
    ],
)
def test_a_peer_is_a_host(address: str, peer: str) -> None:
    assert peer_of(address) == peer


async def _read(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read()
    except ConnectionError:
        return b""
