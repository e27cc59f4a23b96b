"""Runs as rows: which runs are meant, and that nothing in them is lost without a word."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import pytest

from agentenv.errors import ConfigError, MissingExtraError
from agentenv.runs import load, load_calls, load_messages
from agentenv.runs.manifest import ROLLOUTS
from agentenv.runs.records import RecordError, find, read
from tests import programs_played, run_directories
from tests.browser import synthetic
from tests.run_directories import Played


@pytest.fixture
def team(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    monkeypatch.chdir(tmp_path)
    return run_directories.several(tmp_path / "runs", items=6)


def test_a_rollout_is_a_row(team: list[Path]) -> None:
    rows = load("repair-small")
    assert len(rows) == 24
    assert set(rows[0]) == set(rows.columns)
    first = next(iter(read(find(team[0])[0])[0].groups)).trajectories[0]
    row = rows[0]
    assert (row["name"], row["model"], row["item_id"]) == ("repair-small", "small-1", "boltons-000")
    assert (row["score"], row["fault"], row["steps"]) == (first.score, first.fault, len(first.steps))
    assert row["prompt_tokens"] == sum(step.usage["prompt_tokens"] for step in first.steps if step.usage)
    assert row["began"].timestamp() == pytest.approx(first.began_unix_s)
    assert json.loads(row["verification"]) == first.verification
    assert {row["run"] for row in rows} == {Played("repair-small").id}


@pytest.mark.parametrize(
    ("given", "runs"),
    [
        ([], 5),
        (["runs"], 5),
        (["repair-small"], 1),
        (["repair-l"], 2),
        (["runs/repair-small-20260225-061320"], 1),
        (["runs/repair-small-20260225-061320/rollouts.jsonl", "repair-large"], 2),
        (["repair-small", "repair-small-20260225-061320"], 1),
    ],
)
def test_a_run_is_found_by_its_place_or_name(team: list[Path], given: list[str], runs: int) -> None:
    assert len(find(*given)) == runs
    assert len({row["run"] for row in load(*given)}) == runs


def test_a_name_of_no_run_is_refused_with_the_nearest(team: list[Path]) -> None:
    with pytest.raises(ConfigError, match="repair-smal1 is no run") as refused:
        load("repair-smal1")
    assert "repair-small-20260225-061320" in refused.value.next_step


def test_a_file_of_several_runs_is_several(tmp_path: Path) -> None:
    file = tmp_path / "rollouts.jsonl"
    for played in (Played("a", items=2), Played("b", "other", items=3)):
        with file.open("a") as lines:
            lines.writelines(group.model_dump_json() + "\n" for group in played.groups())
    rows = load(file)
    assert [sum(row["model"] == model for row in rows) for model in ("small-1", "other")] == [8, 12]


def test_lines_that_are_no_records_are_named(team: list[Path]) -> None:
    file = team[0] / ROLLOUTS
    lines = file.read_text().splitlines(keepends=True)
    file.write_text(lines[0] + '{"group": 1}\n' + "".join(lines[1:-1]) + lines[-1][:-50])
    with pytest.warns(RuntimeWarning, match=r"rollouts\.jsonl:2 is not a group record.* and 1 more"):
        rows = load(team[0])
    assert len(rows) == 20
    assert [problem.partition("rollouts.jsonl:")[2].partition(" ")[0] for problem in rows.problems] == ["2", "7,"]
    assert "2 lines left out" in repr(rows)


def test_a_manifest_that_cannot_be_read_costs_no_rollout(team: list[Path]) -> None:
    (team[0] / "run.json").write_text("{")
    with pytest.warns(RuntimeWarning, match=r"run\.json is not a run's"):
        assert len(load(team[0])) == 24


def test_records_that_only_the_slower_parser_reads_are_rows(tmp_path: Path) -> None:
    record = synthetic.group("g", [synthetic.transcript("m", score=1.0, commands=["ls"])]).model_dump()
    record["trajectories"][0]["final_response"] = "\ud800"
    (tmp_path / "r.jsonl").write_text(json.dumps(record) + "\n")
    assert load(tmp_path / "r.jsonl")[0]["final_response"] == "\ud800"


def test_a_groups_file_is_refused(tmp_path: Path) -> None:
    run_directories.write(tmp_path, Played("train", items=1, verb="process"))
    with pytest.raises(RecordError, match="a scored group for a trainer"):
        load(next(tmp_path.glob("*/groups.jsonl")))


def test_who_plays_a_run_decides_its_state(team: list[Path]) -> None:
    killed = find(team[4])[0]
    assert read(killed)[0].state == "killed"
    before = killed.version()
    with run_directories.played_now(team[4]):
        assert read(killed)[0].state == "running"
        assert killed.version() != before


def test_pandas_knows_the_types(team: list[Path]) -> None:
    pandas = pytest.importorskip("pandas")
    frame = load().to_pandas()
    assert isinstance(frame, pandas.DataFrame)
    assert frame.groupby("name")["score"].mean()["repair-large"] > 0.3
    assert {name: str(frame[name].dtype) for name in ("score", "steps", "began", "prompt_tokens")} == {
        "score": "float64",
        "steps": "Int64",
        "began": "datetime64[us, UTC]",
        "prompt_tokens": "Int64",
    }
    assert list(load("repair-small")[:0]) == []


def test_polars_knows_the_types(team: list[Path]) -> None:
    polars = pytest.importorskip("polars")
    frame = load().to_polars()
    assert frame.schema["score"] == polars.Float64
    assert frame.schema["began"] == polars.Datetime("us", "UTC")
    assert frame.height == len(load())


@pytest.mark.parametrize("kind", ["pandas", "polars"])
def test_no_rows_are_a_frame_too(tmp_path: Path, kind: str) -> None:
    pytest.importorskip(kind)
    rows = load(below=tmp_path)
    assert len(rows) == 0
    assert list(getattr(rows, f"to_{kind}")().columns) == list(rows.columns)


@pytest.mark.parametrize("package", ["pandas", "polars"])
def test_a_package_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    real = builtins.__import__

    def importing(name: str, *rest: Any) -> Any:
        if name == package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", importing)
    with pytest.raises(MissingExtraError) as missing:
        getattr(load(below=tmp_path), f"to_{package}")()
    assert missing.value.next_step == f"pip install {package}"


def test_calls_and_messages_are_rows(team: list[Path]) -> None:
    calls, messages = load_calls("repair-small"), load_messages("repair-small")
    rollouts = load("repair-small")
    assert len(calls) == sum(row["calls"] for row in rollouts)
    assert json.loads(calls[0]["arguments"]) == {"command": "ls"}
    assert (calls[0]["tool"], calls[0]["exit_code"], calls[0]["stdout"]) == ("bash", 0, "output of ls\n")
    assert {row["role"] for row in messages} == {"system", "user", "assistant", "tool"}
    assert [row["index"] for row in messages[:3]] == [0, 1, 2]
    assert messages[2]["step"] == 0
    pytest.importorskip("pandas")
    pytest.importorskip("polars")
    for rows in (calls, messages):
        assert len(rows.to_pandas()) == len(rows.to_polars()) == len(rows)


def test_a_lost_call_has_no_result(tmp_path: Path) -> None:
    played = synthetic.transcript("m", score=None, commands=["ls"])
    played.steps[0].tool_calls[0] = played.steps[0].tool_calls[0].model_copy(update={"result": None})
    (tmp_path / "r.jsonl").write_text(synthetic.group("g", [played]).model_dump_json() + "\n")
    (row,) = load_calls(tmp_path / "r.jsonl")
    assert (row["fault"], row["exit_code"], row["timed_out"]) == ("infra", None, None)


def test_a_program_s_rollouts_calls_and_messages_are_rows(tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_text(programs_played.group().model_dump_json() + "\n")
    several, failed, ended = load(tmp_path / "r.jsonl")
    assert (several["program"], several["conversations"], several["dialects"]) == ("small-agent", 3, "chat, messages")
    assert (several["dropped"], several["refused"], several["program_s"]) == (7, 1, 5.5)
    assert [row["program_exit_code"] for row in (several, failed, ended)] == [0, 7, None]
    calls = load_calls(tmp_path / "r.jsonl")
    assert {row["fault"] for row in calls} == {"none"}, "no call was lost"
    assert [(row["conversation"], row["shown"]) for row in calls][:3] == [(1, "setup.py"), (1, "exit code 0"), (2, "")]
    messages = [row for row in load_messages(tmp_path / "r.jsonl") if row["trajectory"] == several["trajectory"]]
    counted = [[row["index"] for row in messages if row["conversation"] == number] for number in range(3)]
    assert [len(each) for each in counted] == [2, 8, 7]
    assert all(each == [*range(len(each))] for each in counted)
    assert {row["conversation"] for row in messages if row["main"]} == {1}
    own = next(row for row in messages if row["content"] == programs_played.OWN["content"])
    assert (own["role"], own["step"]) == ("assistant", None), "a program wrote it"


def test_the_built_in_loop_has_no_program(team: list[Path]) -> None:
    assert {(row["program"], row["conversations"], row["dropped"]) for row in load(team[0])} == {(None, None, None)}
    assert {(row["conversation"], row["main"]) for row in load_messages(team[0])} == {(0, True)}
    pytest.importorskip("pandas")
    pytest.importorskip("polars")
    for loaded in (load(team[0]), load_calls(team[0]), load_messages(team[0])):
        assert len(loaded.to_pandas()) == len(loaded.to_polars()) == len(loaded)
