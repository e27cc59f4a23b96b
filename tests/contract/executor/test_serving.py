"""Programs of a slot reach what answers here, over every way to a slot (:mod:`agentenv.sdk.serving`)."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import pytest
from aiohttp import web

from agentenv.containers.listen import ProtocolFactory
from agentenv.containers.programs import StreamedProgram
from agentenv.errors import ConfigError, ConnectionLostError, LeaseLostError, ServingEndedError
from agentenv.executor.session import ToolSession
from agentenv.executor.tool_executor import ToolExecutor
from agentenv.sdk.serving import Served
from agentenv.sdk.tool_context import ToolContext
from agentenv.wire.connections import MAX_CONNECTIONS
from tests.waiting import START_S, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

ASKS: Final = """
import sys, urllib.request
for url in sys.argv[1:]:
    with urllib.request.urlopen(url, data=b"asked", timeout=100) as answer:
        print(answer.read().decode())
"""
SENDS_AND_READS: Final = """
import hashlib, os, socket, sys, threading
program = socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=300)
piece, sent, got = os.urandom(1 << 20), hashlib.sha256(), hashlib.sha256()
def send():
    for n in range(int(sys.argv[2])):
        data = n.to_bytes(8, "little") + piece[8:]
        sent.update(data)
        program.sendall(data)
    program.shutdown(socket.SHUT_WR)
sending = threading.Thread(target=send)
sending.start()
size = 0
while data := program.recv(1 << 20):
    got.update(data)
    size += len(data)
sending.join()
print(size, sent.digest() == got.digest())
"""
MANY: Final = """
import socket, sys, threading
address = ("127.0.0.1", int(sys.argv[1]))
stuck = socket.create_connection(address, timeout=300)
stuck.sendall(b"stuck")
assert stuck.recv(1) == b"x"
answers = []
def ask(n):
    with socket.create_connection(address, timeout=300) as one:
        one.sendall(b"%05d" % n)
        one.shutdown(socket.SHUT_WR)
        answers.append(one.makefile("rb").read() == b"%05d" % n)
asking = [threading.Thread(target=ask, args=(n,)) for n in range(100)]
for one in asking: one.start()
for one in asking: one.join()
print(answers.count(True))
"""
WAITS: Final = """
import socket, sys
try:
    with socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=300) as program:
        program.sendall(b"x")
        print("connected", flush=True)
        print("end", program.recv(1))
except ConnectionError as error:
    print("end", type(error).__name__)
"""
UNTIL_REFUSED: Final = """
import socket, sys, time
for _ in range(600):
    with socket.socket() as program:
        if found := program.connect_ex(("127.0.0.1", int(sys.argv[1]))):
            break
    time.sleep(0.1)
print(found)
"""
KILL: Final = """
import os, sys
for pid in filter(str.isdecimal, os.listdir("/proc")):
    try:
        line = open(f"/proc/{pid}/cmdline", "rb").read().split(b"\\0")
    except OSError:
        continue
    if os.path.basename(line[0]).startswith(b"slotlisten") and line[1:2] == [sys.argv[1].encode()]:
        os.kill(int(pid), 9)
        print("killed")
