"""One Chromium for all trajectories: each has its own context with a few tabs, and the egress proxy as its way out."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shutil
from collections.abc import Awaitable
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from playwright.async_api import Browser, BrowserContext, Page, Playwright, async_playwright
from playwright.async_api import Error as PlaywrightError

from agentenv.api.tool_server.settings import BrowserSettings
from agentenv.api.web.egress import EgressProxy
from agentenv.api.web.network import AllowList
from agentenv.background import TaskSet
from agentenv.config import launch_environment
from agentenv.deadlines import scaled
from agentenv.errors import AcquireTimeoutError, CallLostError, SandboxUnavailableError

logger = logging.getLogger(__name__)

MOST_TABS: Final = 4
"""Tabs of one trajectory; a page that opens more has them closed at once."""
_NAMES: Final = ("chromium", "chromium-browser", "google-chrome")
FLAGS: Final = (  # a closed network must not be queried for updates, and no packet may bypass the proxy
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--force-webrtc-ip-handling-policy=disable_non_proxied_udp",
)
_START_S: Final = scaled(60.0)
_CLOSE_S: Final = scaled(10.0)
_STUCK_S: Final = scaled(2.0)
_GONE: Final = ("has been closed", "Connection closed")
_METHOD: Final = re.compile(r"^[A-Z]\w+\.\w+: ")
_ELEMENT: Final = re.compile(r"""\s*- '?(\w+(?: "(?:[^"\\]|\\.)*")?)((?: \[[^]]*\])*)""")


def chromium(settings: BrowserSettings) -> Path | None:
    """Path of the browser's executable; None if there is none."""
    if settings.executable is not None:
        return settings.executable if settings.executable.exists() else None
    found = next((path for name in _NAMES if (path := shutil.which(name))), None)
    return Path(found) if found else None


class Tabs:
    """The tabs of one trajectory, oldest first; tools act on the newest. A page opens one by a link with a target, or
    by a script when it is clicked; without a click, Chromium blocks it."""

    def __init__(self, browser: Browser, context: BrowserContext) -> None:
        self.browser = browser
        self.context = context
        self.snapshot = ""
        """The text of the last snapshot, whose refs are valid; empty when the current tab has none."""
        self.turned_away = 0
        """Number of tabs closed because there were too many."""
        self._open: list[Page] = []
        self._closing = TaskSet()
        context.on("page", self._opened)

    def __len__(self) -> int:
        return len(self._open)

    async def current(self) -> Page:
        """The newest tab; a blank one if the page closed the last. Raises: Playwright's errors."""
        return self.newest or await self.context.new_page()

    @property
    def newest(self) -> Page | None:
        """The newest tab; None when all are closed."""
        return self._open[-1] if self._open else None

    def element(self, ref: str) -> str | None:
        """Role and name that the last snapshot gives the element with this ref; None if it does not have it."""
        return described(self.snapshot, ref)

    async def answers(self) -> bool:
        """Whether the browser still serves them, whatever their pages do."""
        try:
            async with asyncio.timeout(_CLOSE_S):
                await self.context.cookies()
        except (PlaywrightError, TimeoutError):
            return False
        return True

    async def closed_if_stuck(self, page: Page) -> bool:
        """Close this tab if a script in it does not end, which no navigation could; False if it answers."""
        try:
            async with asyncio.timeout(_STUCK_S):
                await page.evaluate("1")
        except PlaywrightError:  # it is navigating
            return False
        except TimeoutError:
            self._closed(page)
            self._closing.start(page.url, quietly(page.close()), "closing a tab")
            return True
        return False

    async def aclose(self) -> None:
        """Close every tab and everything they stored. Repeatable."""
        await self._closing.wait()
        await quietly(self.context.close())

    def _opened(self, page: Page) -> None:
        if len(self._open) >= MOST_TABS:
            self.turned_away += 1
            self._closing.start(page.url, quietly(page.close()), "closing a tab")
            return
        self._open.append(page)
        self.snapshot = ""
        page.on("close", self._closed)

    def _closed(self, page: Page) -> None:
        if page in self._open:
            self._open.remove(page)
            self.snapshot = ""


def described(snapshot: str, ref: str) -> str | None:
    """Role and name of the element with this ref in a snapshot's text (``button "Buy"``); None if it is not in it."""
    mark, at = f"[ref={ref}]", -1
    while (at := snapshot.find(mark, at + 1)) >= 0:
        begin = snapshot.rfind("\n", 0, at) + 1
        found = _ELEMENT.match(snapshot, begin)
        if found and mark in found[2]:
            return found[1]
    return None


