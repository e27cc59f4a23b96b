"""The page about many runs in a real browser: it shows what the records say, leads to every rollout, and is quick."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from agentenv.report.live import RunsPages, served
from agentenv.report.overview import OverviewSettings
from agentenv.report.page import write_overview
from agentenv.runs.compare import Prices
from agentenv.runs.records import Run, find, read
from tests import run_directories
from tests.browser import synthetic
from tests.browser.chromium import Page, opened
from tests.browser.test_report_page import change, text
from tests.run_directories import BEGAN_UNIX_S, Played

TASKS = "[...document.querySelectorAll('.task')].filter((task) => !task.hidden).length"
FITS = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"


def loaded(below: Path) -> list[Run]:
    return [run for source in find(below=below) for run in read(source)]


def written(directory: Path, runs: list[Run], prices: Prices | None = None) -> str:
    settings = OverviewSettings(prices=prices or Prices())
    return write_overview(runs, directory / "runs.html", title="Runs", settings=settings).as_uri()


@pytest.fixture
def team(tmp_path: Path) -> list[Run]:
    run_directories.several(tmp_path / "runs", items=12)
    return loaded(tmp_path / "runs")


async def rows(page: Page, selector: str) -> list[str]:
    found = await page.evaluate(f"[...document.querySelectorAll({selector!r})].map((row) => row.innerText)")
    return [str(row) for row in found]


@pytest.mark.parametrize("dark", [False, True])
async def test_it_opens_from_a_file_without_a_problem_or_a_request(tmp_path: Path, team: list[Run], dark: bool) -> None:
    url = written(tmp_path, team, Prices({"": 2.0}, {"": 8.0}))
    async with opened(dark=dark) as page:
        await page.goto(url)
        listed = await rows(page, "#runs-table tbody tr")
        assert [row.split()[1] for row in listed] == [run.label for run in team]
        assert [state for row in listed for state in ("finished", "interrupted", "killed") if state in row] == [
            run.state for run in team
        ]
        assert "which cost" in await text(page, ".lede")
        assert await page.evaluate("document.querySelectorAll('#curve polyline').length") == 5
        assert await page.evaluate("document.querySelectorAll('#passes circle').length") >= 10
        assert "ContainerLostError" in await text(page, "#errors")
        assert page.problems == []
        assert page.requests == [url]


async def test_what_is_ticked_decides_what_is_drawn(tmp_path: Path, team: list[Run]) -> None:
    async with opened() as page:
        await page.goto(written(tmp_path, team))
        for _ in range(3):
            await page.click("#runs-table input:checked")
        assert await page.evaluate("document.querySelectorAll('#curve polyline').length") == 2
        await page.evaluate("document.querySelector('.task').scrollIntoView()")
        await page.until("document.querySelector('.task .cells').children.length === 2")
        before = await page.evaluate("document.querySelector('#curve polyline').getAttribute('points')")
        await change(page, "curve-by", "groups")
        assert await page.evaluate("document.querySelector('#curve polyline').getAttribute('points')") != before


async def test_two_runs_are_compared_in_both_directions(tmp_path: Path, team: list[Run]) -> None:
    small, long = team[0].id, team[2].id
    async with opened() as page:
        await page.goto(written(tmp_path, team))
        await change(page, "first", small)
        await change(page, "second", long)
        there = await text(page, "#pair .big")
        assert there.split()[:4] == ["C", "−", "A", "="]
        assert there.split()[4].startswith("+")
        assert "settings differ: agent_max_steps 20 → 60" in await text(page, "#pair .notes")
        better = await page.evaluate("document.querySelectorAll('#pair .links')[0].children.length")
        await change(page, "first", long)
        await change(page, "second", small)
        back = await text(page, "#pair .big")
        assert back.split()[4] == there.split()[4].replace("+", "−")
        assert await page.evaluate("document.querySelectorAll('#pair .links')[1].children.length") == better
        await change(page, "second", long)
        assert "Choose two different runs" in await text(page, "#pair")


async def test_a_tasks_attempts_lead_to_their_rollouts(tmp_path: Path, team: list[Run]) -> None:
    async with opened() as page:
        await page.goto(written(tmp_path, team))
        assert await page.evaluate(TASKS) == 12
        await change(page, "task-find", "003")
        assert await page.evaluate(TASKS) == 1
        await page.click(".task:not([hidden]) > summary")
        await page.until("document.querySelectorAll('.task[open] .attempt').length === 20")
        link = ".task[open] .beside > div:nth-child(2) .attempt:nth-child(3) a"
        await page.click(link)
        await page.until("document.querySelector('.marked .body') !== null")
        assert await page.evaluate("document.querySelector('.marked').id") == f"t:{team[1].id}/g3-2"


async def test_tasks_are_ordered_and_filtered_by_what_differs(tmp_path: Path, team: list[Run]) -> None:
    async with opened() as page:
        await page.goto(written(tmp_path, team))
        await change(page, "task-order", "differ")
        spreads = await page.evaluate("tasks.map((task) => [task.item.id, spreadOf(task)])")
        largest = max(spreads, key=lambda row: row[1])[1]
        first = await page.evaluate("document.querySelector('.task').id.slice(5)")
        assert dict(spreads)[first] == largest
        await page.click("#differing")
        assert await page.evaluate(TASKS) == sum(spread > 0 for _, spread in spreads)


async def test_a_run_leads_to_its_groups(tmp_path: Path, team: list[Run]) -> None:
    async with opened() as page:
        await page.goto(written(tmp_path, team))
        await page.click("#runs-table tbody tr:nth-child(4) a")
        await page.until(f"document.getElementById('run').value === {team[3].id!r}")
        shown = "[...document.querySelectorAll('details.trajectory')].filter((row) => !row.closest('[hidden]')).length"
        assert await page.evaluate(shown) == len(team[3].transcripts)


async def test_it_fits_a_phone(tmp_path: Path, team: list[Run]) -> None:
    async with opened(width=400, height=800) as page:
        await page.goto(written(tmp_path, team))
        await page.click(".task > summary")
        assert await page.evaluate(FITS)
        assert await page.evaluate("document.querySelector('#curve svg').getBoundingClientRect().width") > 300
        assert "mean score" in await page.evaluate(
            "getComputedStyle(document.querySelectorAll('#runs-table td')[2], '::before').content"
        )


async def test_every_control_has_a_name_and_can_be_reached(tmp_path: Path, team: list[Run]) -> None:
    async with opened() as page:
        await page.goto(written(tmp_path, team))
        nameless = await page.evaluate(
            "[...document.querySelectorAll('input, select, button')].filter((control) => !control.labels?.length"
            " && !control.getAttribute('aria-label') && !control.innerText).map((control) => control.id)"
        )
        assert nameless == []
        assert await page.evaluate("[...document.querySelectorAll('svg[role=img]')].every((e) => e.ariaLabel)")
        for _ in range(4):
            for kind in ("keyDown", "keyUp"):
                await page.send("Input.dispatchKeyEvent", type=kind, key="Tab", code="Tab", windowsVirtualKeyCode=9)
        assert await page.evaluate("document.activeElement.tagName") in ("INPUT", "A")
        await page.evaluate("document.querySelector('.task > summary').focus()")
        await page.send("Input.dispatchKeyEvent", type="keyDown", key="Enter", code="Enter", text="\r")
        await page.until("document.querySelector('.task[open] .attempt') !== null")


async def test_hostile_runs_stay_text(tmp_path: Path) -> None:
    played = Played(synthetic.HOSTILE.replace("/", ""), synthetic.HOSTILE, items=1)
    groups = [group.model_copy(update={"item_id": synthetic.HOSTILE}) for group in played.groups()]
    groups[0].trajectories[0] = synthetic.hostile()
    manifest = played.manifest().model_copy(update={"state": "failed", "error": synthetic.HOSTILE})
    run = Run(tmp_path / "odd", manifest, played.record, groups, problems=[synthetic.HOSTILE])
    async with opened() as page:
        await page.goto(written(tmp_path, [run, run]))
        await page.click(".task > summary")
        await page.until("document.querySelector('.attempt') !== null")
        assert await page.evaluate("window.harmed === undefined")
        assert await page.evaluate("document.querySelectorAll('main img, main script').length") == 0
        assert "window.harmed = 1" in await text(page, "main")
        assert page.problems == []


async def test_two_thousand_rollouts_are_fluid(tmp_path: Path) -> None:
    played = [Played(f"r{n}", f"m{n}", items=125, skill=0.3 + n / 10, began_unix_s=BEGAN_UNIX_S + n) for n in range(4)]
    runs = [Run(tmp_path / one.name, one.manifest(), one.record, list(one.groups())) for one in played]
    assert sum(len(run.transcripts) for run in runs) == 2000
    async with opened() as page:
        await page.goto(written(tmp_path, runs))
        assert await page.evaluate("document.querySelectorAll('.body').length") == 0
        found = [
            await page.evaluate(
                "(async () => { const box = document.querySelector('#runs-table input');"
                " const frames = async (act) => { const began = performance.now(); act();"
                " await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));"
                " return performance.now() - began; };"
                " return [await frames(() => {}), await frames(() => box.click())]; })()"
            )
            for _ in range(3)
        ]
        late_ms = [took_ms - 10 * bare_ms for bare_ms, took_ms in found]
        assert min(late_ms) < 3000, "on a loaded machine; a tenth of it otherwise"
        assert await page.evaluate(FITS)


async def test_a_served_page_follows_its_runs_and_leads_to_their_pages(tmp_path: Path) -> None:
    below = tmp_path / "runs"
    directory = run_directories.write(below, Played("first", items=4), groups=2)
    pages = RunsPages(lambda: find(below=below), "Runs", OverviewSettings())
    with run_directories.played_now(directory):
        async with served(pages) as url, opened() as page:
            await page.goto(url)
            assert (await rows(page, "#runs-table .badge")) == ["finished"]
            await change(page, "task-find", "boltons")
            await page.evaluate("document.querySelector('.task').open = true")
            run_directories.write(below, Played("second", items=3, began_unix_s=time.time()))
            await page.until(
                "document.documentElement?.dataset.ready === 'yes'"
                " && document.querySelectorAll('#runs-table tbody tr').length === 2"
            )
            assert await page.evaluate("document.getElementById('task-find').value") == "boltons"
            await page.until("document.querySelectorAll('.task[open] .attempt').length === 8")
            await page.click(".task[open] .attempt:nth-child(2) a")
            await page.until("document.querySelector('.marked .body') !== null")
            assert await page.evaluate("location.pathname") == f"/run/{directory.name}/"
            assert await page.evaluate("document.querySelector('.marked').id") == "t:g0-1"
            assert page.problems == []
