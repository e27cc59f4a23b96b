"""The farm's page in a real browser, over a farm of two thousand slots: it shows what there is, and only there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import pytest

from agentenv.config import ContainerSettings, PoolSettings
from agentenv.executor.session import ToolSession
from agentenv.executor.tool_executor import ToolExecutor
from agentenv.slots.backends.fake import FakeBackend
from agentenv.tools.catalog import ToolCatalog
from agentenv.wire import farm as wire
from tests.browser.chromium import Page, opened
from tests.farm_crowd import crowd
from tests.farm_service import Served, served, token

HOSTILE = "<img src=x onerror=window.harmed=1>"
RUNS = ("vision/exp7", "sweep", HOSTILE)
CONTAINERS, SLOTS = 200, 10
HARMLESS = "window.harmed === undefined && document.querySelectorAll('img').length === 0"


@dataclass(frozen=True)
class Shown:
    """A farm, and a trajectory with a hostile name that works in one of its slots."""

    farm: Served
    session: ToolSession

    def url(self, run: str = "*", scope: Any = "run") -> str:
        return f"{self.farm.url}/#token={token(run, scope)}"

    async def ask(self, run: str, count: int) -> None:
        asks = tuple(
            wire.Ask(request_id=f"ask-{number}-of-the-tests", trajectories=(f"w-{number}",)) for number in range(count)
        )
        await self.farm.farm.queue.ask(wire.AsksRequest(asks=asks), run)


@pytest.fixture
async def shown() -> AsyncIterator[Shown]:
    settings = PoolSettings(min_containers=1, max_containers=1)
    async with AsyncExitStack() as stack:
        backend = FakeBackend(ContainerSettings(slots_per_container=1))
        farm = await stack.enter_async_context(served(backend, settings))
        crowd(farm.farm, CONTAINERS, SLOTS, RUNS)
        pool = await stack.enter_async_context(farm.pool("tests"))
        executor = await stack.enter_async_context(ToolExecutor(pool, ToolCatalog.builtin()))
        yield Shown(farm, await stack.enter_async_context(executor.open(HOSTILE)))


async def text(page: Page, selector: str) -> str:
    return str(await page.evaluate(f"document.querySelector({selector!r})?.innerText ?? ''"))


async def colours(page: Page) -> dict[str, int]:
    """Pixels of the map by colour."""
    return dict(
        await page.evaluate(
            "(() => { const canvas = document.getElementById('map'), found = {};"
            " const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;"
            " for (let i = 0; i < data.length; i += 4) if (data[i + 3] === 255) {"
            "   const name = `${data[i]},${data[i + 1]},${data[i + 2]}`; found[name] = (found[name] || 0) + 1; }"
            " return found; })()"
        )
    )


async def choose_mine(page: Page) -> None:
    """Point at the slot of the fixture's trajectory."""
    await page.until("map.cells.some((cell) => cell.container.startsWith('fake'))")
    await page.evaluate("map.choose(map.cells.findIndex((cell) => cell.container.startsWith('fake')))")


@pytest.mark.parametrize("dark", [False, True])
async def test_map_and_queue_are_shown_and_nobody_else_is_asked(shown: Shown, dark: bool) -> None:
    await shown.ask("sweep", 7)
    async with opened(dark=dark) as page:
        await page.goto(shown.url())
        await page.until(f"map.cells.length === {CONTAINERS * SLOTS + 1}")
        assert await text(page, "#tile-slots b") == "1,601"
        counted = await colours(page)
        accent = "127,178,236" if dark else "31,95,168"
        quarantined = "224,112,93" if dark else "179,64,47"
        assert counted[accent] > 2 * counted[quarantined] > 0
        row = await page.evaluate("[...document.querySelectorAll('#run-rows tr')].map((row) => row.innerText)")
        (waiting,) = [one for one in row if one.startswith("sweep")]
        assert "others come first" in waiting
        assert "7" in waiting.split()
        assert "7" in await text(page, "#tile-waiting")
        assert page.problems == []
        assert {url for url in page.requests if not url.startswith(shown.farm.url + "/")} <= {"data:,"}
        assert all("token" not in url for url in page.requests[1:])


async def test_what_changes_is_drawn_while_it_happens(shown: Shown) -> None:
    async with opened() as page:
        await page.goto(shown.url())
        await page.until(f"map.cells.length === {CONTAINERS * SLOTS + 1}")
        ledger = shown.farm.farm.manager.ledger
        for slot in range(5):
            lease = ledger.lease_on("crowd-150", slot)
            assert lease is not None
            ledger.stale(lease.id, shown.farm.farm.clock())
        await page.until("containers.get('crowd-150').slots.filter((slot) => slot.state === 'resetting').length === 6")
        await page.until("document.querySelector('#tile-slots b').innerText === '1,596'")
        ledger.lose("crowd-160", "of the test", shown.farm.farm.clock())
        await page.until(f"map.cells.length === {CONTAINERS * SLOTS + 1 - SLOTS}")
        assert page.problems == []


async def test_hostile_names_and_output_stay_text(shown: Shown) -> None:
    async with opened() as page:
        await page.goto(shown.url())
        await choose_mine(page)
        assert HOSTILE in await text(page, "#slot-said")
        assert HOSTILE in await text(page, "#runs")
        await page.click("#slot-tail")
        await page.until("document.getElementById('tail').open")
        assert await text(page, "#tail-title") == HOSTILE
        await shown.session.call("bash", {"command": f"echo '{HOSTILE}'; printf '\\033[31mred\\033[0m\\n'"})
        await page.until("document.getElementById('tail-text').textContent.includes('red')")
        said = await text(page, "#tail-text")
        assert HOSTILE in said
        assert "\x1b" not in said
        assert await page.evaluate(HARMLESS)
        assert page.problems == []


