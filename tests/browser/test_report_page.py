"""The page in a real browser: it shows what the records say, asks for nothing, and nothing in it comes alive."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from agentenv.agent.transcript import GroupRecord
from agentenv.report import write_report
from tests.browser import synthetic
from tests.browser.chromium import Page, opened

SHOWN = "[...document.querySelectorAll('details.trajectory')].filter((row) => row.offsetParent !== null).length"


def written(directory: Path, groups: Sequence[GroupRecord], **run: Any) -> str:
    return write_report(groups, directory / "report.html", title="A run", run=run).as_uri()


async def unfold(page: Page, trajectory: str) -> None:
    await page.evaluate(f"document.getElementById({'t:' + trajectory!r}).open = true")
    await page.until(f"document.getElementById({'t:' + trajectory!r}).querySelector('.body') !== null")


async def text(page: Page, selector: str) -> str:
    found = await page.evaluate(f"document.querySelector({selector!r})?.innerText ?? ''")
    return str(found)


async def change(page: Page, control: str, value: str) -> None:
    await page.evaluate(
        f"(() => {{ const e = document.getElementById({control!r}); e.value = {value!r};"
        " e.dispatchEvent(new Event('input')); })()"
    )


@pytest.mark.parametrize("dark", [False, True])
async def test_it_opens_from_a_file_without_a_problem_or_a_request(tmp_path: Path, dark: bool) -> None:
    url = written(tmp_path, synthetic.few(), scripted=True, Policy="players")
    async with opened(dark=dark) as page:
        await page.goto(url)
        assert await page.evaluate("document.title") == "A run"
        assert "No model was involved" in await text(page, "aside.banner")
        await page.click("#unfold")
        await page.until("document.querySelectorAll('.body').length > 5")
        assert page.problems == []
        assert page.requests == [url]


async def test_hostile_records_stay_text(tmp_path: Path) -> None:
    async with opened() as page:
        await page.goto(written(tmp_path, [synthetic.few()[-1]]))
        await page.click("#unfold")
        await page.until("document.querySelector('.body') !== null")
        assert await page.evaluate("window.harmed === undefined")
        assert await page.evaluate("document.querySelectorAll('main img, main script, main svg[onload]').length") == 0
        assert "window.harmed = 1" in await text(page, "main")
        assert page.problems == []


async def test_the_waterfall_names_its_rows_and_says_more_on_hover(tmp_path: Path) -> None:
    async with opened() as page:
        await page.goto(written(tmp_path, synthetic.few()))
        await unfold(page, "g1-d")
        rows = await page.evaluate(
            "[...document.querySelectorAll('.waterfall .row')].map((row) => [row.innerText.split('\\n')[0], row.title])"
        )
        names = [name for name, _ in rows]
        assert names[:4] == ["slot wait", "prepare", "model · step 1", "bash ls"]
        assert names[-1] == "verify"
        title = dict(rows)["bash ls"]
        assert title.startswith("bash ls: ")
        for part in ("batch wait", "run", "transport", "from", "to"):
            assert part in title
        widths = await page.evaluate(
            "[...document.querySelectorAll('.waterfall .row rect')].map((bar) => bar.getBoundingClientRect().width)"
        )
        assert min(widths) > 0


async def test_faults_and_cut_outputs_are_said(tmp_path: Path) -> None:
    async with opened() as page:
        await page.goto(written(tmp_path, synthetic.few()))
        for trajectory in ("g2-b", "g2-c", "g3-a", "g3-b"):
            await unfold(page, trajectory)
        shown = await page.evaluate("document.getElementById('groups').textContent")  # off screen too
        for words in ("timed out", "unknown_tool", "infra fault", "attempt 3", "ContainerLostError", "partial: 1 of 2"):
            assert words in shown
        assert "8.4 GiB dropped from the middle" in shown


async def test_a_session_goes_on_and_its_recording_can_be_had(tmp_path: Path) -> None:
    groups = synthetic.few()
    played = groups[0].trajectories[3]
    typed = synthetic.call(0, "", 0.5, 0.4, timed_out=True, exit_code=None)
    assert typed.result is not None
    content = {
        "session": {"session": "main", "state": "running"},
        "recording": '{"version": 2, "width": 80, "height": 24}\n[0.1, "o", "hello"]\n',
    }
    arguments = {"action": "send_keys", "keys": ["C-c"], "text": "x" * 70}
    result = typed.result.model_copy(update={"content": content})
    played.steps[0].tool_calls[0] = typed.model_copy(update={"tool": "tmux", "arguments": arguments, "result": result})
    async with opened() as page:
        await page.goto(written(tmp_path, groups))
        await unfold(page, "g1-d")
        row = "document.getElementById('t:g1-d')"
        link = await page.evaluate(f"{row}.querySelector('a[download]').download")
        assert link == "main.cast"
        assert await page.evaluate(f"{row}.querySelector('.given').textContent") == 'action send_keyskeys ["C-c"]'
        shown = await page.evaluate(f"{row}.querySelector('.call').textContent")
        assert "still running" in shown
        assert "timed out" not in shown
        assert "hello" not in shown
        assert page.problems == []


async def test_filters_and_search_narrow_the_list(tmp_path: Path) -> None:
    async with opened() as page:
        await page.goto(written(tmp_path, synthetic.few()))
        everything = await page.evaluate(SHOWN)
        await page.click("#faulty")
        faulty = await page.evaluate(SHOWN)
        assert 0 < faulty < everything
        await page.click("#faulty")
        await change(page, "score", "full")
        assert await page.evaluate(SHOWN) == 2
        await change(page, "score", "any")
        await change(page, "find", "no such thing")
        assert await page.evaluate(SHOWN) == 0
        assert "No group matches" in await text(page, "#nothing")


async def test_a_link_opens_its_trajectory(tmp_path: Path) -> None:
    async with opened() as page:
        await page.goto(written(tmp_path, synthetic.few()) + "#g2-b")
        await page.until("document.querySelector('.marked .body') !== null")
        assert "sleep 100000" in await text(page, ".marked")


async def test_a_thousand_trajectories_open_quickly_and_none_is_drawn_before_it_is_asked_for(tmp_path: Path) -> None:
    async with opened() as page:
        await page.goto(written(tmp_path, synthetic.many(1000)))
        assert await page.evaluate(SHOWN) == 1000
        assert await page.evaluate("document.querySelectorAll('.body').length") == 0
        assert await page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")


async def test_it_fits_a_phone(tmp_path: Path) -> None:
    async with opened(width=390, height=800) as page:
        await page.goto(written(tmp_path, synthetic.few()))
        await unfold(page, "g1-a")
        assert await page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
