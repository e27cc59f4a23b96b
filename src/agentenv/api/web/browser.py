"""The browser tools: see a page as an accessibility tree, and act on its elements by the refs in it."""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Annotated, Any, Final, Literal

from playwright.async_api import Error as PlaywrightError
from playwright.async_api import Locator, Page, Response
from playwright.async_api import TimeoutError as PlaywrightTimeoutError
from pydantic import AfterValidator, Field

from agentenv.api.tool_server.settings import BrowserSettings
from agentenv.api.tool_server.tool import ExternalTool, ToolFailure, ToolRun, external_tool
from agentenv.api.web.chromium import Chromium, Tabs, quietly, reason
from agentenv.api.web.network import AllowList
from agentenv.api.web.page_watch import Watch
from agentenv.deadlines import scaled
from agentenv.errors import InvalidArgumentsError

_BROKEN_OFF: Final = "is interrupted by another navigation"  # in Playwright's message; it has no type of its own
_MOST_SNAPSHOT_CHARS: Final = 2_000_000
_SHOWN_CHARS: Final = 10_000
_LONGEST_NAME: Final = 200
_ACTION_S: Final = 5.0
_VIEW_S: Final = 10.0
_TITLE_S: Final = scaled(5.0)
_MOST_SCREENSHOTS: Final = 20
_SCREENSHOT_BYTES: Final = 128 * 1024
_QUALITIES: Final = (70, 40, 10, 1)
_REF: Final = re.compile(r"(?:@|ref=)?((?:f[0-9]{1,9})?e[0-9]{1,9})")
_HINDRANCES: Final = (  # in Playwright's message or call log → details to the model
    ("Download is starting", "it is a download, and downloads are discarded"),
    ("intercepts pointer events", "another element covers it"),
    ("element is not enabled", "it is disabled"),
    ("element is not editable", "it is read-only"),
    ("element is not visible", "it is not visible"),
    ("did not find some options", "it has no such option"),
)
_STUCK: Final = "the page was closed because a script in it does not end"
_SCROLL: Final = """(down) => {
    let box = document.elementFromPoint(innerWidth / 2, innerHeight / 2);
    const scrolls = (one) => one.scrollHeight > one.clientHeight && /auto|scroll/.test(getComputedStyle(one).overflowY);
    while (box && !scrolls(box)) box = box.parentElement;
    box = box || document.scrollingElement || document.documentElement;
    box.scrollBy({top: (down ? 0.8 : -0.8) * innerHeight, behavior: "instant"});
    return [box.scrollTop | 0, (box.scrollHeight - box.clientHeight) | 0];
}"""


def plain_ref(text: str) -> str:
    """``e5`` for ``e5``, ``@e5``, ``ref=e5`` or ``[ref=e5]``. Raises: ValueError, written for the model."""
    found = _REF.fullmatch(text.strip().removeprefix("[").removesuffix("]"))
    if found is None:
        raise ValueError("is not a ref; take one from browser_snapshot, such as e5")
    return found[1]


Ref = Annotated[
    str, AfterValidator(plain_ref), Field(max_length=40, description="The element's ref in the snapshot, such as e5.")
]
Act = Callable[[Page], Awaitable[dict[str, Any] | None]]


