"""The page in a real browser: it shows what the records say, asks for nothing, and nothing in it comes alive."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from agentenv.agent.transcript import GroupRecord
from agentenv.report import write_report
from agentenv.report.live import OnePage, page_of, served
from agentenv.runs.records import Source
from tests.browser import synthetic
from tests.browser.chromium import Page, opened

PICTURE = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
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


async def test_a_screenshot_is_a_picture_unless_the_page_has_no_room(tmp_path: Path) -> None:
    groups = synthetic.few()
    images = (PICTURE, "A" * 300_000, "'><script>window.harmed = 1</script>")
    for played, image in zip(groups[0].trajectories, images, strict=False):
        played.steps[0].tool_calls[0] = synthetic.call(0, "", 0.5, 0.1, stdout="", content={"image": image}).model_copy(
            update={"tool": "browser_screenshot"}
        )
    async with opened() as page:
        await page.goto(url := written(tmp_path, groups[:1]))
        for member in "abc":
            await unfold(page, f"g1-{member}")
        await page.until("document.querySelector('img.screenshot')?.naturalWidth === 1")
        assert await page.evaluate("document.querySelectorAll('img').length") == 1
        assert "left out of this page" in await text(page, "[id='t:g1-b']")
        assert "left out of this page" not in await text(page, "[id='t:g1-c']")
        assert page.problems == []
        assert [address for address in page.requests if not address.startswith("data:")] == [url]


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


async def test_search_finds_commands_outputs_and_errors(tmp_path: Path) -> None:
    async with opened() as page:
        await page.goto(written(tmp_path, synthetic.few()))
        for words, rows in (("sleep 100000", 1), ("OUTPUT of patch", 3), ("no answer for 15", 2), ("boltons-g1", 4)):
            await change(page, "find", words)
            assert await page.evaluate(SHOWN) == rows, words
        await change(page, "find", "")
        assert await page.evaluate("document.querySelectorAll('.body').length") == 0, "searching draws nothing"


async def test_search_says_that_it_does_not_cover_what_was_cut(tmp_path: Path) -> None:
    groups = synthetic.few()[:1]
    async with opened() as page:
        await page.goto(written(tmp_path, groups))
        await change(page, "find", "needle")
        assert "not searched" not in await text(page, "#shown")
        long = f"{'hay ' * 100_000}needle {'hay ' * 100_000}"
        groups[0].trajectories[0].steps[0].tool_calls[0] = synthetic.call(0, "cat hay", 0.5, 0.1, stdout=long)
        await page.goto(written(tmp_path, groups))
        await change(page, "find", "needle")
        assert await page.evaluate(SHOWN) == 0
        assert "what is left out of this page was not searched" in await text(page, "#shown")


async def test_distinct_errors_lead_to_their_first_rollout(tmp_path: Path) -> None:
    async with opened() as page:
        await page.goto(written(tmp_path, synthetic.few()))
        rows = "[...document.querySelectorAll('.errors tbody tr')].map((row) => row.innerText.split('\\t'))"
        assert ["4", "infra", "ContainerLostError: it died"] in await page.evaluate(rows)
        await page.click(".errors a")
        await page.until("document.querySelector('.marked .body') !== null")
        assert "ContainerLostError" in await text(page, ".marked")


async def test_scores_outside_of_0_and_1_are_where_they_belong(tmp_path: Path) -> None:
    scores = [-1.0, -0.25, 5.5]
    members = [synthetic.transcript(f"g-{n}", score=score, commands=["ls"]) for n, score in enumerate(scores)]
    async with opened() as page:
        await page.goto(written(tmp_path, [synthetic.group("g", members)]))
        found = await page.evaluate(
            "[...document.querySelectorAll('.dots circle')]"
            ".map((dot) => [dot.getAttribute('cx'), dot.getAttribute('class')])"
        )
        places = [float(x) for x, _ in found]
        assert places == pytest.approx([10, 10 + 180 * 0.75 / 6.5, 190])
        assert [kind for _, kind in found] == ["none", "part", "full"]
        assert await page.evaluate("document.querySelector('#score option[value=full]').textContent") == "5.5"
        await page.until("document.querySelectorAll('.name')[1].innerText === 'rollout 1'")  # once it is drawn


async def test_rows_of_a_group_share_one_scale_with_round_ticks(tmp_path: Path) -> None:
    members = [
        synthetic.transcript(f"g-{n}", score=1.0, commands=["ls"], began_unix_s=100.0 + 7 * n, totals={"total_s": 9.0})
        for n in range(3)
    ]
    async with opened() as page:
        await page.goto(written(tmp_path, [synthetic.group("g", members)]))
        starts = await page.evaluate(
            "[...document.querySelectorAll('.trajectory .strip')]"
            ".map((strip) => +strip.querySelector('rect').getAttribute('x'))"
        )
        assert starts == pytest.approx([0, 7000 / 23, 14000 / 23])
        ticks = "[...document.querySelectorAll('.axis-row .scale span')].map((tick) => tick.textContent)"
        assert await page.evaluate(ticks) == ["0", "5 s", "10 s", "15 s", "20 s"]


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


async def test_it_fits_a_phone_and_can_be_read_there(tmp_path: Path) -> None:
    async with opened(width=400, height=800) as page:
        await page.goto(written(tmp_path, synthetic.few()))
        await unfold(page, "g1-a")
        assert await page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
        assert await page.evaluate(
            "[...document.querySelectorAll('table')]"
            ".every((table) => table.offsetWidth <= table.parentNode.clientWidth)"
        )
        for bars in (".trajectory > summary > .strip", ".waterfall svg"):
            assert await page.evaluate(f"document.querySelector({bars!r}).getBoundingClientRect().width") > 300
        edges = await page.evaluate(
            "[...document.querySelectorAll('.waterfall .scale span')]"
            ".map((tick) => tick.getBoundingClientRect()).map(({left, right}) => [left, right])"
        )
        assert all(before[1] < after[0] for before, after in itertools.pairwise(edges)), "ticks do not overlap"


async def test_a_served_page_follows_its_file_and_keeps_what_was_expanded(tmp_path: Path) -> None:
    file = tmp_path / "rollouts.jsonl"
    lines = [group.model_dump_json() + "\n" for group in synthetic.few()[:2]]
    async with served(OnePage(page_of(Source.file(file), "A run"))) as url, opened() as page:
        await page.goto(url)
        assert await page.evaluate(SHOWN) == 0
        file.write_text(lines[0])
        await page.until(f"{SHOWN} === 4")
        await change(page, "find", "output of ls")
        await unfold(page, "g1-b")
        file.write_text("".join(lines))
        await page.until(
            "document.documentElement?.dataset.ready === 'yes' && document.querySelectorAll('.trajectory').length === 7"
        )
        assert await page.evaluate("document.getElementById('find').value") == "output of ls"
        await page.until("document.getElementById('t:g1-b').querySelector('.body') !== null")
        assert page.problems == []
