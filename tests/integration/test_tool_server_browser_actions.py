"""Acting on pages in a real Chromium: clicks, typing, tabs, dialogs, downloads, and their recordings."""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from agentenv.agent.observations import shown
from agentenv.api.assembly import tool_server
from agentenv.api.tool_server.core import ToolServer
from agentenv.wire.calls import CallResult
from agentenv.wire.toolserver import CallScope
from tests.integration.web_of_tests import Web, allowing, redirecting
from tests.unit.api.tool_server_box import ask, lines, member
from tests.waiting import DEADLINE_S

SHOP = """<title>Shop</title><a href="/cart">Cart</a> <a href="/cart" target="_blank">Cart in a tab</a>
<form action="/found"><input name="q" aria-label="Query" value="old"><select name="size" aria-label="Size">
<option value="s">Small</option><option value="l">Large</option></select><button>Search</button></form>
<button onclick="this.textContent = 'Bought'">Buy</button>"""


@pytest.fixture
async def site() -> AsyncIterator[Web]:
    async with Web() as running:
        running.pages |= {"/": SHOP, "/cart": "<title>Cart</title><p>an apple</p>"}
        running.pages["/found"] = lambda request: asyncio.sleep(0, web.Response(text=f"found {request.query_string}"))
        yield running


@asynccontextmanager
async def browsing(site: Web, path: str = "/", **fields: Any) -> AsyncIterator[ToolServer]:
    """A server with the page open for the default trajectory."""
    async with tool_server(allowing(site, **fields)) as server:
        await done(await ask(server, "browser_navigate", url=site.url(path)))
        yield server


async def done(result: CallResult) -> dict[str, Any]:
    assert (result.fault, result.exit_code) == ("none", 0), result
    assert isinstance(result.content, dict)
    return result.content


async def act(
    server: ToolServer, tool: str, element: str = "", scope: CallScope | None = None, **given: Any
) -> CallResult:
    """A call on the element (``button "Buy"``), by its ref in a snapshot taken now."""
    if element:
        page = await done(await ask(server, "browser_snapshot", scope))
        found = re.search(rf"{re.escape(element)}.*?\[ref=(\w+)\]", str(page["text"]))
        assert found, page
        given["ref"] = found[1]
    return await ask(server, tool, scope, **given)


async def test_a_click_shows_the_page_after_it(site: Web) -> None:
    async with browsing(site) as server:
        bought = await done(await act(server, "browser_click", 'button "Buy"'))
        assert bought["element"] == 'button "Buy"'
        assert 'button "Bought"' in bought["text"]
        cart = await done(await act(server, "browser_click", 'link "Cart"'))
        assert (cart["url"], cart["title"]) == (site.url("/cart"), "Cart")
        assert "an apple" in cart["text"]
        back = await done(await ask(server, "browser_back"))
        assert back["title"] == "Shop"
        first = await ask(server, "browser_back")
        assert (first.exit_code, first.stderr) == (1, "this is the first page of the history")


async def test_a_form_is_filled_and_sent(site: Web) -> None:
    async with browsing(site) as server:
        text = str((await done(await ask(server, "browser_snapshot")))["text"])
        query, size = (re.search(rf'{name}".*?\[ref=(\w+)\]', text) for name in ("Query", "Size"))
        assert query
        assert size
        chosen = await done(await ask(server, "browser_select_option", ref="@" + size[1], values=["Large"]))
        assert 'option "Large" [selected]' in chosen["text"]
        ref = f"ref={query[1]}"
        await done(await ask(server, "browser_type", ref=ref, text="new"))
        await done(await ask(server, "browser_press", key="!"))
        found = await done(await ask(server, "browser_press", key="Enter"))
        assert found["text"].endswith("found q=new!&size=l")
        await done(await ask(server, "browser_back"))
        sent = await done(await act(server, "browser_type", 'textbox "Query"', text="at once", submit=True))
        assert "q=at once" in sent["text"]


async def test_what_cannot_be_done_is_told_with_the_next_step(site: Web) -> None:
    site.pages["/"] = (
        SHOP
        + """<button disabled>Off</button><button id=under>Under</button>
        <div style="position: fixed; inset: 0">over all</div>"""
    )
    async with tool_server(allowing(site)) as server:
        early = await ask(server, "browser_click", ref="e1")
        assert (early.exit_code, early.stderr) == (1, "no page is open; use browser_navigate first")
        await ask(server, "browser_navigate", url=site.url())
        stale = await ask(server, "browser_click", ref="e99")
        assert (stale.fault, stale.exit_code) == ("none", 1)
        assert "no element e99 now: take a browser_snapshot" in stale.stderr
        wrong = await ask(server, "browser_click", ref="button.buy")
        assert (wrong.fault, wrong.error) == ("model", "invalid_arguments")
        assert "such as e5" in wrong.message
        assert "it is disabled" in (await act(server, "browser_click", 'button "Off"')).stderr
        assert "another element covers it" in (await act(server, "browser_click", 'button "Under"')).stderr
        assert (
            "it has no such option"
            in (await act(server, "browser_select_option", 'combobox "Size"', values=["huge"])).stderr
        )
        key = await ask(server, "browser_press", key="Entr")
        assert (key.fault, key.error) == ("model", "invalid_arguments")
        assert "ArrowDown" in key.message


