"""``browser_navigate`` and ``browser_snapshot``: one Chromium, one context with one page per trajectory."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Final, Self

from playwright.async_api import Browser, BrowserContext, Page, Playwright, Response, async_playwright
from playwright.async_api import Error as PlaywrightError
from playwright.async_api import TimeoutError as PlaywrightTimeoutError
from pydantic import Field

from agentenv.api.tool_server.settings import BrowserSettings
from agentenv.api.tool_server.tool import ExternalTool, ToolFailure, ToolRun, external_tool
from agentenv.api.web.egress import REFUSED_HEADER, EgressProxy
from agentenv.api.web.network import AllowList
from agentenv.config import launch_environment
from agentenv.errors import AcquireTimeoutError, CallLostError, PolicyRefusalError, SandboxUnavailableError

logger = logging.getLogger(__name__)

_NAMES: Final = ("chromium", "chromium-browser", "google-chrome")
_FLAGS: Final = (  # a closed network must not be queried for updates, and no packet may bypass the proxy
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--force-webrtc-ip-handling-policy=disable_non_proxied_udp",
)
_START_S: Final = 60.0
_CLOSE_S: Final = 10.0
_BROKEN_OFF: Final = "is interrupted by another navigation"  # in Playwright's message; it has no type of its own
_MOST_SNAPSHOT_CHARS: Final = 2_000_000


def chromium(settings: BrowserSettings) -> Path | None:
    """Path of the browser's executable; None if there is none."""
    if settings.executable is not None:
        return settings.executable if settings.executable.exists() else None
    found = next((path for name in _NAMES if (path := shutil.which(name))), None)
    return Path(found) if found else None


@dataclass
class _Open:
    context: BrowserContext
    page: Page


class BrowserTools:
    """Starts Chromium at first use, closes it at the end; an async context manager.

    A trajectory's page lives until :meth:`ended`. When Chromium dies, its trajectories' next calls raise
    CallLostError (their pages are gone: infra), and the next one to navigate gets a new Chromium.
    """

    def __init__(
        self,
        settings: BrowserSettings,
        allowed: AllowList,
        unavailable: str = "",
        redact: Callable[[str], str] = lambda text: text,
    ) -> None:
        """``redact`` removes secrets from a whole snapshot before a part of it is returned."""
        self._settings = settings
        self._allowed = allowed
        self._unavailable = unavailable
        self._redact = redact
        self._proxy = EgressProxy(allowed)
        self._stack = AsyncExitStack()
        self._playwright: Playwright | None = None
        self._browser: Browser | None = None
        self._starting = asyncio.Lock()
        self._open: dict[str, _Open] = {}
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
        """Close the trajectory's page and everything it stored. Repeatable."""
        opened = self._open.pop(trajectory, None)
        if opened is not None:
            await _quietly(opened.context.close())

    def tools(self) -> tuple[ExternalTool, ...]:
        """Both tools."""
        slack_s = self._settings.navigation_timeout_s + 30.0  # Chromium may have to be started first
        return tuple(
            external_tool(
                function,
                name=name,
                timeout_s=slack_s,
                concurrent=8,
                stateful=True,
                repeatable=True,
                unavailable=self._unavailable,
            )
            for name, function in (
                ("browser_navigate", self.browser_navigate),
                ("browser_snapshot", self.browser_snapshot),
            )
        )

    async def browser_navigate(
        self,
        url: Annotated[str, Field(min_length=1, max_length=8_192, description="Absolute http:// or https:// URL.")],
        *,
        run: ToolRun,
    ) -> dict[str, Any]:
        """Open a URL in the browser. Cookies and storage are kept; use browser_snapshot to see the page."""
        target = str(self._allowed.judged(url))
        page = await self._page(run.scope.trajectory)
        timeout_s = self._settings.navigation_timeout_s
        try:
            answer = await gone_to(page, target, timeout_s)
            refused = None if answer is None else answer.headers.get(REFUSED_HEADER)
            if refused:
                await gone_to(page, "about:blank", timeout_s)
        except PlaywrightTimeoutError as error:
            raise ToolFailure(f"{target} did not load within {timeout_s:g} s") from error
        except PlaywrightError as error:
            self._refuse_lost(run.scope.trajectory, error)
            raise ToolFailure(f"cannot open {target}: {_reason(error)}") from error
        if refused:
            raise PolicyRefusalError(refused)
        return {"url": page.url, "status": answer.status if answer else None, "title": await _title(page)}

    async def browser_snapshot(
        self,
        offset: Annotated[int, Field(ge=0, description="First character to return, to continue reading.")] = 0,
        limit: Annotated[int, Field(ge=1, le=100_000, description="Maximum number of characters.")] = 20_000,
        *,
        run: ToolRun,
    ) -> dict[str, Any]:
        """Return the page as an accessibility tree: roles, names, states, links. [ref=e5] identifies an element."""
        if run.scope.trajectory not in self._open:
            raise ToolFailure("no page is open; use browser_navigate first", keep=True)
        page = await self._page(run.scope.trajectory)
        try:
            text = await page.aria_snapshot(mode="ai", timeout=self._settings.navigation_timeout_s * 1e3)
        except PlaywrightError as error:
            self._refuse_lost(run.scope.trajectory, error)
            raise ToolFailure(f"cannot take a snapshot: {_reason(error)}") from error
        text = self._redact(text[:_MOST_SNAPSHOT_CHARS])
        more = offset + limit < len(text)
        return {
            "url": page.url,
            "title": await _title(page),
            "text": text[offset : offset + limit],
            "total_chars": len(text),
            "next_offset": offset + limit if more else None,
        }

    # -- Chromium ----------------------------------------------------------------------------------

    async def _page(self, trajectory: str) -> Page:
        opened = self._open.get(trajectory)
        if opened is not None:
            if opened.page.is_closed() or not self._running():
                del self._open[trajectory]
                raise CallLostError(f"the browser page of {trajectory} is gone")
            return opened.page
        async with self._starting:
            browser = self._browser if self._browser and self._browser.is_connected() else await self._start()
        living = sum(not opened.page.is_closed() for opened in self._open.values())
        if living + self._opening >= self._settings.max_contexts:
            raise AcquireTimeoutError(
                f"all {self._settings.max_contexts} browser contexts are in use", next_step="raise browser.max_contexts"
            )
        self._opening += 1
        try:
            self._open[trajectory] = opened = await _opened(browser)
        except Exception as error:  # Chromium is gone, or the driver between, and nobody had noticed
            await self._give_up()
            raise CallLostError(f"no page could be opened for {trajectory}: {_reason(error)}") from error
        finally:
            self._opening -= 1
        return opened.page

    def _running(self) -> bool:
        return self._browser is not None and self._browser.is_connected()

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
                args=list(_FLAGS),
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
                f"Chromium at {program} does not start: {_reason(error)}",
                next_step="check that it starts by hand; if it reports no usable sandbox, set browser.sandbox=false",
            ) from error
        return self._browser

    async def _give_up(self) -> None:
        """Discard what is left of Chromium and the driver: the next navigation starts new ones."""
        browser, self._browser, self._playwright = self._browser, None, None
        if browser is not None:
            await _quietly(browser.close())
        await _quietly(self._stack.aclose())

    def _refuse_lost(self, trajectory: str, error: PlaywrightError) -> None:
        """Raise CallLostError when Chromium died, rather than the page failing."""
        opened = self._open.get(trajectory)
        gone = any(word in error.message for word in ("crashed", "has been closed", "Connection closed"))
        if not self._running() or opened is None or opened.page.is_closed() or gone:
            self._open.pop(trajectory, None)
            raise CallLostError(f"the browser page of {trajectory} is gone: {_reason(error)}") from error


