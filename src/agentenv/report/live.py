"""Serves the page of a rollouts file that is still being written, to this machine only."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web

from agentenv.report.page import render
from agentenv.runs.records import RecordError, read_records

LOOPBACK = "127.0.0.1"
LEAST_AGE = 10.0
"""A page is made again no sooner than so many times the time it took to make."""
SAFE = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


class LivePage:
    """The page of ``path`` as it is now; a file that is not there yet has no groups."""

    def __init__(self, path: Path, title: str) -> None:
        self._path = path
        self._title = title
        self._making = asyncio.Lock()
        self._version = ""
        self._page = b""
        self._made_s = self._took_s = 0.0

    def version(self) -> str:
        """The version of the file; that of the page as long as it is too early to make another."""
        if self._version and time.monotonic() - self._made_s < LEAST_AGE * self._took_s:
            return self._version
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return "none"
        return f"{found.st_ino}-{found.st_mtime_ns}-{found.st_size}"

    async def page(self) -> bytes:
        """The page of the current version. Raises: RecordError, OSError: the file cannot be read."""
        async with self._making:
            if (version := self.version()) != self._version:
                began_s = time.monotonic()
                self._page = await asyncio.to_thread(self._made, version)
                self._version, self._made_s = version, time.monotonic()
                self._took_s = self._made_s - began_s
            return self._page

    def _made(self, version: str) -> bytes:
        records = read_records(self._path) if self._path.exists() else ()
        return "".join(render(records, title=self._title, version=version)).encode()


@asynccontextmanager
async def served(path: Path, *, title: str, port: int = 0) -> AsyncIterator[str]:
    """Serve the page on loopback within the body; yields its address. ``port`` 0: any free one. Raises: OSError: the
    port cannot be used."""
    live = LivePage(path, title)

    async def page(_: web.Request) -> web.Response:
        try:
            return web.Response(body=await live.page(), content_type="text/html", charset="utf-8", headers=SAFE)
        except (RecordError, OSError) as error:
            return web.Response(text=f"{error}\n", status=500, headers=SAFE)

    async def version(_: web.Request) -> web.Response:
        return web.Response(text=live.version(), headers=SAFE)

    app = web.Application(middlewares=[_for_this_machine])
    app.router.add_get("/", page)
    app.router.add_get("/version", version)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, LOOPBACK, port).start()
        yield f"http://{LOOPBACK}:{runner.addresses[0][1]}/"
    finally:
        await runner.cleanup()


@web.middleware
async def _for_this_machine(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Refuses names other than the loopback's: a web page elsewhere could have its name resolve to this address."""
    if request.url.host not in (LOOPBACK, "localhost"):
        return web.Response(text="only as 127.0.0.1 or localhost\n", status=403)
    return await handler(request)