async def test_refs_of_a_page_that_went_away_by_itself_are_stale(site: Web) -> None:
    site.pages["/leaves"] = """<button>Stay</button><script>
        onkeydown = () => setTimeout(() => { location = "/cart" }, 1500)</script>"""
    async with browsing(site, "/leaves") as server:
        text = str((await done(await ask(server, "browser_snapshot")))["text"])
        ref = re.search(r'button "Stay" \[ref=(\w+)\]', text)
        assert ref
        await done(await ask(server, "browser_press", key="a"))
        async with asyncio.timeout(DEADLINE_S):
            while (result := await ask(server, "browser_click", ref=ref[1])).exit_code == 0:
                assert 'button "Stay"' in str(result.content) or "/cart" in site.asked
    assert "take a browser_snapshot" in result.stderr


async def test_a_new_tab_is_shown_and_back_closes_it(site: Web) -> None:
    site.pages["/flood"] = "<title>Flood</title><script>for (let n = 0; n < 9; n++) open('/cart?' + n)</script>"
    async with browsing(site, "/flood") as server:
        assert not [path for path in site.asked if path.startswith("/cart")]  # nobody clicked
        await done(await ask(server, "browser_navigate", url=site.url()))
        tab = await done(await act(server, "browser_click", "Cart in a tab"))
        assert (tab["title"], "an apple" in tab["text"]) == ("Cart", True)
        assert "browser_back closes it" in tab["note"]
        assert (await done(await ask(server, "browser_back")))["title"] == "Shop"
        for _ in range(6):
            last = await done(await act(server, "browser_click", "Cart in a tab"))
            if last["title"] == "Cart":
                await done(await ask(server, "browser_navigate", url=site.url()))
        assert "a new tab was closed at once" in last["note"]
        assert last["title"] == "Shop"


async def test_a_tab_that_closes_itself_leaves_the_one_before(site: Web) -> None:
    site.pages["/cart"] = "<button onclick='window.close()'>Done</button>"
    async with browsing(site) as server:
        await act(server, "browser_click", "Cart in a tab")
        assert (await done(await act(server, "browser_click", 'button "Done"')))["title"] == "Shop"


async def test_dialogs_downloads_and_file_choosers_lead_nowhere_and_are_told(site: Web) -> None:
    attached = {"Content-Disposition": "attachment"}
    site.pages["/file"] = lambda _: asyncio.sleep(0, web.Response(text="x" * 1_000, headers=attached))
    site.pages["/odd"] = """<button onclick="this.textContent = confirm('Really?')">Ask</button>
        <a href="/file">Get</a><input type="file" aria-label="Send">
        <button onclick="for (let n = 0; n < 8; n++) alert(n)">Nag</button>"""
    async with browsing(site, "/odd") as server:
        asked = await done(await act(server, "browser_click", 'button "Ask"'))
        assert 'button "true"' in asked["text"]
        assert asked["note"] == "the page showed a dialog (confirm), which was accepted: Really?"
        assert (
            f"a download of {site.url('/file')}"
            in (await done(await act(server, "browser_click", 'link "Get"')))["note"]
        )
        assert "files cannot be uploaded" in (await done(await act(server, "browser_click", 'button "Send"')))["note"]
        nagged = await done(await act(server, "browser_click", 'button "Nag"'))
        assert nagged["note"].count("dialog") == 5
        assert "download" in (await ask(server, "browser_navigate", url=site.url("/file"))).stderr


async def test_what_an_action_opens_passes_the_allow_list(site: Web) -> None:
    async with Web() as forbidden:
        site.pages["/out"] = f"""<title>Out</title><a href="{forbidden.url()}">Out</a>
            <a href="{forbidden.url()}" target="_blank">Tab</a><a href="/redirect">Round</a>
            <a href="https://127.0.0.1:{forbidden.port}/">Secure</a>
            <form method="post" action="{forbidden.url()}"><button>Post</button></form>"""
        site.pages["/redirect"] = redirecting(forbidden.url())
        async with browsing(site, "/out") as server:
            for element in ('link "Out"', 'link "Tab"', 'link "Round"', 'link "Secure"', 'button "Post"'):
                page = await done(await act(server, "browser_click", element))
                assert "is not a public address, and the tool server's allow list" in page["note"], element
                assert page["title"] == "Out", element
        assert forbidden.asked == []