async def gone_to(page: Page, url: str, timeout_s: float) -> Response | None:
    """Navigate ``page`` to ``url`` and return the response once it has loaded.

    The current page may navigate by itself (a refresh, a script) and so interrupt the requested navigation, which
    is repeated until ``timeout_s`` has passed. Raises Playwright's errors for everything else.
    """
    clock = asyncio.get_running_loop().time
    deadline = clock() + timeout_s
    while True:
        left_s = max(deadline - clock(), 0.001)  # to Playwright, zero means no limit
        try:
            return await page.goto(url, wait_until="load", timeout=left_s * 1e3)
        except PlaywrightError as error:
            if _BROKEN_OFF not in error.message:
                raise


async def _opened(browser: Browser) -> _Open:
    """A new context with a page. If this is cancelled while Chromium creates it, it is closed as soon as it exists."""

    async def make() -> _Open:
        context = await browser.new_context(accept_downloads=False, service_workers="block")
        try:
            return _Open(context, await context.new_page())
        except BaseException:
            await _quietly(context.close())
            raise

    making = asyncio.create_task(make())
    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        await asyncio.wait({making}, timeout=_CLOSE_S)
        if making.done() and not making.cancelled() and making.exception() is None:
            await _quietly(making.result().context.close())
        raise


async def _title(page: Page) -> str:
    try:
        return (await page.title())[:500]
    except PlaywrightError:  # it is navigating on by itself
        return ""


async def _quietly(closing: Any) -> None:
    """Close something that may already be gone, with a time limit."""
    try:
        async with asyncio.timeout(_CLOSE_S):
            await closing
    except Exception as error:
        logger.debug("closing: %r", error)


def _reason(error: Exception) -> str:
    """The first line of Playwright's message, without method name and call log."""
    return str(error).split("\n")[0].removeprefix("Page.goto: ")[:300]