async def test_the_tail_shows_a_command_while_it_runs(shown: Shown) -> None:
    async with opened() as page:
        await page.goto(shown.url())
        await choose_mine(page)
        await page.evaluate("document.getElementById('map').focus()")
        for kind in ("keyDown", "keyUp"):
            await page.send("Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", windowsVirtualKeyCode=13)
        await page.until("document.getElementById('tail').open")
        running = asyncio.create_task(shown.session.call("bash", {"command": "echo started; sleep 60"}))
        await page.until("document.getElementById('tail-text').textContent.includes('started\\n')")
        assert not running.done()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await page.until("document.getElementById('tail-text').textContent.includes('cancelled')")
        await page.click("#tail-close")
        assert await page.evaluate("document.activeElement.id") == "map"
        assert page.problems == []


async def test_a_token_of_one_run_shows_that_run_and_of_others_that_there_are_some(shown: Shown) -> None:
    async with opened() as page:
        await page.goto(shown.url("sweep", "read"))
        await page.until(f"map.cells.length === {CONTAINERS * SLOTS + 1}")
        await page.until("document.querySelectorAll('#run-rows tr').length === 2")
        shown_text = await page.evaluate("document.body.innerText")
        assert "3 other runs" in shown_text
        assert "vision" not in shown_text
        assert "another run's" in await text(page, "#legend")
        await choose_mine(page)
        assert "another run" in await text(page, "#slot-said")
        assert await page.evaluate("document.getElementById('slot-tail').hidden")


async def test_it_goes_to_the_service_that_leads_with_its_token(shown: Shown) -> None:
    settings = PoolSettings(min_containers=1, max_containers=1)
    async with served(FakeBackend(ContainerSettings(slots_per_container=1)), settings) as former, opened() as page:
        await page.goto(f"{former.url}/#token={token('*', 'look')}")
        await page.until("map.cells.length === 1")
        former.farm.leads, former.farm.leader_url = False, shown.farm.url
        await page.goto(f"{former.url}/")  # again, as after its connection was lost
        await page.until(f"location.origin === {shown.farm.url!r}")
        await page.until(f"map.cells.length === {CONTAINERS * SLOTS + 1}")
        assert await page.evaluate("location.hash") == ""
        await choose_mine(page)
        assert not await page.evaluate("document.getElementById('slot-tail').hidden")


async def test_without_a_connection_the_numbers_are_grey_and_dated(shown: Shown) -> None:
    async with opened() as page:
        await page.goto(shown.url())
        await page.until("document.getElementById('status').innerText === 'live'")
        assert not await page.evaluate("document.getElementById('farm').classList.contains('old')")
        said, old = await page.evaluate(  # at once: the farm's next line says that it is live
            "say('not connected', 'down');"
            " [document.getElementById('status').innerText, document.getElementById('farm').classList.contains('old')]"
        )
        assert "not connected; what is shown is of " in said
        assert old


async def test_without_a_token_it_asks_for_one_and_says_what_is_wrong_with_it(shown: Shown) -> None:
    async with opened() as page:
        await page.goto(f"{shown.farm.url}/#token=wrong")
        await page.until("!document.getElementById('ask').hidden")
        assert "not a token of the farm" in await text(page, "#ask")
        assert await page.evaluate("location.hash + JSON.stringify({...sessionStorage})") == "{}"
        assert await page.evaluate("document.getElementById('farm').hidden")
        right = token("*", "read")
        await page.evaluate(f"document.getElementById('token').value = {right!r}")
        await page.click("#ask button")
        await page.until("!document.getElementById('farm').hidden")
        assert await page.evaluate("document.getElementById('ask').hidden")


@pytest.mark.parametrize("dark", [False, True])
async def test_it_fits_a_phone(shown: Shown, dark: bool) -> None:
    await shown.ask("sweep", 3)
    async with opened(width=400, height=800, dark=dark) as page:
        await page.goto(shown.url())
        await page.until(f"map.cells.length === {CONTAINERS * SLOTS + 1}")
        assert await page.evaluate("document.documentElement.scrollWidth") == 400
        await choose_mine(page)
        await page.click("#slot-tail")
        await page.until("document.getElementById('tail').open")
        assert await page.evaluate("document.documentElement.scrollWidth") == 400
        assert await page.evaluate("document.getElementById('tail').getBoundingClientRect().right") <= 400
        assert page.problems == []


async def test_it_finds_its_way_with_the_keyboard_and_names_what_it_draws(shown: Shown) -> None:
    async with opened() as page:
        await page.goto(shown.url())
        await page.until(f"map.cells.length === {CONTAINERS * SLOTS + 1}")
        await page.until("document.getElementById('map').getAttribute('aria-label').startsWith('Map of 2,001 slots')")
        await page.evaluate("document.getElementById('map').focus()")
        for key in ("ArrowRight", "ArrowRight", "ArrowDown", "ArrowLeft"):
            await page.send("Input.dispatchKeyEvent", type="keyDown", key=key, code=key)
        first, here = await page.evaluate("[map.cells[0], map.cell()]")
        assert (here["x"], here["y"] > first["y"]) == (first["x"], True)
        assert f"{here['container']}/{here['slot']}" in await text(page, "#slot-said")
        await page.click(".run-name")
        assert await page.evaluate("document.querySelector('.run-name').getAttribute('aria-pressed')") == "true"
        assert await page.evaluate("map.run") == HOSTILE
