"""What a trajectory's tabs do while an action runs: what to wait for, and the notes about it for the model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, Self

from playwright.async_api import Dialog, Download, FileChooser, Frame, Page, Request, Response
from playwright.async_api import Error as PlaywrightError

from agentenv.api.web.chromium import MOST_TABS, Tabs, quietly
from agentenv.api.web.egress import REFUSED_HEADER
from agentenv.api.web.network import AllowList
from agentenv.background import TaskSet
from agentenv.errors import InvalidArgumentsError, PolicyRefusalError

_QUIET_S: Final = 0.5
_DRAWN_S: Final = 2.0
_DRAW: Final = (
    "() => new Promise(done => {"
    " requestAnimationFrame(() => requestAnimationFrame(done));"
    " setTimeout(done, 500) })"  # a tab in the background draws nothing
)
_SETTLE_S: Final = 5.0
_AWAITED: Final = ("document", "stylesheet", "script", "xhr", "fetch")
_MOST_NOTES: Final = 5
_LONGEST_TEXT: Final = 10_000
_LONGEST_NOTE: Final = 300
_STOPPED: Final = "net::ERR_ABORTED"
"""The page itself gave up a navigation, or it became a download."""


class Watch:
    """A context manager around one action on a trajectory's tabs.

    A dialog that the action opens is accepted (a prompt with its default text). Downloads and file choosers lead
    nowhere. All of it is in ``notes``, redacted and short. ``refused``: why a page the action tried to open was not
    allowed; empty if that did not happen.
    """

    def __init__(self, tabs: Tabs, page: Page, allowed: AllowList, redact: Callable[[str], str]) -> None:
        self.notes: list[str] = []
        self.refused = ""
        self._tabs = tabs
        self._page = page
        self._allowed = allowed
        self._redact = redact
        self._turned_away = tabs.turned_away
        self._pages: set[Request] = set()
        self._parts: set[Request] = set()
        self._changed = asyncio.Event()
        self._answering = TaskSet()
        self._listeners: tuple[tuple[Any, str, Callable[[Any], None]], ...] = (
            (tabs.context, "dialog", self._dialog),
            (tabs.context, "download", self._download),
            (page, "filechooser", self._file_chooser),
            (tabs.context, "page", self._tab),
            (tabs.context, "pageclose", self._tab_closed),
            (tabs.context, "request", self._began),
            (tabs.context, "response", self._answered),
            (tabs.context, "requestfinished", self._ended),
            (tabs.context, "requestfailed", self._failed),
        )

    def __enter__(self) -> Self:
        for source, event, listener in self._listeners:
            source.on(event, listener)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for source, event, listener in self._listeners:
            source.remove_listener(event, listener)
        if self._tabs.turned_away > self._turned_away:
            self._note(f"a new tab was closed at once: there are {MOST_TABS} already")

    async def settled(self, navigation_timeout_s: float) -> None:
        """Wait until the page has reacted to the action and nothing that this requested is pending: for a page that
        is opened at most ``navigation_timeout_s``, for anything else a few seconds."""
        await self._drawn()
        clock = asyncio.get_running_loop().time
        began = clock()
        while True:
            limit_s = navigation_timeout_s if self._pages else _SETTLE_S
            left_s = began + limit_s - clock()
            if left_s <= 0:
                self._note("the page is still loading")
                return
            self._changed.clear()
            pending = bool(self._pages or self._parts)
            try:
                async with asyncio.timeout(left_s if pending else min(left_s, _QUIET_S)):
                    await self._changed.wait()
            except TimeoutError:
                if pending:
                    continue
                await self._drawn()  # what a slow browser had to report comes before the answer
                if not self._changed.is_set():
                    return

    async def _drawn(self) -> None:
        """Wait until the page has run its handlers of the action, which it does before it draws the frame after the
        next: only then is it quiet because nothing happens, rather than because the browser is slow."""
        with suppress(PlaywrightError, TimeoutError):  # it is another page by now, or stuck
            async with asyncio.timeout(_DRAWN_S):
                await self._page.evaluate(_DRAW)

    def _short(self, text: str) -> str:
        return self._redact(text[:_LONGEST_TEXT])[:_LONGEST_NOTE]

    def _note(self, text: str) -> None:
        note = self._short(text)
        if len(self.notes) < _MOST_NOTES and note not in self.notes:
            self.notes.append(note)

    def _dialog(self, dialog: Dialog) -> None:
        message = f": {dialog.message}" if dialog.message else ""
        self._note(f"the page showed a dialog ({dialog.type}), which was accepted{message}")
        self._answering.start(dialog.type, quietly(dialog.accept(dialog.default_value)), "answering a dialog")

    def _download(self, download: Download) -> None:
        self._note(f"a download of {download.url} was discarded; http_fetch returns text files")

    def _file_chooser(self, _: FileChooser) -> None:
        self._note("the page opened a file chooser; files cannot be uploaded")

    def _tab(self, page: Page) -> None:
        if page is self._tabs.newest:
            self._note("the page opened a new tab, which is shown now; browser_back closes it")

    def _tab_closed(self, page: Page) -> None:
        """Its requests end without a word."""
        for pending in (self._pages, self._parts):
            pending.difference_update([request for request in pending if _page_of(request) in (page, None)])
        self._changed.set()

    def _began(self, request: Request) -> None:
        if request.resource_type in _AWAITED:
            (self._pages if _opens_page(request) else self._parts).add(request)
            self._changed.set()

    def _answered(self, response: Response) -> None:
        if _opens_page(response.request) and (refused := response.headers.get(REFUSED_HEADER)):
            self.refused = self._short(refused)

    def _ended(self, request: Request) -> None:
        self._pages.discard(request)
        self._parts.discard(request)
        self._changed.set()

    def _failed(self, request: Request) -> None:
        self._ended(request)
        if not _opens_page(request) or request.failure == _STOPPED:
            return
        try:
            self._allowed.judged(request.url)
            self._note(f"{request.url} could not be opened: {request.failure}")
        except (PolicyRefusalError, InvalidArgumentsError) as error:
            self.refused = self._short(str(error))


def _opens_page(request: Request) -> bool:
    """Whether it is for a tab's own document, rather than a part of one."""
    if not request.is_navigation_request():
        return False
    frame = _frame_of(request)
    return frame is None or frame.parent_frame is None


def _page_of(request: Request) -> Page | None:
    frame = _frame_of(request)
    return frame.page if frame else None


def _frame_of(request: Request) -> Frame | None:
    try:
        return request.frame
    except PlaywrightError:  # the first request of a new tab has no frame yet
        return None
