"""A headless Chromium, driven over its DevTools protocol: enough to click, look and measure."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import signal
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

from agentenv.api.tool_server.settings import BrowserSettings
from agentenv.api.web.chromium import FLAGS, chromium
from tests.waiting import START_S

_FLAGS = (*FLAGS, "--headless", "--no-sandbox", "--remote-debugging-port=0", "--hide-scrollbars")
_PLACE = """async (selector) => {
    let before = "";
    for (;;) {
        const element = document.querySelector(selector);
        element.scrollIntoView({block: 'center', behavior: 'instant'});
        await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
        const box = element.getBoundingClientRect();
        const place = [box.x + box.width / 2, box.y + box.height / 2];
        if (element.contains(document.elementFromPoint(...place)) && String(place) === before) return place;
        before = String(place);
    }
}"""
"""Where an element is, once two looks in a row have found it there."""


def executable() -> str:
    """Where Chromium is. Raises: AssertionError naming the package."""
    found = chromium(BrowserSettings())
    assert found, "these tests need a Chromium: on Debian, apt install chromium"
    return str(found)


class Page:
    """One open page. ``problems`` collects console errors, uncaught exceptions and attempted requests."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, session_id: str) -> None:
        self._socket = socket
        self._session = session_id
        self._number = 0
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.problems: list[str] = []
        self.requests: list[str] = []

    async def listen(self) -> None:
        """Take in what the browser says, until the connection ends."""
        async for message in self._socket:
            said = message.json()
            if waiting := self._answers.pop(said.get("id"), None):
                waiting.set_result(said)
            elif said.get("method") == "Runtime.exceptionThrown":
                self.problems.append(str(said["params"]["exceptionDetails"]))
            elif said.get("method") == "Log.entryAdded" and said["params"]["entry"]["level"] in ("error", "warning"):
                self.problems.append(str(said["params"]["entry"]))
            elif said.get("method") == "Runtime.consoleAPICalled" and said["params"]["type"] in ("error", "warning"):
                self.problems.append(str(said["params"]["args"]))
            elif said.get("method") == "Network.requestWillBeSent":
                self.requests.append(said["params"]["request"]["url"])

    async def send(self, method: str, **params: Any) -> dict[str, Any]:
        """One DevTools command and its result."""
        self._number += 1
        waiting = self._answers[self._number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json(
            {"id": self._number, "method": method, "params": params, "sessionId": self._session}
        )
        answer = await asyncio.wait_for(waiting, START_S)
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    async def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = await self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def until(self, expression: str, deadline_s: float = START_S) -> None:
        """Wait until the expression is true. Raises: TimeoutError."""
        async with asyncio.timeout(deadline_s):
            while not await self.evaluate(expression):
                await asyncio.sleep(0.02)

    async def goto(self, url: str) -> None:
        """Open a page of the report's making, and wait until it says it is ready."""
        await self.send("Page.navigate", url=url)
        await self.until("document.documentElement?.dataset.ready === 'yes'")

    async def click(self, selector: str) -> None:
        """A real click, with the mouse, in the middle of the first element that fits, once it stays where it is and
        nothing covers it: a click meets what is on the screen, not in the tree."""
        where = await self.evaluate(f"({_PLACE})({selector!r})")
        for kind in ("mousePressed", "mouseReleased"):
            await self.send("Input.dispatchMouseEvent", type=kind, x=where[0], y=where[1], button="left", clickCount=1)

    async def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """Write a PNG of what is to be seen (or of the whole page)."""
        answer = await self.send("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))


@contextlib.asynccontextmanager
async def opened(*, width: int = 1280, height: int = 900, dark: bool = False) -> AsyncIterator[Page]:
    """A fresh browser with one page; nothing of it is left afterwards."""
    with tempfile.TemporaryDirectory(prefix="agentenv-chromium-", ignore_cleanup_errors=True) as profile:
        browser = await asyncio.create_subprocess_exec(
            executable(), *_FLAGS, f"--user-data-dir={profile}", "about:blank",
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            address = await _address(Path(profile) / "DevToolsActivePort", browser)
            async with aiohttp.ClientSession() as http, http.ws_connect(address, max_msg_size=0) as socket:
                page = await _attach(socket)
                listening = asyncio.create_task(page.listen())
                await _prepare(page, width, height, dark)
                yield page
                listening.cancel()
                await asyncio.gather(listening, return_exceptions=True)
        finally:
            await _end(browser)


async def _address(port_file: Path, browser: asyncio.subprocess.Process) -> str:
    async with asyncio.timeout(START_S):
        while not (port_file.exists() and len(lines := port_file.read_text().split()) == 2):
            assert browser.returncode is None, "Chromium did not start"
            await asyncio.sleep(0.05)
    return f"ws://127.0.0.1:{lines[0]}{lines[1]}"


async def _attach(socket: aiohttp.ClientWebSocketResponse) -> Page:
    await socket.send_json({"id": 0, "method": "Target.createTarget", "params": {"url": "about:blank"}})
    target = (await _answer(socket, 0))["targetId"]
    await socket.send_json(
        {"id": 0, "method": "Target.attachToTarget", "params": {"targetId": target, "flatten": True}}
    )
    return Page(socket, (await _answer(socket, 0))["sessionId"])


async def _answer(socket: aiohttp.ClientWebSocketResponse, number: int) -> dict[str, Any]:
    while (said := await socket.receive_json()).get("id") != number:
        pass
    result: dict[str, Any] = said["result"]
    return result


async def _prepare(page: Page, width: int, height: int, dark: bool) -> None:
    for domain in ("Page", "Runtime", "Log", "Network"):
        await page.send(f"{domain}.enable")
    await page.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
    theme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
    await page.send("Emulation.setEmulatedMedia", features=theme)


async def _end(browser: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(browser.pid, signal.SIGTERM)
    try:
        await asyncio.wait_for(browser.wait(), 10)
    except TimeoutError:
        os.killpg(browser.pid, signal.SIGKILL)
        await browser.wait()
