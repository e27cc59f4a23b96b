"""Rollouts of agent programs on the page in a real browser."""

from __future__ import annotations

from pathlib import Path

from agentenv.agent.rollout_log import append_record
from agentenv.report.page import write_overview
from agentenv.runs.manifest import ROLLOUTS
from agentenv.runs.records import find, read
from tests import programs_played, run_directories
from tests.browser import synthetic
from tests.browser.chromium import Page, opened
from tests.browser.synthetic import HOSTILE
from tests.browser.test_report_page import text, unfold, written
from tests.run_directories import Played


async def summaries(page: Page) -> list[str]:
    found = await page.evaluate(
        "[...document.querySelectorAll('.conversation > summary')].map((each) => each.innerText)"
    )
    return [" ".join(str(each).split()) for each in found]


async def test_a_program_and_its_conversations_can_be_read(tmp_path: Path) -> None:
    async with opened() as page:
        await page.goto(written(tmp_path, [programs_played.group()]))
        await unfold(page, "item-2-0a1b2c3d-0")
        assert await summaries(page) == [
            "Conversation 1 not trained 1 turn · no tools",
            "Conversation 2 main 3 turns · tools bash",
            "Conversation 3 1 turn · tools bash · began behind step 2 of conversation 2",
        ]
        assert await page.evaluate("[...document.querySelectorAll('.conversation')].map((each) => each.open)") == [
            False, True, False,
        ]  # fmt: skip
        said = await text(page, ".body")
        for part in (
            "2.9 MIB DROPPED FROM THE MIDDLE", "end of output", "a warning", "5 × tools[].cache_control",
            "assistant · written by the program", "within 750 ms", "pictures are not taken",
        ):  # fmt: skip
            assert part in said, part
        assert "no result" not in said
        assert await text(page, ".trajectory .marks") == "3 conversations"
        await page.click(".conversation[open] + .conversation > summary")
        assert "nothing of it came back" in await text(page, ".conversation[open] + .conversation")
        assert "the 4 messages before it" in await text(page, ".conversation[open] + .conversation")
        await unfold(page, "item-2-0a1b2c3d-1")
        await page.evaluate("document.getElementById('faulty').click()")
        assert await text(page, "#shown") == "1 of 3 trajectories"
        assert page.problems == []


async def test_the_page_of_many_runs_names_the_programs_and_has_their_conversations(tmp_path: Path) -> None:
    for name in ("plain", "coder"):
        run_directories.write(tmp_path / "runs", Played(name, items=2), groups=2 if name == "plain" else 0)
    (coder,) = (tmp_path / "runs").glob("coder-*")
    append_record(coder / ROLLOUTS, programs_played.group())
    runs = [run for source in find(tmp_path / "runs") for run in read(source)]
    async with opened() as page:
        await page.goto(write_overview(runs, tmp_path / "runs.html", title="Runs").as_uri())
        rows = await page.evaluate("[...document.querySelectorAll('#runs-table tbody tr')].map((row) => row.innerText)")
        assert sorted(("small-agent" in row, "coder" in row) for row in rows) == [(False, False), (True, True)]
        row = (
            "[...document.querySelectorAll('details.trajectory')].find((each) => each.id.endsWith('item-2-0a1b2c3d-0'))"
        )
        await page.evaluate(f"{row}.open = true")
        await page.until("document.querySelectorAll('.conversation').length === 3")
        assert page.problems == []


async def test_it_fits_a_phone(tmp_path: Path) -> None:
    played = programs_played.several()
    assert played.program is not None
    played.program.stdout = "x" * 3000
    played.program.dropped["messages[]." * 40] = 1
    async with opened(width=390, height=844) as page:
        await page.goto(written(tmp_path, [synthetic.group("g", [played])]))
        await unfold(page, played.trajectory)
        await page.evaluate("document.querySelectorAll('.conversation').forEach((each) => { each.open = true; })")
        assert await page.evaluate("document.documentElement.scrollWidth") <= 390
        assert await page.evaluate(
            "[...document.querySelectorAll('table')]"
            ".every((table) => table.offsetWidth <= table.parentNode.clientWidth)"
        )


async def test_what_a_program_printed_stays_text(tmp_path: Path) -> None:
    played = programs_played.several()
    assert played.program is not None
    played.program = played.program.model_copy(
        update={
            "name": HOSTILE, "stdout": HOSTILE, "stderr": HOSTILE, "refused": [HOSTILE], "overruled": [HOSTILE],
            "dropped": {HOSTILE: 1},
        }
    )  # fmt: skip
    played.program.conversations[1].tools = [HOSTILE]
    played.steps[0].dialect = HOSTILE
    async with opened() as page:
        await page.goto(written(tmp_path, [synthetic.group("g", [played])]))
        await unfold(page, played.trajectory)
        await page.until("document.querySelector('.conversation') !== null")
        assert await page.evaluate("window.harmed === undefined")
        assert await page.evaluate("document.querySelectorAll('main img, main script, main svg[onload]').length") == 0
        assert page.problems == []
