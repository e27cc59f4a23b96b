from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentenv.agent.transcript import GroupRecord, RunRecord
from agentenv.cli.app import app
from tests.browser import synthetic


@pytest.fixture
def rollouts(tmp_path: Path) -> Path:
    file = tmp_path / "rollouts.jsonl"
    file.write_text("".join(group.model_dump_json() + "\n" for group in synthetic.few()[:2]))
    return file


def test_the_page_is_written_beside_the_rollouts(rollouts: Path) -> None:
    result = CliRunner().invoke(app, ["report", str(rollouts), "--title", "Mine"])
    page = rollouts.with_suffix(".html")
    assert (result.exit_code, result.stdout.strip()) == (0, str(page))
    assert "<title>Mine</title>" in page.read_text()


def test_its_place_can_be_named(rollouts: Path, tmp_path: Path) -> None:
    page = tmp_path / "a" / "b.html"
    result = CliRunner().invoke(app, ["report", str(rollouts), "--out", str(page), "--json"])
    written = json.loads(result.stdout)
    assert [written[name] for name in ("page", "groups", "rollouts", "cut_line")] == [str(page), 2, 7, None]
    assert page.exists()


def of_run(number: int, *groups: GroupRecord) -> str:
    run = RunRecord(
        id=f"run-{number}", environment="e", model=f"m<{number}>", settings="s", agentenv="0", began_unix_s=number
    )
    return "".join(group.model_copy(update={"run": run}).model_dump_json() + "\n" for group in groups)


def test_runs_in_one_file_are_listed_and_one_can_be_chosen(tmp_path: Path) -> None:
    file = tmp_path / "rollouts.jsonl"
    first, second, third = synthetic.few()[:3]
    file.write_text(of_run(1, first) + of_run(2, second) + of_run(1, third) + first.model_dump_json() + "\n")
    every = CliRunner().invoke(app, ["report", str(file)], env={"COLUMNS": "200"})
    assert every.exit_code == 0
    assert "3 runs have records here" in every.stderr
    assert "run-1  e, model m<1>: 2 groups, mean 0.430" in every.stderr
    assert "–  records that name no run: 1 groups" in every.stderr
    page = file.with_suffix(".html").read_text()
    assert "of 3 runs" in page
    assert "<td>m&lt;2&gt;</td>" in page
    for name, groups in (("run-1", 2), ("run-2", 1), ("last", 1)):
        result = CliRunner().invoke(app, ["report", str(file), "--json", "--run", name])
        assert json.loads(result.stdout)["groups"] == groups
        assert "of 3 runs" not in file.with_suffix(".html").read_text()
    assert "<dt>Run</dt><dd>run-2</dd>" in file.with_suffix(".html").read_text()
    unknown = CliRunner().invoke(app, ["report", str(file), "--run", "run-3"], env={"COLUMNS": "200"})
    assert unknown.exit_code == 2
    assert "no run is named run-3" in unknown.stderr
    assert "last, run-1, run-2" in unknown.stderr


def test_a_cut_line_is_named(rollouts: Path) -> None:
    rollouts.write_text(rollouts.read_text()[:-20])
    result = CliRunner().invoke(app, ["report", str(rollouts)], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert "line 2, the last, is incomplete and left out" in result.stderr
    again = CliRunner().invoke(app, ["report", str(rollouts), "--json"])
    assert (json.loads(again.stdout)["groups"], json.loads(again.stdout)["cut_line"]) == (1, 2)


GROUPS = '{"tokens": [[1]], "masks": [[-100]], "scores": [1.0], "messages": []}\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "is not a file"),
        ('{"x": 1}\n', "is not a group record"),
        (GROUPS, "is a scored group for a trainer (data_path_to_save_groups)"),
    ],
)
def test_what_holds_no_rollouts_is_refused(tmp_path: Path, text: str | None, said: str) -> None:
    file = tmp_path / "other.jsonl"
    if text is not None:
        file.write_text(text)
    result = CliRunner().invoke(app, ["report", str(file)])
    assert result.exit_code == 2
    assert said in result.stderr
    assert not file.with_suffix(".html").exists()
