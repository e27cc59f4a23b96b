"""The report's pure parts, and what is written to disk."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from agentenv.agent.transcript import ToolRecord, Transcript
from agentenv.report import read_records, write_report
from agentenv.report.page import embed
from agentenv.report.shaping import bars, group_row, text_cap, trajectory_body
from agentenv.report.summary import percentile, summarise
from agentenv.runs.records import RecordError
from agentenv.wire.calls import CallResult
from tests.browser import synthetic


def test_counts_come_from_the_records() -> None:
    found = summarise(synthetic.few())
    assert (found["groups"], found["trajectories"], found["scored"], found["unscored"]) == (5, 11, 9, 2)
    assert found["outcomes"] == {"complete": 3, "partial": 1, "retry": 1}
    assert found["spread"] == 2
    assert found["faults"]["infra"] == {"trajectories": 2, "calls": 0}
    assert found["faults"]["model"]["calls"] == 1
    assert found["timed_out"] == 2
    assert found["retries"] == 4


def test_a_slot_the_policy_destroyed_is_scored_and_shown_as_its_doing() -> None:
    groups = synthetic.few()
    member = groups[0].trajectories[0]
    member.fault, member.finish_reason, member.score = "policy", "slot_destroyed", 0.0
    member.error = "SlotDestroyedError: its agent was killed"
    assert summarise(groups)["faults"]["policy"]["trajectories"] == 1
    row = group_row(groups[0], 0, 1000)["members"][0]
    assert (row["fault"], row["finish"], row["score"]) == ("policy", "slot_destroyed", 0.0)
    assert trajectory_body(member, 1000)["error"] == member.error


def test_scores_of_zero_and_one_have_bars_of_their_own() -> None:
    counts = {bin["label"]: bin["count"] for bin in summarise(synthetic.few())["histogram"]}
    assert counts["0"] == 3
    assert counts["1"] == 2
    assert sum(counts.values()) == 9


@pytest.mark.parametrize(
    ("scores", "axis", "bins"),
    [
        ([0.0, 0.5, 1.0], (0.0, 1.0), {"0": 1, "0.5–0.6": 1, "1": 1}),
        ([-1.0, -0.25, 5.5], (-1.0, 5.5), {"-1–0": 2, "5–6": 1}),
        ([-1.0, 1.0, 1.0], (-1.0, 1.0), {"-1–-0.8": 1, "1–1.2": 2}),
        ([7.0], (7.0, 7.0), {"7–8": 1}),
        ([], (0.0, 1.0), {}),
    ],
)
def test_the_axis_of_scores_fits_them(scores: list[float], axis: tuple[float, float], bins: dict[str, int]) -> None:
    members = [synthetic.transcript(f"m{n}", score=score, commands=["ls"]) for n, score in enumerate(scores)]
    found = summarise([synthetic.group("g", members)])
    assert found["axis"] == axis
    assert {bin["label"]: bin["count"] for bin in found["histogram"] if bin["count"]} == bins
    assert len(found["histogram"]) <= 12


def test_errors_are_counted_by_their_kind() -> None:
    texts = ["TaskError: verify raised ValueError: 17", "TaskError: verify raised ValueError: 4", "TaskError: another"]
    members = [
        synthetic.transcript(f"m{n}", score=None, commands=["ls"], fault="task", error=text, earlier_attempts=["Lost"])
        for n, text in enumerate(texts)
    ]
    found = summarise([synthetic.group("g", members)])["errors"]
    assert [(row["count"], row["fault"], row["text"]) for row in found] == [
        (3, "infra", "Lost"),
        (2, "task", texts[0]),
        (1, "task", texts[2]),
    ]


def test_members_are_on_one_axis_that_begins_with_the_first() -> None:
    members = [
        synthetic.transcript(f"m{n}", score=1.0, commands=["ls"], began_unix_s=100.0 + 7 * n, totals={"total_s": 9.0})
        for n in range(3)
    ]
    row = group_row(synthetic.group("g", members), 0, 1000)
    assert [member["start"] for member in row["members"]] == [0.0, 7.0, 14.0]
    assert row["span"] == 23.0


def test_nothing_recorded_is_a_page_too(tmp_path: Path) -> None:
    assert "Nothing was timed" in write_report([], tmp_path / "r.html", title="Empty").read_text()


@pytest.mark.parametrize(
    ("values", "percent", "expected"), [([], 50, 0.0), ([3, 1, 2], 50, 2), ([1], 99, 1), ([1, 2], 100, 2)]
)
def test_percentiles_are_nearest_rank(values: list[float], percent: float, expected: float) -> None:
    assert percentile(values, percent) == expected


def test_a_calls_time_is_taken_apart_without_gap_or_overlap() -> None:
    played = synthetic.few()[0].trajectories[3]
    call = played.steps[0].tool_calls[0]
    inside = [bar for bar in bars(played) if bar[1].startswith("bash") and bar[2] < call.ended_s - 1e-9]
    assert [kind for kind, *_ in inside] == ["batch_wait", "run", "transport"]
    assert inside[0][2] == call.started_s
    assert inside[-1][3] == call.ended_s
    assert all(before[3] == after[2] for before, after in itertools.pairwise(inside))


def test_reasoning_is_shown_where_only_the_step_has_it() -> None:
    played = synthetic.few()[0].trajectories[3].model_copy(deep=True)
    step = played.steps[0]
    for message in (step.message, *played.messages):
        assert not {"reasoning", "reasoning_content"} & message.keys()
    step.reasoning = "first look, then edit"
    turns = [turn for turn in trajectory_body(played, 1000)["turns"] if turn.get("index") == step.index]
    assert [turn.get("thought") for turn in turns] == ["first look, then edit"]


def test_long_texts_are_cut_and_say_so() -> None:
    flood = synthetic.few()[1].trajectories[2]
    shown = trajectory_body(flood, 1000)["turns"][2]["calls"][0]["out"]["text"]
    assert len(shown) < 1200
    assert "399,000 characters are left out" in shown
    assert text_cap(synthetic.many(4000)) < text_cap(synthetic.few())


def test_embedded_data_cannot_end_its_element() -> None:
    made = str(embed({synthetic.HOSTILE: [synthetic.HOSTILE]}))
    assert "<" not in made
    assert made.isascii()
    assert json.loads(made) == {synthetic.HOSTILE: [synthetic.HOSTILE]}


def test_the_page_holds_no_address_and_pins_its_script(tmp_path: Path) -> None:
    page = write_report(synthetic.few(), tmp_path / "r.html", title="<b>").read_text()
    markup = re.sub(r"<(script|style)[^>]*>.*?</\1>", "", page, flags=re.S)
    assert "http" not in markup.replace("http-equiv", "")
    assert "default-src 'none'" in page
    assert "<b>" not in page.partition("</head>")[0]


def test_a_failed_write_leaves_the_old_page(tmp_path: Path) -> None:
    page = tmp_path / "r.html"
    page.write_text("old")
    broken = [group.model_copy(update={"trajectories": [None]}) for group in synthetic.few()[:1]]
    with pytest.raises(AttributeError):
        write_report(broken, page, title="x")
    assert page.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["r.html"]


def test_records_are_read_up_to_a_line_cut_short(tmp_path: Path) -> None:
    file = tmp_path / "rollouts.jsonl"
    line = synthetic.few()[0].model_dump_json()
    file.write_text(f"{line}\n\n{line}\n{line[:50]}")
    assert len(list(read_records(file))) == 2


def test_a_whole_line_that_is_no_record_is_named(tmp_path: Path) -> None:
    file = tmp_path / "rollouts.jsonl"
    file.write_text('{"group": 1}\n')
    with pytest.raises(RecordError, match=r"rollouts\.jsonl:1"):
        list(read_records(file))


def with_calls(*calls: ToolRecord) -> Transcript:
    played = synthetic.few()[0].trajectories[3].model_copy(deep=True)
    played.steps[0].tool_calls[:] = calls
    return played


def shown_calls(played: Transcript) -> list[dict[str, Any]]:
    return [call for turn in trajectory_body(played, 4000)["turns"] for call in turn.get("calls", ())]


def test_a_session_that_goes_on_has_not_timed_out() -> None:
    waited = synthetic.call(0, "make", 0.1, 1.0, timed_out=True, exit_code=None)
    content = {"session": "default", "state": "running", "cwd": "/workspace", "command": "make"}
    result = waited.result
    assert result is not None
    on = waited.model_copy(update={"tool": "terminal", "result": result.model_copy(update={"content": content})})
    shown = shown_calls(with_calls(waited, on))[:2]
    assert [(call["flags"], call["goesOn"]) for call in shown] == [(["timed_out"], False), ([], True)]
    assert shown[1]["content"] == "[session default: running, without pty, in /workspace]"


def test_a_recording_is_offered_once_and_whole() -> None:
    state = {"session": "main", "state": "running", "rows": 24, "columns": 80}
    cast = '{"version": 2, "width": 80, "height": 24}\n[0.1, "o", "hello"]\n'
    content = {"session": state, "recording": cast}
    typed = ToolRecord(
        call_id="call-0",
        tool="tmux",
        arguments={"action": "send_keys", "text": "ls", "keys": ["Enter"]},
        started_s=0.5,
        ended_s=0.9,
        result=CallResult(id="call-0", stdout="$ ls\n", content=content, duration_s=0.4),
    )
    played = with_calls(typed)
    body = trajectory_body(played, 4000)
    assert body["recordings"] == {"main": cast}
    assert "hello" not in json.dumps(body["turns"])
    assert any(label == "tmux send_keys ls Enter" for _, label, _, _ in bars(played))


def test_an_archive_is_its_files_not_its_bytes() -> None:
    files = [{"path": "a", "size_bytes": 3, "sha256": "0" * 64}]
    content = {"files": files, "total_bytes": 3, "data": "QUJD" * 5000}
    packed = synthetic.call(0, "", 0.1, 1.0, content=content, stdout="")
    (call, *_) = shown_calls(with_calls(packed.model_copy(update={"tool": "artifacts"})))
    assert call["content"].splitlines()[:2] == [f"{'0' * 64}  3  a", "[1 files, 3 bytes]"]
    assert "QUJD" not in call["content"]