async def test_scrolling_loads_what_waits_for_it(site: Web) -> None:
    site.pages["/long"] = """<div style="height: 3000px">top</div><p id=more></p><script>onscroll = () =>
        fetch("/cart").then(() => { more.textContent = "loaded" })</script>"""
    async with browsing(site, "/long") as server:
        page = await done(await ask(server, "browser_scroll", direction="down"))
        assert "loaded" in page["text"]
        assert re.fullmatch(r"[1-9]\d+ of \d+ pixels", page["scrolled"])
        assert (await done(await ask(server, "browser_scroll", direction="up")))["scrolled"].startswith("0 of")
        assert (await ask(server, "browser_scroll", direction="left")).fault == "model"


async def test_a_script_that_does_not_end_is_data_and_the_page_can_be_left(site: Web) -> None:
    site.pages["/busy"] = (
        """<button onclick='for (;;) {}'>Hang</button><button onclick='for (;;) alert()'>Nag</button>"""
    )
    async with browsing(site, "/busy", browser={"navigation_timeout_s": 10}) as server:
        for button in ("Hang", "Nag"):
            stuck = await act(server, "browser_click", f'button "{button}"')
            assert stuck.fault == "none"
            assert "closed because a script in it does not end" in shown("browser_click", stuck, 10_000)
            await done(await ask(server, "browser_navigate", url=site.url("/busy")))


async def test_a_screenshot_is_kept_and_the_model_is_told_so(site: Web) -> None:
    async with browsing(site, max_result_bytes=16_384) as server:
        result = await ask(server, "browser_screenshot")
        page = await done(result)
        raw = base64.b64decode(page["image"])
        assert (raw[:3], len(raw)) == (b"\xff\xd8\xff", page["size_bytes"])
        said = shown("browser_screenshot", result, 10_000)
        assert said == f"screenshot of {site.url()} saved ({len(raw)} bytes); not shown here"
        for _ in range(19):
            await done(await ask(server, "browser_screenshot"))
        assert (await ask(server, "browser_screenshot")).fault == "policy"


async def test_a_long_page_is_continued_by_a_snapshot(site: Web) -> None:
    site.pages["/long"] = "".join(f"<p>paragraph {n}</p>" for n in range(1_000))
    async with browsing(site) as server:
        page = await done(await ask(server, "browser_navigate", url=site.url("/long")))
        rest = await done(await ask(server, "browser_snapshot", offset=10_000, limit=100_000))
        assert "browser_snapshot with offset=10000" in page["note"]
        assert len(page["text"]) == 10_000
        assert page["text"] + rest["text"] == (await done(await ask(server, "browser_snapshot", limit=100_000)))["text"]


async def test_actions_are_recorded_by_all_that_came_before(site: Web, tmp_path: Path) -> None:
    cassettes = {"directory": str(tmp_path)}
    site.pages["/"] = '<button onclick="n.textContent = +n.textContent + 1">More</button><p id=n>0</p>'

    async def twice(server: ToolServer, scope: CallScope) -> list[str]:
        await ask(server, "browser_navigate", scope, url=site.url())
        return [(await done(await ask(server, "browser_click", scope, ref="@e2")))["text"] for _ in range(2)]

    async with tool_server(allowing(site, cassettes={**cassettes, "mode": "record"})) as server:
        texts = await twice(server, member(0))
        assert ['"1"' in texts[0], '"2"' in texts[1]] == [True, True], texts
        assert await twice(server, member(1)) == texts
        assert site.asked.count("/") == 1
        third = await done(await ask(server, "browser_click", member(1), ref="e2"))  # not recorded: made up for
        assert '"3"' in third["text"]
        assert site.asked.count("/") == 2
        picture = await done(await ask(server, "browser_screenshot", member(1)))
    async with tool_server(allowing(site, cassettes={**cassettes, "mode": "replay"})) as server:
        assert await twice(server, member(5)) == texts
        assert (await done(await ask(server, "browser_click", member(5), ref="e2"))) == third
        assert (await done(await ask(server, "browser_screenshot", member(5)))) == picture
        assert (await ask(server, "browser_click", member(5), ref="e2")).fault == "policy"
    assert site.asked.count("/") == 2
    assert all(line["arguments"].get("ref", "e2") == "e2" for path in tmp_path.iterdir() for line in lines(path))


async def test_a_recorded_click_that_would_now_hit_another_element_is_our_failure(site: Web, tmp_path: Path) -> None:
    cassettes = {"directory": str(tmp_path), "mode": "record"}
    site.pages["/"] = "<button>Save</button><p>text</p>"
    async with tool_server(allowing(site, cassettes=cassettes)) as server:
        for n in range(2):
            await ask(server, "browser_navigate", member(n), url=site.url())
            assert (await done(await ask(server, "browser_click", member(n), ref="e2")))["element"] == 'button "Save"'
            site.pages["/"] = "<button>Delete</button><p>text</p>"
        result = await ask(server, "browser_press", member(1), key="Enter")
    assert (result.fault, result.error) == ("infra", "infra")
    assert "delete the cassette" in result.message
