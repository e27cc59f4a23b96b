from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentenv.agent.transcript import GroupRecord, RunRecord
from agentenv.cli.app import app
from tests import run_directories
from tests.browser import synthetic
from tests.run_directories import Played


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
    assert [written[name] for name in ("page", "groups", "rollouts", "left_out")] == [str(page), 2, 7, []]
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
    assert "note left out: " in result.stderr
    assert "rollouts.jsonl:2, the last line, is incomplete" in result.stderr
    again = CliRunner().invoke(app, ["report", str(rollouts), "--json"])
    found = json.loads(again.stdout)
    assert (found["groups"], found["left_out"]) == (1, [f"{rollouts}:2, the last line, is incomplete"])


def test_a_line_that_is_no_record_costs_no_other(rollouts: Path) -> None:
    rollouts.write_text('{"x": 1}\n' + rollouts.read_text())
    result = CliRunner().invoke(app, ["report", str(rollouts)], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert "7 rollouts in 2 groups" in result.stderr
    assert "rollouts.jsonl:1 is not a group record" in result.stderr


def test_a_run_is_given_by_its_directory_or_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = run_directories.write(tmp_path / "runs", Played("repair", "m-1", items=2))
    monkeypatch.chdir(tmp_path)
    for name in (str(directory), "repair", directory.name):
        result = CliRunner().invoke(app, ["report", name, "--json"])
        assert Path(json.loads(result.stdout)["page"]).resolve() == directory / "report.html"
    page = (directory / "report.html").read_text()
    assert "<title>repair · m-1 · 2026-02-25</title>" in page
    assert "<dt>Settings</dt><dd>digest-0</dd>" in page
    assert re.search(r"<dt>Tokens</dt><dd>[\d,]+ in, [\d,]+ out</dd>", page)


def test_instead_of_the_groups_file_its_neighbour_is_named(tmp_path: Path) -> None:
    directory = run_directories.write(tmp_path, Played("train", items=1, verb="process"))
    result = CliRunner().invoke(app, ["report", str(directory / "groups.jsonl")], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert "groups.jsonl:1 is a scored group for a trainer" in result.stderr
    assert f"next  give {directory / 'rollouts.jsonl'}" in result.stderr


GROUPS = '{"tokens": [[1]], "masks": [[-100]], "scores": [1.0], "messages": []}\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "is no run, no directory of runs and no file"),
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


def test_each_rollout_is_written_in_the_format_of_others(rollouts: Path, tmp_path: Path) -> None:
    directory = tmp_path / "atif"
    result = CliRunner().invoke(app, ["report", str(rollouts), "--atif", str(directory)])
    assert result.exit_code == 0
    assert result.stdout.split() == [str(rollouts.with_suffix(".html")), str(directory)]
    members = [member for group in synthetic.few()[:2] for member in group.trajectories]
    assert sorted(path.stem for path in directory.iterdir()) == sorted(member.trajectory for member in members)
    for member in members:
        document = json.loads((directory / f"{member.trajectory}.json").read_text())
        assert document["extra"]["score"] == member.score
    refused = CliRunner().invoke(app, ["report", str(rollouts), "--atif", str(rollouts)], env={"COLUMNS": "200"})
    assert refused.exit_code == 2
    assert "--atif" in refused.stderr
