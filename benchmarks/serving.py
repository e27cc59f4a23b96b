"""Ports of a slot that are answered here: the program in the slot, the application that answers, and their figures."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import dataclass
from typing import Final

from aiohttp import web

from agentenv.executor.session import ToolSession
from agentenv.sdk.tool_context import ToolContext
from benchmarks.measure import percentile

MUCH_BYTES: Final = 64_000_000
_PROGRAM: Final = """
import json, socket, sys, time

def connected():
    made = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made

def timed(made, path, body):
    began = time.perf_counter()
    made.sendall(b"POST %s HTTP/1.1\\r\\nHost: x\\r\\nContent-Length: %d\\r\\n\\r\\n" % (path, len(body)) + body)
    got, head = b"", b""
    while not head:
        got += made.recv(65536)
        head, _, rest = got.partition(b"\\r\\n\\r\\n") if b"\\r\\n\\r\\n" in got else (b"", b"", b"")
    fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\\r\\n")[1:])
    left = int(fields[b"content-length"]) - len(rest)
    while left:
        left -= len(made.recv(1 << 20))
    return time.perf_counter() - began

def anew(path, body):
    began = time.perf_counter()
    with connected() as made:
        timed(made, path, body)
    return time.perf_counter() - began

calls, much = int(sys.argv[2]), int(sys.argv[3])
short = b"x" * 2000
kept = connected()
for _ in range(20):
    timed(kept, b"/echo", short)
print(json.dumps({
    "kept_s": [timed(kept, b"/echo", short) for _ in range(calls)],
    "new_s": [anew(b"/echo", short) for _ in range(calls)],
    "here_s": timed(kept, b"/count", b"y" * much),
    "there_s": timed(kept, b"/much", b"%d" % much),
}))
"""


@dataclass(frozen=True)
class Answered:
    """Of one port: how long it took to open it (0: it was there), the requests on a kept connection and on new ones,
    and 64 MB to the application and from it."""

    open_ms: float
    kept_ms: float
    new_ms: float
    to_mb_s: float
    from_mb_s: float


def application() -> web.Application:
    """Echoes a request; counts the bytes of a large one; sends as many as are asked for."""

    async def echo(request: web.Request) -> web.Response:
        return web.Response(body=await request.read())

    async def count(request: web.Request) -> web.Response:
        return web.Response(text=str(sum([len(piece) async for piece in request.content.iter_any()])))

    async def much(request: web.Request) -> web.Response:
        return web.Response(body=bytes(int(await request.read())))

    app = web.Application()
    app.router.add_post("/echo", echo)
    app.router.add_post("/count", count)
    app.router.add_post("/much", much)
    return app


async def answered_in_slot(session: ToolSession, calls: int) -> Answered:
    """The application behind a port of this slot, asked by a program in it."""
    box = ToolContext(session)
    began_s = time.perf_counter()
    async with box.serve(application()) as served:
        open_ms = 1e3 * (time.perf_counter() - began_s)
        asked = await box.exec(["python3", "-c", _PROGRAM, str(served.port), str(calls), str(MUCH_BYTES)])
        if asked.exit_code != 0:
            raise RuntimeError(f"the program that asks failed: {asked}")
    return _answered(asked.stdout, open_ms)


async def answered_bare(calls: int) -> Answered:
    """The same application behind a port of this machine, asked by the same program."""
    runner = web.AppRunner(application(), access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        arguments = ("-c", _PROGRAM, str(port), str(calls), str(MUCH_BYTES))
        asking = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=asyncio.subprocess.PIPE)
        said, _ = await asking.communicate()
        if asking.returncode != 0:
            raise RuntimeError(f"the program that asks ended with {asking.returncode}")
    finally:
        await runner.cleanup()
    return _answered(said.decode(), 0.0)


def _answered(said: str, open_ms: float) -> Answered:
    found = json.loads(said)
    return Answered(
        open_ms,
        1e3 * percentile(found["kept_s"], 0.5),
        1e3 * percentile(found["new_s"], 0.5),
        MUCH_BYTES / 1e6 / found["here_s"],
        MUCH_BYTES / 1e6 / found["there_s"],
    )