class BrowserTools:
    """The tools over ``chromium``, which is to be opened and closed with the server."""

    def __init__(
        self,
        settings: BrowserSettings,
        allowed: AllowList,
        unavailable: str = "",
        redact: Callable[[str], str] = lambda text: text,
        max_result_bytes: int = 256 * 1024,
    ) -> None:
        """``redact`` removes secrets from a whole snapshot before a part of it is returned. A screenshot in base64
        stays below ``max_result_bytes``."""
        self._settings = settings
        self._allowed = allowed
        self._unavailable = unavailable
        self._redact = redact
        self._screenshot_bytes = min(_SCREENSHOT_BYTES, (max_result_bytes // 4 - 512) * 3)
        self.chromium = Chromium(settings, allowed)

    def tools(self) -> tuple[ExternalTool, ...]:
        """All of them."""
        slack_s = self._settings.navigation_timeout_s + 30.0  # Chromium may have to be started first

        def made(function: Callable[..., Awaitable[Any]], **fields: Any) -> ExternalTool:
            fields = {"timeout_s": slack_s, "concurrent": 8, "unavailable": self._unavailable, **fields}
            return external_tool(function, stateful=True, **fields)

        return (
            made(self.browser_navigate, repeatable=True, same=("status",)),
            made(self.browser_snapshot, repeatable=True),
            made(self.browser_click, same=("element",)),
            made(self.browser_type, same=("element",)),
            made(self.browser_select_option, same=("element",)),
            made(self.browser_press),
            made(self.browser_scroll),
            made(self.browser_back),
            made(self.browser_screenshot, repeatable=True, per_trajectory=_MOST_SCREENSHOTS),
        )

    # -- tools -------------------------------------------------------------------------------------

    async def browser_navigate(
        self,
        url: Annotated[str, Field(min_length=1, max_length=8_192, description="Absolute http:// or https:// URL.")],
        *,
        run: ToolRun,
    ) -> dict[str, Any]:
        """Open a URL in the browser and return a snapshot of the page. Cookies and storage are kept."""
        target = str(self._allowed.judged(url))
        timeout_s = self._settings.navigation_timeout_s

        async def go(page: Page) -> dict[str, Any]:
            answer = await gone_to(page, target, timeout_s)
            return {"status": answer.status if answer else None}

        tabs = await self.chromium.tabs(run.scope.trajectory)
        return await self._acted(run, tabs, go, f"open {target}", navigates=True)

    async def browser_snapshot(
        self,
        offset: Annotated[int, Field(ge=0, description="First character to return, to continue reading.")] = 0,
        limit: Annotated[int, Field(ge=1, le=100_000, description="Maximum number of characters.")] = 20_000,
        *,
        run: ToolRun,
    ) -> dict[str, Any]:
        """Return the page as an accessibility tree: roles, names, states, links. [ref=e5] identifies an element."""
        tabs = await self._opened(run)
        async with self._explained(run, "take a snapshot"):
            page = await tabs.current()
            text = await self._snapshot(tabs, page, self._settings.navigation_timeout_s)
        more = offset + limit < len(text)
        return {
            "url": page.url,
            "title": await _title(page),
            "text": text[offset : offset + limit],
            "total_chars": len(text),
            "next_offset": offset + limit if more else None,
        }

    async def browser_click(self, ref: Ref, *, run: ToolRun) -> dict[str, Any]:
        """Click an element and return a snapshot of the page after it."""
        return await self._acted_on(run, ref, "click", lambda found: found.click(timeout=_ACTION_S * 1e3))

    async def browser_type(
        self,
        ref: Ref,
        text: Annotated[str, Field(max_length=100_000, description="The field's new text.")],
        submit: Annotated[bool, Field(description="Press Enter after typing.")] = False,
        *,
        run: ToolRun,
    ) -> dict[str, Any]:
        """Clear a field, type text into it, and return a snapshot of the page after it."""

        async def fill(found: Locator) -> None:
            await found.fill(text, timeout=_ACTION_S * 1e3)
            if submit:
                await found.press("Enter", timeout=_ACTION_S * 1e3)

        return await self._acted_on(run, ref, "type into", fill)

    async def browser_select_option(
        self,
        ref: Ref,
        values: Annotated[
            list[Annotated[str, Field(max_length=1_000)]],
            Field(max_length=100, description="Values or labels of the options; all others are deselected."),
        ],
        *,
        run: ToolRun,
    ) -> dict[str, Any]:
        """Select options of a drop-down list and return a snapshot of the page after it."""

        async def select(found: Locator) -> None:
            await found.select_option(values, timeout=_ACTION_S * 1e3)

        return await self._acted_on(run, ref, "select in", select)

    async def browser_press(
        self,
        key: Annotated[
            str,
            Field(min_length=1, max_length=60, description="Such as Enter, Tab, Escape, ArrowDown, a, Control+a."),
        ],
        *,
        run: ToolRun,
    ) -> dict[str, Any]:
        """Press a key in the focused element and return a snapshot of the page after it."""

        async def press(page: Page) -> None:
            try:
                await page.keyboard.press(key)
            except PlaywrightError as error:
                if "Unknown key" not in error.message:
                    raise
                names = "use a name such as Enter, Tab, Escape, ArrowDown, a or Control+a"
                raise InvalidArgumentsError(f"{reason(error)}", next_step=names) from error

        return await self._acted(run, await self._opened(run), press, f"press {key}")

    async def browser_scroll(self, direction: Literal["up", "down"], *, run: ToolRun) -> dict[str, Any]:
        """Scroll the page by most of a screen and return a snapshot after it. A snapshot has the whole page: scroll
        only to load more of it, or for a screenshot."""

        async def scroll(page: Page) -> dict[str, Any]:
            top, most = await page.evaluate(_SCROLL, direction == "down")
            return {"scrolled": f"{top} of {most} pixels"}

        return await self._acted(run, await self._opened(run), scroll, f"scroll {direction}")

    async def browser_back(self, *, run: ToolRun) -> dict[str, Any]:
        """Go back to the page before and return a snapshot of it. A tab that a page opened is closed instead."""
        tabs = await self._opened(run)

        async def back(_: Page) -> None:
            if not await _gone_back(tabs, self._settings.navigation_timeout_s):
                raise ToolFailure("this is the first page of the history", keep=True)

        return await self._acted(run, tabs, back, "go back", navigates=True)

    async def browser_screenshot(self, *, run: ToolRun) -> dict[str, Any]:
        """Keep a picture of the visible part of the page with the transcript. It is not shown to you: use
        browser_snapshot to see the page."""
        tabs = await self._opened(run)
        async with self._explained(run, "take a screenshot"):
            page = await tabs.current()
            for quality in _QUALITIES:
                raw = await page.screenshot(type="jpeg", quality=quality, timeout=_VIEW_S * 1e3)
                if len(raw) <= self._screenshot_bytes:
                    break
            else:
                raise ToolFailure(f"the picture is larger than {self._screenshot_bytes} bytes")
        return {
            "url": page.url,
            "title": await _title(page),
            "type": "image/jpeg",
            "size_bytes": len(raw),
            "image": base64.b64encode(raw).decode(),
        }

    # -- actions -----------------------------------------------------------------------------------

    async def _opened(self, run: ToolRun) -> Tabs:
        if not self.chromium.has(run.scope.trajectory):
            raise ToolFailure("no page is open; use browser_navigate first", keep=True)
        return await self.chromium.tabs(run.scope.trajectory)

    async def _acted_on(
        self, run: ToolRun, ref: str, verb: str, act: Callable[[Locator], Awaitable[None]]
    ) -> dict[str, Any]:
        """One action on the element with this ref. Raises: ToolFailure: it is not in the page any more."""
        tabs = await self._opened(run)
        element = tabs.element(ref)
        stale = f"the page has no element {ref} now: take a browser_snapshot and use a ref from it"
        if element is None:
            raise ToolFailure(stale, keep=True)

        async def on_element(page: Page) -> dict[str, Any]:
            found = page.locator(f"aria-ref={ref}")
            if not await _exists(found):
                raise ToolFailure(stale, keep=True)
            try:
                await act(found)
            except PlaywrightTimeoutError as error:
                if await _exists(found):
                    raise
                raise ToolFailure(stale) from error  # it went away meanwhile
            return {"element": element[:_LONGEST_NAME]}

        return await self._acted(run, tabs, on_element, f"{verb} {element[:_LONGEST_NAME]}")

    async def _acted(self, run: ToolRun, tabs: Tabs, act: Act, what: str, *, navigates: bool = False) -> dict[str, Any]:
        """Run one action, wait for what it causes, and return the page after it.

        Raises: ToolFailure: the action failed. CallLostError: Chromium did.
        """
        timeout_s = self._settings.navigation_timeout_s
        limit_s = timeout_s if navigates else _ACTION_S
        details: dict[str, Any] = {}
        async with self._explained(run, what):
            page = await tabs.current()
            with Watch(tabs, page, self._allowed, self._redact) as watch:
                try:
                    async with asyncio.timeout(2 * limit_s):  # what Playwright has no limit for
                        details = await act(page) or {}
                except (PlaywrightError, TimeoutError) as error:
                    if isinstance(error, PlaywrightError):
                        await self.chromium.refuse_lost(run.scope.trajectory, error)
                    if not watch.refused and not page.is_closed():
                        if await tabs.closed_if_stuck(page):
                            watch.notes.append(_STUCK)
                        slow = f"it did not {'load' if navigates else 'finish'} within {limit_s:g} s"
                        raise _failure(what, error, slow, watch.notes) from error
                await watch.settled(timeout_s)
            if watch.refused:
                if not await _left_refused(tabs, timeout_s):
                    await gone_to(await tabs.current(), "about:blank", timeout_s)
                if navigates:
                    raise ToolFailure(watch.refused, keep=True)
                watch.notes.append(f"a page could not be opened: {watch.refused}")
            return await self._view(run, tabs, details, watch.notes)

    @asynccontextmanager
    async def _explained(self, run: ToolRun, what: str) -> AsyncIterator[None]:
        """Raises for Playwright's errors: CallLostError if Chromium is gone, else ToolFailure."""
        try:
            yield
        except PlaywrightError as error:
            await self.chromium.refuse_lost(run.scope.trajectory, error)
            raise ToolFailure(f"cannot {what}: {reason(error)}") from error

    async def _view(self, run: ToolRun, tabs: Tabs, details: dict[str, Any], notes: list[str]) -> dict[str, Any]:
        """The page after an action: the beginning of its snapshot, details of the action, and notes."""
        page = await tabs.current()
        try:
            text = await self._snapshot(tabs, page, _VIEW_S)
        except PlaywrightError as error:
            await self.chromium.refuse_lost(run.scope.trajectory, error)
            why = _STUCK if await tabs.closed_if_stuck(page) else f"the page cannot be read now: {reason(error)}"
            text, notes = "", [*notes, why]
        if len(text) > _SHOWN_CHARS:
            notes = [*notes, f"the snapshot continues: call browser_snapshot with offset={_SHOWN_CHARS}"]
        return {
            "url": page.url,
            "title": await _title(page),
            **details,
            "note": "; ".join(notes),
            "text": text[:_SHOWN_CHARS],
            "total_chars": len(text),
        }

    async def _snapshot(self, tabs: Tabs, page: Page, timeout_s: float) -> str:
        text = await page.aria_snapshot(mode="ai", timeout=timeout_s * 1e3)
        tabs.snapshot = self._redact(text[:_MOST_SNAPSHOT_CHARS])
        return tabs.snapshot


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


async def _gone_back(tabs: Tabs, timeout_s: float) -> bool:
    """Go to the page before, which is that of an older tab if this one has none; False if there is none at all."""
    page = await tabs.current()
    session = await tabs.context.new_cdp_session(page)
    history = await session.send("Page.getNavigationHistory")
    await quietly(session.detach())
    entries, at = history["entries"], history["currentIndex"]
    if at > 0 and entries[at - 1]["url"] != "about:blank":  # what every tab begins with
        await page.go_back(wait_until="load", timeout=timeout_s * 1e3)
    elif len(tabs) > 1:
        await page.close()
    else:
        return False
    return True


async def _left_refused(tabs: Tabs, timeout_s: float) -> bool:
    """:func:`_gone_back` from a refused page, whose error page may come while the browser already goes back."""
    try:
        return await _gone_back(tabs, timeout_s)
    except PlaywrightError as error:
        if "net::ERR_" not in error.message:
            raise
        return await _gone_back(tabs, timeout_s)


async def _exists(found: Locator) -> bool:
    """Whether the element of a ref is still in its page."""
    try:
        return await found.count() > 0
    except PlaywrightError as error:
        if "Invalid frame" not in error.message:
            raise
        return False


def _failure(what: str, error: Exception, slow: str, notes: list[str]) -> ToolFailure:
    """Why an action failed, in words for the model; ``slow``: that it took too long."""
    otherwise = slow if isinstance(error, PlaywrightTimeoutError | TimeoutError) else reason(error)
    why = next((details for logged, details in _HINDRANCES if logged in str(error)), otherwise)
    return ToolFailure("; ".join([f"cannot {what}: {why}", *notes]))


async def _title(page: Page) -> str:
    try:
        async with asyncio.timeout(_TITLE_S):
            return (await page.title())[:500]
    except (PlaywrightError, TimeoutError):  # it is navigating on by itself, or a script of it does not end
        return ""
