"""The browser tools: a real Chromium, its pages on loopback, its way out through the proxy."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
from aiohttp import web
from playwright.async_api import Error, TimeoutError

from agentenv.api.assembly import tool_server
from agentenv.api.tool_server.core import ToolServer
from agentenv.api.web.browser import gone_to
from agentenv.wire.calls import CallResult
from agentenv.wire.toolserver import CallScope
from tests.integration.web_of_tests import Web, allowing, redirecting
from tests.unit.api.tool_server_box import ask, member
from tests.waiting import DEADLINE_S, eventually, until

PAGE = """<title>Shop</title><h1>Things</h1><a href="/cart">Cart</a><button disabled>Buy</button>
<input aria-label="Name" value="me"><p id="late"></p>
<script>document.getElementById("late").textContent = "written by script"</script>"""


@pytest.fixture
async def site() -> AsyncIterator[Web]:
    async with Web() as running:
        running.pages["/"] = PAGE
        yield running


@asynccontextmanager
async def browsing(site: Web, **fields: Any) -> AsyncIterator[ToolServer]:
    async with tool_server(allowing(site, **fields)) as server:
        yield server


async def seen(server: ToolServer, url: str, scope: CallScope | None = None) -> str:
    went = await ask(server, "browser_navigate", scope, url=url)
    assert went.fault == "none", went
    assert went.exit_code == 0, went
    return text_of(await ask(server, "browser_snapshot", scope))


def text_of(result: CallResult) -> str:
    assert isinstance(result.content, dict), result
    return str(result.content["text"])


def chromiums() -> list[int]:
    """The browsers among our own descendants (Playwright's driver is our child, they are its)."""
    parents, browsers = {}, []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            stat = (entry / "stat").read_text().rpartition(")")[2].split()
            command = (entry / "cmdline").read_bytes()
            parents[int(entry.name)] = int(stat[1])
            if b"--remote-debugging" in command and b"--type=" not in command and stat[0] != "Z":
                browsers.append(int(entry.name))
    forked = {browser for browser in browsers if parents[browser] in browsers}  # children with its command line still
    return [one for one in browsers if one not in forked and os.getpid() in _ancestors(one, parents)]


def _ancestors(process: int, parents: dict[int, int]) -> Iterator[int]:
    """Not by their numbers: those of children begin again at the bottom once the highest was given."""
    while process := parents.get(process, 0):
        yield process


async def test_a_page_is_seen_as_roles_names_and_refs(site: Web) -> None:
    async with browsing(site) as server:
        early = await ask(server, "browser_snapshot")
        went = await ask(server, "browser_navigate", url=site.url())
        text = text_of(await ask(server, "browser_snapshot"))
        part = await ask(server, "browser_snapshot", offset=2, limit=10)
        missing = await ask(server, "browser_navigate", url=site.url("/gone"))
    assert (early.fault, early.exit_code) == ("none", 1)
    assert "use browser_navigate first" in early.stderr
    assert went.content == {
        "url": site.url(),
        "status": 200,
        "title": "Shop",
        "note": "",
        "text": text,
        "total_chars": len(text),
    }
    for line in ('heading "Things" [level=1] [ref=', 'link "Cart" [ref=', "/url: /cart", 'button "Buy" [disabled]',
                 'textbox "Name" [ref=', "written by script"):  # fmt: skip
        assert line in text
    assert text_of(part) == text[2:12]
    assert isinstance(missing.content, dict)
    assert missing.content["status"] == 404
    assert chromiums() == []


async def test_each_trajectory_has_its_own_page_and_cookies_until_it_ends(site: Web) -> None:
    async def count(request: web.Request) -> web.StreamResponse:
        number = int(request.cookies.get("n", 0)) + 1
        answer = web.Response(text=f"<p>visit {number}</p>", content_type="text/html")
        answer.set_cookie("n", str(number))
        return answer

    site.pages["/count"] = count
    async with browsing(site, browser={"max_contexts": 2}) as server:
        assert "visit 1" in await seen(server, site.url("/count"), member(0))
        assert "visit 2" in await seen(server, site.url("/count"), member(0))
        assert "visit 1" in await seen(server, site.url("/count"), member(1))
        full = await ask(server, "browser_navigate", member(2), url=site.url("/count"))
        assert (full.fault, full.error) == ("infra", "acquire_timeout")
        await server.ended("g-0")
        assert "visit 1" in await seen(server, site.url("/count"), member(2))
        assert "visit 2" in await seen(server, site.url("/count"), member(1))


async def test_nothing_a_page_does_leaves_the_allow_list(site: Web) -> None:
    async with Web() as forbidden, browsing(site) as server:
        forbidden.pages["/"] = "never"
        out = forbidden.url()
        local = f"http://localhost:{site.port}/"
        tries = [
            f"fetch('{out}fetch', {{mode: 'no-cors'}})", f"new Image().src = '{out}image'",
            f"navigator.sendBeacon('{out}beacon')", f"new WebSocket('{out.replace('http', 'ws')}socket')",
            f"new EventSource('{out}events')", f"document.write('<iframe src={out}frame></iframe>')",
            f"fetch('{local}name')",
        ]  # fmt: skip
        script = ";".join(f"try {{ {each} }} catch (e) {{}}" for each in tries)
        site.pages["/evil"] = f"<title>evil</title><body><script>{script}</script>"
        site.pages["/redirect"] = redirecting(out)
        site.pages["/meta"] = f'<meta http-equiv="refresh" content="0; url={out}meta">'
        await ask(server, "browser_navigate", url=site.url("/evil"))
        redirected = await ask(server, "browser_navigate", url=site.url("/redirect"))
        await ask(server, "browser_navigate", url=site.url("/meta"))
        await ask(server, "browser_navigate", url=site.url())
        for url, fault in (
            (out, "policy"),
            (local, "policy"),
            ("file:///etc/passwd", "model"),
            ("about:blank", "model"),
        ):
            assert (await ask(server, "browser_navigate", url=url)).fault == fault
        assert "Things" in await seen(server, site.url())
        assert (redirected.fault, redirected.exit_code) == ("none", 1)  # data: it was the site that led there
        assert "not a public address" in redirected.stderr
        assert forbidden.asked == []
        assert "/name" not in site.asked
        async with tool_server(allowing(site, forbidden)) as open_server:

            async def tried_all() -> bool:  # the page does; a slow browser may drop some at one visit
                await ask(open_server, "browser_navigate", url=site.url("/evil"))
                return {"/fetch", "/image", "/beacon", "/socket", "/events"} <= set(forbidden.asked)

            await eventually(tried_all)


async def test_posts_downloads_and_sockets_pass_the_proxy(site: Web) -> None:
    async def socket(request: web.Request) -> web.StreamResponse:
        if not web.WebSocketResponse().can_prepare(request).ok:
            return web.Response(text="no socket")
        opened = web.WebSocketResponse()
        await opened.prepare(request)
        await opened.send_str("from the socket")
        async for _ in opened:
            pass
        return opened

    site.pages["/socket"] = socket
    site.pages["/post"] = lambda request: asyncio.sleep(0, web.Response(text="ok"))
    site.pages["/app"] = f"""<p id=a></p><p id=b></p><script>
        const show = (id, text) => document.getElementById(id).textContent = text;
        const socket = new WebSocket("ws://127.0.0.1:{site.port}/socket");
        socket.onmessage = (message) => show("a", message.data);
        fetch("/post", {{method: "POST", body: "x".repeat(300000)}})
            .then((answer) => answer.text()).then((text) => show("b", "post " + text));
    </script>"""
    async with browsing(site) as server:
        await ask(server, "browser_navigate", url=site.url("/app"))
        async with asyncio.timeout(DEADLINE_S):
            while "from the socket" not in (text := text_of(await ask(server, "browser_snapshot"))) or (
                "post ok" not in text
            ):
                await asyncio.sleep(0.05)
    assert max(len(body) for body in site.bodies) == 300_000


async def test_a_page_that_never_ends_loading_is_data(site: Web) -> None:
    async def hang(_: web.Request) -> web.StreamResponse:
        await asyncio.sleep(3600)
        raise AssertionError

    site.pages["/hang"] = hang
    async with browsing(site, browser={"navigation_timeout_s": 15}) as server:
        result = await ask(server, "browser_navigate", url=site.url("/hang"))
        assert (result.fault, result.exit_code) == ("none", 1)
        assert "did not load within 15 s" in result.stderr
        assert "Things" in await seen(server, site.url())


async def test_a_page_that_navigates_by_itself_does_not_break_off_what_is_asked_for(site: Web) -> None:
    site.pages["/moved"] = '<meta http-equiv="refresh" content="0; url=/new"><p>moved</p>'
    site.pages["/new"] = "<p>the new place</p>"
    async with browsing(site) as server:
        for _ in range(20):  # without a second try, one or two of them fail
            await ask(server, "browser_navigate", url=site.url("/moved"))
            assert "Things" in await seen(server, site.url())


async def test_a_navigation_broken_off_is_asked_for_again_within_its_time() -> None:
    broken = Error('Navigation to "http://a/" is interrupted by another navigation to "http://b/"')
    page = AsyncMock()
    page.goto.side_effect = [broken, broken, None]
    assert await gone_to(page, "http://a/", 5.0) is None
    assert page.goto.await_count == 3
    page.goto.side_effect = [broken, TimeoutError("Timeout 1ms exceeded.")]
    with pytest.raises(TimeoutError):
        await gone_to(page, "http://a/", 0.0)
    assert page.goto.await_args.kwargs["timeout"] == 1.0  # zero would be no limit at all
    page.goto.side_effect = [Error("net::ERR_CONNECTION_REFUSED"), None]
    with pytest.raises(Error, match="REFUSED"):
        await gone_to(page, "http://a/", 5.0)


async def test_when_chromium_dies_its_pages_are_lost_typed_and_a_new_one_starts(site: Web) -> None:
    async with browsing(site) as server:
        await seen(server, site.url(), member(0))
        (browser,) = chromiums()
        os.kill(browser, signal.SIGKILL)
        await until(lambda: chromiums() == [])
        lost = await ask(server, "browser_snapshot", member(0))
        assert (lost.fault, lost.error) == ("infra", "call_lost")
        assert "Things" in await seen(server, site.url(), member(1))
    assert chromiums() == []


async def test_when_playwrights_driver_dies_the_next_call_but_one_has_a_new_one(site: Web) -> None:
    async with browsing(site) as server:
        await seen(server, site.url(), member(0))
        (browser,) = chromiums()
        driver = int(Path(f"/proc/{browser}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(driver, signal.SIGKILL)
        await until(lambda: not Path(f"/proc/{browser}").exists())
        lost = await ask(server, "browser_snapshot", member(0))
        assert (lost.fault, lost.error) == ("infra", "call_lost")
        first = await ask(server, "browser_navigate", member(1), url=site.url())
        assert (first.fault, first.error) in (("none", None), ("infra", "call_lost"))
        assert "Things" in await seen(server, site.url(), member(2))
    assert chromiums() == []


async def test_a_browser_that_does_not_start_is_ours_and_named(site: Web, tmp_path: Path) -> None:
    program = tmp_path / "chromium"
    program.write_text("#!/bin/sh\nexit 3\n")
    program.chmod(0o755)
    async with browsing(site, browser={"executable": str(program)}) as server:
        result = await ask(server, "browser_navigate", url=site.url())
    assert (result.fault, result.error) == ("infra", "sandbox_unavailable")
    assert f"Chromium at {program} does not start" in result.message


async def test_no_more_contexts_than_allowed_however_many_ask_at_once(site: Web) -> None:
    async with browsing(site, browser={"max_contexts": 2}) as server:
        results = await asyncio.gather(*(ask(server, "browser_navigate", member(n), url=site.url()) for n in range(5)))
    assert sorted(result.fault for result in results) == ["infra", "infra", "infra", "none", "none"]


async def test_the_browser_gets_nothing_of_our_environment(site: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET_OF_OURS", "do-not-hand-on")
    async with browsing(site) as server:
        await seen(server, site.url())
        (browser,) = chromiums()
        assert b"do-not-hand-on" not in Path(f"/proc/{browser}/environ").read_bytes()


async def test_a_group_sees_the_same_pages_and_a_replay_needs_no_browser(site: Web, tmp_path: Path) -> None:
    cassettes = {"directory": str(tmp_path)}
    async with browsing(site, cassettes={**cassettes, "mode": "record"}) as server:
        texts = []
        for n in range(2):
            texts.append(await seen(server, site.url(), member(n)))
            site.pages["/"] = "<h1>Changed</h1>"
        assert texts[0] == texts[1]
        site.pages["/next"] = "<h1>Next</h1>"
        assert "Next" in await seen(server, site.url("/next"), member(1))
        assert len(chromiums()) == 1
    async with browsing(site, cassettes={**cassettes, "mode": "replay"}) as server:
        assert await seen(server, site.url(), member(5)) == texts[0]
        assert "Next" in await seen(server, site.url("/next"), member(5))
        assert (await ask(server, "browser_navigate", member(5), url=site.url())).fault == "policy"
        assert chromiums() == []
    assert [path for path in site.asked if path in ("/", "/next")] == ["/", "/", "/next"]
