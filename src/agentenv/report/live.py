"""Serves pages of runs that still play, to this machine only."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from aiohttp import web

from agentenv.report.overview import OverviewSettings, RunView, run_view
from agentenv.report.page import render, render_overview, title_of
from agentenv.runs.records import RecordError, Source, read

LOOPBACK = "127.0.0.1"
LEAST_AGE = 10.0
"""A page is made again no sooner than so many times the time it took to make."""
SAFE = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


class LivePage:
    """A page that is made again when ``version`` gives another text; ``make`` gets it and is called in a thread."""

    def __init__(self, version: Callable[[], str], make: Callable[[str], Iterable[str]]) -> None:
        self._current = version
        self._make = make
        self._making = asyncio.Lock()
        self._version = ""
        self._page = b""
        self._made_s = self._took_s = 0.0

    async def version(self) -> str:
        """The version of what the page shows; that of the page as long as it is too early to make another."""
        if self._version and time.monotonic() - self._made_s < LEAST_AGE * self._took_s:
            return self._version
        return await asyncio.to_thread(self._current)

    async def page(self) -> bytes:
        """The page of the current version. Raises: RecordError, OSError: a file cannot be read."""
        async with self._making:
            if (version := await self.version()) != self._version:
                began_s = time.monotonic()
                self._page = await asyncio.to_thread(lambda: "".join(self._make(version)).encode())
                self._version, self._made_s = version, time.monotonic()
                self._took_s = self._made_s - began_s
            return self._page


def page_of(source: Source, title: str | None = None) -> LivePage:
    """The page of one source, whose file may be missing yet."""

    def made(version: str) -> Iterable[str]:
        runs = read(source) if source.is_directory or source.path.exists() else []
        facts = runs[0].facts() if len(runs) == 1 else None
        groups = [group for run in runs for group in run.groups]
        problems = [problem for run in runs for problem in run.problems]
        named = title or title_of(runs, source.path)
        return render(groups, title=named, run=facts, version=version, problems=problems)

    return LivePage(source.version, made)


class Pages(Protocol):
    """What is served: a page, and pages below it."""

    @property
    def main(self) -> LivePage:
        """At ``/``."""

    def run(self, label: str) -> LivePage | None:
        """At ``/run/LABEL/``."""


@dataclass(frozen=True)
class OnePage:
    """A page with none below it."""

    main: LivePage

    def run(self, label: str) -> LivePage | None:  # noqa: ARG002
        """There is none."""
        return None


class RunsPages:
    """The page about many runs, and one for each. ``sources`` finds them anew: a run that begins is added."""

    def __init__(self, sources: Callable[[], list[Source]], title: str, settings: OverviewSettings) -> None:
        self._sources = sources
        self._title = title
        self._settings = settings
        self._views: dict[Path, tuple[str, list[RunView]]] = {}
        self._pages: dict[str, LivePage] = {}
        self.main = LivePage(self._version, self._made)

    def run(self, label: str) -> LivePage | None:
        """The page of the run of this label."""
        if label not in self._pages and (source := self._named().get(label)) is not None:
            self._pages[label] = page_of(source)
        return self._pages.get(label)

    def _named(self) -> dict[str, Source]:
        """The sources by the names of their pages, which are those of their directories or files."""
        named: dict[str, Source] = {}
        for source in self._sources():
            same = sum(name.partition("~")[0] == source.name for name in named)
            named[f"{source.name}~{same + 1}" if same else source.name] = source
        return named

    def _version(self) -> str:
        return hashlib.sha256(
            "\n".join(f"{source.path} {source.version()}" for source in self._sources()).encode()
        ).hexdigest()

    def _made(self, version: str) -> Iterable[str]:
        return render_overview(
            [view for name, source in self._named().items() for view in self._of(name, source)],
            title=self._title,
            settings=self._settings,
            version=version,
        )

    def _of(self, name: str, source: Source) -> list[RunView]:
        version = source.version()
        if self._views.get(source.path, ("",))[0] != version:
            self._views[source.path] = (version, [run_view(run, self._settings, name) for run in read(source)])
        return self._views[source.path][1]


@asynccontextmanager
async def served(pages: Pages, *, port: int = 0) -> AsyncIterator[str]:
    """Serve the pages on loopback within the body; yields the address. ``port`` 0: any free one. Raises: OSError: the
    port cannot be used."""

    def found(request: web.Request) -> LivePage:
        label = request.match_info.get("label")
        if (page := pages.main if label is None else pages.run(label)) is None:
            raise web.HTTPNotFound(text=f"there is no run {label}\n", headers=SAFE)
        return page

    async def page(request: web.Request) -> web.Response:
        try:
            body = await found(request).page()
            return web.Response(body=body, content_type="text/html", charset="utf-8", headers=SAFE)
        except (RecordError, OSError) as error:
            return web.Response(text=f"{error}\n", status=500, headers=SAFE)

    async def version(request: web.Request) -> web.Response:
        return web.Response(text=await found(request).version(), headers=SAFE)

    app = web.Application(middlewares=[_for_this_machine])
    for base in ("/", "/run/{label}/"):
        app.router.add_get(base, page)
        app.router.add_get(f"{base}version", version)
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