"""


def streams(serve: object) -> ProtocolFactory:
    """Connections that ``serve(reader, writer)`` answers."""
    return lambda: asyncio.StreamReaderProtocol(asyncio.StreamReader(), serve)  # type: ignore[arg-type]


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(65536):
        writer.write(piece)
        await writer.drain()
    writer.close()


async def deaf(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(1000)


def application() -> web.Application:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(text=f"{request.path} {await request.text()}")

    app = web.Application()
    app.router.add_post("/{rest:.*}", answer)
    return app


async def python(box: ToolContext, script: str, *arguments: object) -> str:
    done = await box.exec(["python3", "-c", script, *map(str, arguments)], timeout_s=600)
    assert done.exit_code == 0, done
    return done.stdout


async def test_an_application_answers_at_both_addresses_of_the_slot(session: ToolSession) -> None:
    box = ToolContext(session)
    async with box.serve(application()) as served:
        urls = [f"{served.url}/a", f"http://[::1]:{served.port}/b"]
        assert await python(box, ASKS, *urls) == "/a asked\n/b asked\n"
        assert served.error is None
    assert await python(box, UNTIL_REFUSED, served.port) == f"{errno.ECONNREFUSED}\n"
    async with box.serve(application(), served.port) as again:  # a port of one's choice
        assert again.port == served.port
        assert await python(box, ASKS, again.url) == "/ asked\n"
        with pytest.raises(OSError, match=str(again.port)) as raised:
            async with box.serve(streams(echo), served.port):
                pass
        assert raised.value.errno == errno.EADDRINUSE


async def test_much_goes_both_ways_at_once_unchanged(session: ToolSession) -> None:
    box = ToolContext(session)
    async with box.serve(streams(echo)) as served:
        assert await python(box, SENDS_AND_READS, served.port, 64) == f"{64 << 20} True\n"


async def test_a_connection_that_nobody_reads_holds_up_no_other(session: ToolSession) -> None:
    box = ToolContext(session)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if (asked := await reader.readexactly(5)) == b"stuck":
            while True:
                writer.write(b"x" * 65536)
                await writer.drain()
        await reader.read()
        writer.write(asked)
        writer.close()

    assert MAX_CONNECTIONS < 100
    async with box.serve(streams(answer)) as served:
        assert await python(box, MANY, served.port) == "100\n"


async def test_servers_of_this_machine_are_dialled(session: ToolSession, tmp_path: Path) -> None:
    box, path = ToolContext(session), tmp_path / "socket"
    there = await asyncio.start_server(echo, "127.0.0.1", 0)
    beside = await asyncio.start_unix_server(echo, path)
    async with there, beside:
        port = there.sockets[0].getsockname()[1]
        for target in (port, f"localhost:{port}", path, str(path)):
            async with box.serve(target) as served:
                assert await python(box, SENDS_AND_READS, served.port, 1) == f"{1 << 20} True\n"
    async with box.serve(path) as served:  # where nobody listens any more
        ended = await python(box, WAITS, served.port)  # perhaps before connect() has returned
        assert ended.removeprefix("connected\n") == "end ConnectionResetError\n"
    for wrong in (0, 65536, "localhost", "localhost:x", ""):
        with pytest.raises(ConfigError, match="target"):
            async with box.serve(wrong):
                pass
    with pytest.raises(ConfigError, match="port"):
        async with box.serve(path, 65536):
            pass


@asynccontextmanager
async def waiting(box: ToolContext, served: Served) -> AsyncIterator[StreamedProgram]:
    """A program that waits for the end of its connection."""
    program = await box.start(["python3", "-c", WAITS, str(served.port)], output="stream", timeout_s=600)
    assert await program.stdout.readline() == b"connected\n"
    try:
        yield program
    finally:
        await program.close()


async def test_a_process_of_the_slot_that_kills_the_listener_ends_it(session: ToolSession) -> None:
    box = ToolContext(session)
    async with box.serve(streams(deaf)) as served:
        port = served.port
    await python(box, UNTIL_REFUSED, port)
    async with box.serve(streams(deaf), port) as served, waiting(box, served) as program:
        assert await python(box, KILL, port) == "killed\n"
        assert (await program.stdout.readline()).startswith(b"end")
        await until(lambda: served.error is not None)
        assert type(served.error) is ServingEndedError
    async with box.serve(application(), port) as served:
        assert await python(box, ASKS, served.url) == "/ asked\n"
    assert box.infra_error is None


async def test_a_slot_that_is_sealed_has_no_port(session: ToolSession) -> None:
    box = ToolContext(session)
    async with box.serve(streams(deaf)) as served:
        await box.seal()
        await until(lambda: served.error is not None)
        assert isinstance(served.error, LeaseLostError | ConnectionLostError | ServingEndedError)


async def test_a_lease_that_is_given_back_ends_it(executor: ToolExecutor) -> None:
    session = executor.open("given-back", acquire_timeout_s=START_S)
    async with session:
        box = ToolContext(session)
        await box.exec(["true"])
        async with box.serve(streams(deaf)) as served:
            await session.aclose()
            await until(lambda: served.error is not None)
            assert isinstance(served.error, LeaseLostError | ConnectionLostError)


async def test_leaving_ends_connections_and_requests(session: ToolSession) -> None:
    box, entered, cancelled = ToolContext(session), asyncio.Event(), asyncio.Event()

    async def slow(request: web.Request) -> web.Response:
        entered.set()
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return web.Response()

    app = web.Application()
    app.router.add_get("/", slow)
    asks = "import socket,sys; s = socket.create_connection(('127.0.0.1', int(sys.argv[1])), 300)\n"
    asks += "s.sendall(b'GET / HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n'); print('asked', flush=True)\n"
    asks += "try: print(s.recv(9))\nexcept ConnectionError: print('reset')"
    async with box.serve(app) as served:
        program = await box.start(["python3", "-c", asks, str(served.port)], output="stream", timeout_s=600)
        assert await program.stdout.readline() == b"asked\n"
        await until(entered.is_set)
    assert cancelled.is_set()
    assert await program.stdout.readline() in (b"b''\n", b"reset\n")
    await program.close()


async def test_nothing_listens_on_this_machine(session: ToolSession, request: pytest.FixtureRequest) -> None:
    fake = "fake" in request.node.callspec.params["executor"]  # its slots have this machine's loopback
    answered = -1
    for _ in range(1 if fake else 5):  # the port is free in the slot: here, another program may listen at that number
        async with ToolContext(session).serve(application()) as served:
            with socket.socket() as here:
                answered = here.connect_ex(("127.0.0.1", served.port))
        if answered == errno.ECONNREFUSED:
            break
    assert answered == (0 if fake else errno.ECONNREFUSED)
