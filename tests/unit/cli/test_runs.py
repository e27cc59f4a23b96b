"""``agentenv runs compare`` and ``runs view``: what they print, write and refuse."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from agentenv.agent.rollout_log import append_record
from agentenv.agent.transcript import GroupRecord
from agentenv.cli.app import app
from agentenv.runs.manifest import ROLLOUTS
from agentenv.runs.members import MembersFile
from tests import programs_played, run_directories
from tests.run_directories import Played


@pytest.fixture(autouse=True)
def team(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    monkeypatch.chdir(tmp_path)
    return run_directories.several(tmp_path / "runs", items=8)


def ran(*words: str, **variables: str) -> Result:
    return CliRunner().invoke(app, ["runs", *words], env={"COLUMNS": "250", **variables})


def test_runs_are_compared_in_a_table() -> None:
    result = ran("compare", "repair-small", "repair-long")
    assert result.exit_code == 0
    heads, first, second, _, difference, better, *_ = result.stdout.splitlines()
    assert heads.split()[:4] == ["run", "model", "state", "scored"]
    assert "pass@4" in heads
    assert "cost" not in heads
    assert first.startswith("repair-small-20260225-061320  small-1  finished")
    assert second.startswith("repair-long-20260225-082640   large-2  finished")
    assert difference.startswith("repair-long-20260225-082640 minus repair-small-20260225-061320: +0.")
    assert better.split()[0] == "better"
    assert "note settings differ: agent_max_steps 20 → 60" in result.stderr


def test_the_document_has_every_item() -> None:
    found = json.loads(ran("compare", "repair-small", "repair-large", "repair-train", "--json").stdout)
    assert [run["model"] for run in found["runs"]] == ["small-1", "large-2", "small-1"]
    assert [pair["first"] for pair in found["differences"]] == ["repair-small-20260225-061320"] * 2
    difference = found["differences"][0]["difference"]
    assert len(difference["better"]) + len(difference["worse"]) <= difference["items"] == 8
    assert found["left_out"] == []


def test_costs_are_of_the_prices_given() -> None:
    names = ("compare", "repair-small", "repair-large", "--json")
    prices = ("--price-in", "2", "--price-in", "large-2=20", "--price-out", "8")
    small, large = json.loads(ran(*names, *prices).stdout)["runs"]
    assert small["cost"] == pytest.approx((2 * small["prompt_tokens"] + 8 * small["completion_tokens"]) / 1e6)
    assert large["cost"] == pytest.approx((20 * large["prompt_tokens"] + 8 * large["completion_tokens"]) / 1e6)
    of_variables = json.loads(ran(*names, AGENTENV_PRICE_IN="2 large-2=20", AGENTENV_PRICE_OUT="8").stdout)["runs"]
    assert of_variables == [small, large]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["compare", "repair-small"], "only repair-small-20260225-061320 was found"),
        (["compare", "no-such", "repair-small"], "no-such is no run"),
        (["compare", "repair-small", "repair-large", "--price-in", "cheap"], "--price-in: got 'cheap'"),
        (["view", "no-such"], "no-such is no run"),
        (["view", "--runs-dir", "nowhere", "--out", "x.html"], "there is no run in"),
        (["view", "--out", "runs"], "--out:"),
    ],
)
def test_what_cannot_be_is_refused(words: list[str], said: str) -> None:
    result = ran(*words)
    assert result.exit_code == 2
    assert said in result.stderr


def test_a_page_of_all_runs_is_written(tmp_path: Path) -> None:
    result = ran("view", "--out", "out/runs.html", "--title", "Yesterday")
    assert (result.exit_code, result.stdout.strip()) == (0, "out/runs.html")
    assert "5 runs, 128 rollouts" in result.stderr
    page = (tmp_path / "out/runs.html").read_text()
    assert "<title>Yesterday</title>" in page
    found = json.loads(ran("view", "last", "--out", "out/last.html", "--json").stdout)
    assert found == {"page": "out/last.html", "runs": ["repair-killed-20260225-104000"], "left_out": []}


def test_lines_that_are_left_out_are_said(team: list[Path]) -> None:
    with (team[0] / "rollouts.jsonl").open("a") as lines:
        lines.write('{"group": "half')
    for words in (["compare", "repair-small", "repair-large"], ["view", "--out", "x.html"]):
        result = ran(*words)
        assert result.exit_code == 0
        assert "note left out: " in result.stderr
        assert "rollouts.jsonl:9, the last line, is incomplete" in result.stderr


def test_records_that_lie_elsewhere_are_found(tmp_path: Path, team: list[Path]) -> None:
    shared = tmp_path / "shared.jsonl"
    moved = (team[0] / "rollouts.jsonl").read_text()
    shared.write_text("".join(group.model_dump_json() + "\n" for group in Played("another", items=3).groups()) + moved)
    (team[0] / "rollouts.jsonl").unlink()
    manifest = json.loads((team[0] / "run.json").read_text())
    (team[0] / "run.json").write_text(json.dumps(manifest | {"files": {"records": str(shared)}}))
    found = json.loads(ran("compare", "repair-small", "repair-large", "--json").stdout)
    assert [run["rollouts"] for run in found["runs"]] == [32, 32]


def test_a_run_that_cannot_be_resumed_is_not_said_to_be(team: list[Path]) -> None:
    manifest = team[0] / "run.json"
    about = json.loads(manifest.read_text()) | {"state": "interrupted"}
    manifest.write_text(json.dumps(about))
    assert f"agentenv runs resume {team[0].name}" in ran("show", team[0].name).stdout
    manifest.write_text(json.dumps(about | {"resumable": False}))
    assert "agentenv runs resume" not in ran("show", team[0].name).stdout
    refused = ran("resume", team[0].name)
    assert refused.exit_code == 2
    assert "nothing says what it has done" in refused.stderr


def test_a_killed_run_is_what_its_records_say(team: list[Path]) -> None:
    killed = team[-1]
    manifest = killed / "run.json"
    stale = {"groups": 1, "rollouts": 4, "scored": 4, "mean": 1.0, "faults": {"infra": 9}}
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"results": stale}))
    [group] = itertools.islice(Played("repair-killed", items=1).groups(), 1)
    members = MembersFile(killed / "members.jsonl")
    for number, transcript in enumerate(group.trajectories[:3]):
        members.add("open", 4, number, transcript)
    with (killed / "rollouts.jsonl").open("a") as lines:
        lines.write('{"group": "half')
    whole = [line for line in (killed / "rollouts.jsonl").read_text().splitlines() if line.endswith("}")]
    recorded = [t for line in whole for t in GroupRecord.model_validate_json(line).trajectories]
    scores = [t.score for t in recorded if t.score is not None]
    row = json.loads(ran("list", "--json").stdout)[-1]
    assert (row["state"], row["groups"], row["mean"]) == ("killed", 4, pytest.approx(sum(scores) / len(scores)))
    assert row["faults"] == Counter(t.fault for t in recorded if t.fault != "none")
    found = json.loads(ran("show", "last", "--json").stdout)
    assert (found["results"]["rollouts"], found["results"]["scored"]) == (len(recorded), len(scores))
    assert found["open_rollouts"] == 3
    shown = ran("show", "last").stdout
    assert "state    killed: it ended without a word, last heard of at 20" in shown
    assert "groups   4 of 8, 4 rollouts each; 3 rollouts of others" in shown
    assert f"scored   {len(scores)} of {len(recorded)} rollouts" in shown
    assert "note     the results are counted from its records; without runs/" in shown


def test_a_killed_run_whose_records_cannot_be_read_has_what_was_last_written(team: list[Path]) -> None:
    manifest = team[-1] / "run.json"
    last = {"groups": 1, "rollouts": 4, "scored": 4, "mean": 1.0, "faults": {}}
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"results": last}))
    (team[-1] / "rollouts.jsonl").unlink()
    (team[-1] / "rollouts.jsonl").mkdir()
    shown = ran("show", "last").stdout
    assert "scored   4 of 4 rollouts" in shown
    assert "note     the results are those last written: its records cannot be read: " in shown


def of_programs(runs: Path) -> str:
    """The name of a run that agent programs played and that was killed."""
    directory = run_directories.write(runs, Played("coder", state="running"), groups=0)
    append_record(directory / ROLLOUTS, programs_played.group())
    return directory.name


def test_the_programs_of_a_run_are_shown_with_what_they_asked_for(tmp_path: Path) -> None:
    name = of_programs(tmp_path / "runs")
    shown = ran("show", name).stdout
    assert "programs small-agent: played 3, failed 1, conversations 5, dropped parts 7, refused requests 1" in shown
    assert "dialects messages: turns 1, prompt tokens 10, completion tokens 2\n" in shown
    assert " chat: turns 6, prompt tokens 160, completion tokens 12\n" in shown
    found = json.loads(ran("show", name, "--json").stdout)["results"]
    assert found["programs"]["small-agent"]["failed"] == 1
    assert found["dialects"]["messages"] == {"turns": 1, "prompt_tokens": 10, "completion_tokens": 2}
    assert "programs" not in ran("show", "repair-small").stdout


def test_a_comparison_says_which_agents_played(tmp_path: Path) -> None:
    name = of_programs(tmp_path / "runs")
    result = ran("compare", "repair-small", name)
    heads, first, second, *_ = result.stdout.splitlines()
    assert heads.split()[:6] == ["run", "model", "state", "agent", "failed", "scored"]
    assert first.split()[3:5] == ["built-in", "–"]
    assert second.split()[3:5] == ["small-agent", "1"]
    assert "note the agents differ: the built-in loop → small-agent" in result.stderr
    small, coder = json.loads(ran("compare", "repair-small", name, "--json").stdout)["runs"]
    assert (small["programs"], small["dialects"]) == ({}, {})
    assert coder["programs"]["small-agent"]["conversations"] == 5
    assert coder["dialects"]["chat"]["turns"] == 6