class Chromium:
    """Starts Chromium at first use, closes it at the end; an async context manager.

    When Chromium dies, its trajectories' next calls raise CallLostError (their pages are gone: infra), and the next
    one to open a page gets a new Chromium.
    """

    def __init__(self, settings: BrowserSettings, allowed: AllowList) -> None:
        self._settings = settings
        self._proxy = EgressProxy(allowed)
        self._stack = AsyncExitStack()
        self._playwright: Playwright | None = None
        self._browser: Browser | None = None
        self._starting = asyncio.Lock()
        self._open: dict[str, Tabs] = {}
        self._opening = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for trajectory in tuple(self._open):
            await self.ended(trajectory)
        await self._give_up()

    async def ended(self, trajectory: str) -> None:
        """Close the trajectory's tabs and everything they stored. Repeatable."""
        tabs = self._open.pop(trajectory, None)
        if tabs is not None:
            await tabs.aclose()

    def has(self, trajectory: str) -> bool:
        """Whether the trajectory has opened a page."""
        return trajectory in self._open

    async def tabs(self, trajectory: str) -> Tabs:
        """The trajectory's tabs, created if there are none.

        Raises: CallLostError: they are gone. AcquireTimeoutError: too many trajectories have some.
        SandboxUnavailableError: Chromium does not start.
        """
        found = self._open.get(trajectory)
        if found is not None:
            if self._lost(found):
                del self._open[trajectory]
                raise CallLostError(f"the browser page of {trajectory} is gone")
            return found
        async with self._starting:
            browser = self._browser if self._browser and self._browser.is_connected() else await self._start()
        living = sum(not self._lost(tabs) for tabs in self._open.values())
        if living + self._opening >= self._settings.max_contexts:
            raise AcquireTimeoutError(
                f"all {self._settings.max_contexts} browser contexts are in use", next_step="raise browser.max_contexts"
            )
        self._opening += 1
        try:
            self._open[trajectory] = opened = await _opened(browser)
        except Exception as error:  # Chromium is gone, or the driver between, and it was not noticed
            await self._give_up()
            raise CallLostError(f"no page could be opened for {trajectory}: {reason(error)}") from error
        finally:
            self._opening -= 1
        return opened

    async def refuse_lost(self, trajectory: str, error: PlaywrightError) -> None:
        """Raise CallLostError when Chromium died, rather than the page failing or closing itself."""
        tabs = self._open.get(trajectory)
        lost = tabs is None or self._lost(tabs) or "crashed" in error.message
        if lost or (tabs and any(word in error.message for word in _GONE) and not await tabs.answers()):
            self._open.pop(trajectory, None)
            raise CallLostError(f"the browser page of {trajectory} is lost: {reason(error)}") from error

    def _lost(self, tabs: Tabs) -> bool:
        return tabs.browser is not self._browser or not tabs.browser.is_connected()

    async def _start(self) -> Browser:
        program = chromium(self._settings)
        if program is None:
            raise SandboxUnavailableError("there is no Chromium", next_step="apt install chromium")
        if self._playwright is None:
            await self._stack.enter_async_context(self._proxy)
            self._playwright = await self._stack.enter_async_context(async_playwright())
        proxy = self._proxy
        try:
            self._browser = await self._playwright.chromium.launch(
                executable_path=program,
                args=list(FLAGS),
                ignore_default_args=["--disable-popup-blocking"],  # tabs open by a click only
                chromium_sandbox=self._settings.sandbox and os.geteuid() != 0,  # it does not start as root
                env={**launch_environment()},  # it needs none of our variables, least of all our secrets
                proxy={
                    "server": proxy.url,
                    "bypass": "<-loopback>",  # loopback goes through the proxy as well
                    "username": proxy.username,
                    "password": proxy.password,
                },
                handle_sigint=False,
                handle_sigterm=False,
                handle_sighup=False,
                timeout=_START_S * 1e3,
            )
        except Exception as error:  # Playwright's driver reports its death with a plain Exception
            await self._give_up()
            raise SandboxUnavailableError(
                f"Chromium at {program} does not start: {reason(error)}",
                next_step="check that it starts by hand; if it reports no usable sandbox, set browser.sandbox=false",
            ) from error
        return self._browser

    async def _give_up(self) -> None:
        """Discard what is left of Chromium and the driver: the next navigation starts new ones."""
        browser, self._browser, self._playwright = self._browser, None, None
        if browser is not None:
            await quietly(browser.close())
        await quietly(self._stack.aclose())


async def _opened(browser: Browser) -> Tabs:
    """A new context with a tab. If this is cancelled while Chromium creates it, it is closed as soon as it exists."""

    async def make() -> Tabs:
        context = await browser.new_context(accept_downloads=False, service_workers="block")
        tabs = Tabs(browser, context)
        try:
            await context.new_page()
        except BaseException:
            await tabs.aclose()
            raise
        return tabs

    making = asyncio.create_task(make())
    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        await asyncio.wait({making}, timeout=_CLOSE_S)
        if making.done() and not making.cancelled() and making.exception() is None:
            await making.result().aclose()
        raise


async def quietly(closing: Awaitable[Any]) -> None:
    """Close something that may already be gone, with a time limit."""
    try:
        async with asyncio.timeout(_CLOSE_S):
            await closing
    except Exception as error:
        logger.debug("closing: %r", error)


def reason(error: Exception) -> str:
    """The first line of Playwright's message, without method name and call log."""
    return _METHOD.sub("", str(error).split("\n")[0])[:300]
