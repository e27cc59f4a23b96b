"""The swe environment, end to end: repositories made with git, real slots, oracle, idler and forgers."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agentenv.agent.transcript import Transcript
from agentenv.errors import ConfigError, TaskError
from agentenv.report import read_records
from agentenv.tasks.scripted import Table
from agentenv.tasks.swe import __main__ as command
from agentenv.tasks.swe.__main__ import play
from agentenv.tasks.swe.env import SweConfig, SweEnv
from agentenv.testing import Call, Player, Reply, ScriptedPolicy
from tests.integration.results import rows
from tests.integration.test_env_local import leftovers
from tests.unit.env.env_stubs import server_of, settings
from tests.unit.tasks.swe_repos import dataset, smith

SLUGS, SPANS, TALLY = "acme__slugs-1", "acme__spans-1", "acme__tally-1"
MODES = ("fake", "local")
BLANK_ONLY = "sed -i 's/text.lower()/text.lower().strip()/' slugs.py"
SOLVED = "sed -i 's/text.lower().*/\"-\".join(text.lower().split())/' slugs.py"
HOOK = (
    "import pytest\n@pytest.hookimpl(hookwrapper=True)\ndef pytest_runtest_makereport():\n"
    "    report = (yield).get_result()\n    report.outcome = 'passed'\n"
)
PATCHED_PYTEST = """
from _pytest import reports
_true = reports.TestReport.from_item_and_call.__func__
def _lie(cls, item, call):
    report = _true(cls, item, call)
    report.outcome = "passed"
    return report
reports.TestReport.from_item_and_call = classmethod(_lie)
"""


def into(path: str, text: str, how: str = ">") -> str:
    return f"cat {how} {path} <<'EOF'\n{text}\nEOF"


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTENV_STATE_DIR", str(tmp_path / "state"))


@asynccontextmanager
async def solving(
    tmp_path: Path,
    players: Sequence[str],
    item: str = SLUGS,
    made: tuple[Path, Path] | None = None,
    **changed: Any,
) -> AsyncIterator[SweEnv]:
    """An environment in which each player runs one command."""
    file, repositories = made or dataset(tmp_path)[:2]
    script: list[Player] = [[Reply("", (Call("bash", {"command": text}),)), Reply("done")] for text in players]
    values = settings(tmp_path).model_dump(exclude_unset=True)
    values |= {"dataset_name": str(file), "repositories": str(repositories), "clone_url": "", "item_retries": 0}
    values |= {"group_size": len(players), "max_containers": 1, "slots_per_container": 4, **changed}
    async with ScriptedPolicy({item: script}) as policy, SweEnv(SweConfig(**values), server_of(policy)) as env:
        yield env


async def played(tmp_path: Path, players: Sequence[str], item: str = SLUGS, **changed: Any) -> list[Transcript]:
    """One group of these players."""
    async with solving(tmp_path, players, item, **changed) as env:
        await env.collect_trajectories(env.item_of(env.records[item]))
    (group,) = read_records(tmp_path / "rollouts.jsonl")
    return list(group.trajectories)


@pytest.mark.parametrize("mode", MODES)
async def test_the_gold_patch_scores_1_and_nothing_scores_0(tmp_path: Path, mode: str) -> None:
    file, repositories, _ = dataset(tmp_path)
    fields = {"dataset_name": str(file), "repositories": str(repositories), "clone_url": "", "tool_pool_mode": mode}
    table = Table(["oracle", "empty"])
    await play(tmp_path, table, **fields)
    assert [(one.record, one.scores) for one in table.results] == [(name, (1.0, 0.0)) for name in (SLUGS, SPANS, TALLY)]
    for group in read_records(tmp_path / "rollouts.jsonl"):
        solved, idle = (member.verification for member in group.trajectories)
        assert (solved["resolved"], idle["resolved"]) == (True, False)
        assert "changed" not in idle
        assert "THE SOLUTION" not in json.dumps(group.trajectories[1].model_dump(mode="json"))
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("what", ["a fix of the base commit", "a bug in the base commit"])
async def test_records_whose_tests_are_in_the_repository(tmp_path: Path, what: str) -> None:
    row = smith(tmp_path / "repositories")[what]
    file = tmp_path / "records.jsonl"
    file.write_text(json.dumps(row) + "\n")
    fields = {"dataset_name": str(file), "repositories": str(tmp_path / "repositories"), "clone_url": ""}
    fields |= {"patch_is": "bug" if what.startswith("a bug") else "fix", "tool_pool_mode": "local"}
    (group,) = await play(tmp_path, Table(["oracle", "empty"]), **fields)
    assert [member.score for member in group.trajectories] == [1.0, 0.0]
    (tmp_path / "rollouts.jsonl").unlink()
    forged = "printf 'def test_space(): pass\\ndef test_lower(): pass\\n' | tee checks.py > tests/test_more.py"
    found = await played(tmp_path, [forged], "acme__smith-1", made=(file, tmp_path / "repositories"), **fields)
    assert (found[0].score, found[0].fault) == (0.0, "none")
    assert found[0].verification["put back"] == ["checks.py", "tests/test_more.py"]


async def test_half_a_solution_and_one_that_breaks_something(tmp_path: Path) -> None:
    breaking = f"{SOLVED}; sed -i 's/text.lower()/text/' slugs.py"
    players = [SOLVED, BLANK_ONLY, breaking, "true"]
    found = await played(tmp_path, players, tool_pool_mode="local", reward="share")
    assert [member.score for member in found] == [1.0, 0.5, 0.0, 0.0]
    assert found[1].verification["still failing"] == ["tests/test_slugs.py::test_spaces"]
    assert found[2].verification["newly broken"] == ["tests/test_slugs.py::test_lower"]
    assert found[2].verification["changed"] == ["slugs.py"]


async def test_half_a_solution_is_none_unless_shares_are_rewarded(tmp_path: Path) -> None:
    found = await played(tmp_path, [SOLVED, BLANK_ONLY])
    assert [member.score for member in found] == [1.0, 0.0]
    assert found[1].verification["still failing"] == ["tests/test_slugs.py::test_spaces"]


FORGERIES = {
    "tests replaced": into("tests/test_slugs.py", "def test_spaces(): pass\ndef test_blank(): pass"),
    "conftest": into("conftest.py", HOOK) + "; cp conftest.py tests/",
    "sitecustomize": into("sitecustomize.py", HOOK),
    "pytest.ini": "printf '[pytest]\\naddopts = --collect-only\\n' > pytest.ini; cp pytest.ini tox.ini",
    "a module in pytest's place": "mkdir _pytest; echo 'def main(*a, **k): return 0' > pytest.py",
    "exit at import": into("slugs.py", "import os; os._exit(0)", ">>"),
    "pytest patched from the source": into("slugs.py", PATCHED_PYTEST, ">>"),
    "no source": "rm slugs.py",
    "a link out of the workspace": "rm slugs.py; ln -s /etc/passwd slugs.py",
    "a pipe for a source": "rm slugs.py; mkfifo slugs.py",
    "a directory for a source": "rm slugs.py; mkdir slugs.py",
    "an enormous source": "head -c 9000000 /dev/zero >> slugs.py",
    "not text": "head -c 3000 /dev/urandom > slugs.py",
    "locked": "chmod 000 tests slugs.py",
    "locked workspace": "chmod 000 .",
    "much text": "for n in $(seq 12); do head -c 1500000 /dev/zero > $n.txt; done",
    "many files": "mkdir many; cd many; seq 1 5000 | xargs touch",
    "full disk": "head -c 3000000000 /dev/zero > big; true",
    "odd names": "touch $'a\\nb' $'\\xff\\xfe'; mkdir $'c\\td'; touch $'c\\td'/x",
}


async def test_no_forgery_is_scored(tmp_path: Path) -> None:
    found = await played(tmp_path, list(FORGERIES.values()), tool_pool_mode="local", slot_workspace_mib=128)
    told = {name: (member.score, member.fault, member.error) for name, member in zip(FORGERIES, found, strict=True)}
    assert told == dict.fromkeys(FORGERIES, (0.0, "none", ""))
    kept = dict(zip(FORGERIES, (member.verification for member in found), strict=True))
    assert "tests/test_slugs.py" in kept["tests replaced"]["put back"]
    assert "16777216 bytes" in kept["much text"]["reason"]
    assert "500 files of the workspace have changed" in kept["many files"]["reason"]
    assert "control tests" in kept["pytest patched from the source"]["reason"]


async def test_what_is_left_beside_a_solution_does_not_cost_it(tmp_path: Path) -> None:
    beside = [
        into("tests/test_slugs.py", "def test_mine(): assert False"),
        "git add -A; git commit -qm mine; rm -rf .git; mkdir -p .venv/lib; seq 1 900 | (cd .venv/lib; xargs touch)",
        "mkfifo pipe; ln -s /etc away; touch $'a\\nb' $'\\xff'; rm README.md run.sh",
    ]
    found = await played(tmp_path, [f"{SOLVED}; {more}" for more in beside], tool_pool_mode="local")
    assert [member.score for member in found] == [1.0, 1.0, 1.0], [member.verification for member in found]
    assert found[2].verification["changed"] == ["README.md", "away", "pipe", "run.sh", "slugs.py"]


async def test_the_workspace_has_git_and_the_tests_run_as_the_task_says(tmp_path: Path) -> None:
    commands = [
        "git log --all --format=%s; git status --porcelain | wc -l",
        "PYTHONPATH=src:lib:$PYTHONPATH python3 -m pytest -q -o addopts= tests | tail -n 1",
    ]
    found = await played(tmp_path, commands, SPANS, tool_pool_mode="local")
    said = [member.steps[0].tool_calls[0].result for member in found]
    assert said[0] is not None
    assert said[1] is not None
    assert said[0].stdout == "The repository before the task\n0\n"
    assert "1 passed" in said[1].stdout
    task = found[0].messages[1]["content"]
    assert "PYTHONPATH=src:lib:$PYTHONPATH python3 -m pytest" in task
    assert "test_apart" not in json.dumps(found[0].messages)


@pytest.mark.parametrize("mode", MODES)
async def test_dependencies_are_seen_by_the_policy_and_by_the_tests(tmp_path: Path, mode: str) -> None:
    dependencies = tmp_path / "dependencies"
    (dependencies / "acme__slugs/1.0").mkdir(parents=True)
    (dependencies / "acme__slugs/1.0/joiner.py").write_text("def join(words):\n    return '-'.join(words)\n")
    solution = "from joiner import join\n\n\ndef slug(text):\n    return join(text.lower().split())\n"
    found = await played(tmp_path, [into("slugs.py", solution)], tool_pool_mode=mode, dependencies=str(dependencies))
    assert found[0].score == 1.0, found[0].verification
    assert "acme__slugs/1.0" in found[0].messages[1]["content"]


async def test_a_record_that_does_not_fit_its_repository_is_an_error_and_no_score(tmp_path: Path) -> None:
    async with solving(tmp_path, ["true"]) as env:
        wrong = env.records[SLUGS].patch.replace("text.lower()", "text.upper()")
        object.__setattr__(env.records[SLUGS], "patch", wrong)
        group, left = await env.collect_trajectories(env.item_of(env.records[SLUGS]))
    assert (group, left) == (None, [])
    (record,) = read_records(tmp_path / "rollouts.jsonl")
    assert record.trajectories[0].fault == TaskError.fault
    assert "patch: acme__slugs-1: does not apply" in record.trajectories[0].error


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"dataset_name": None}, "dataset_name"),
        ({"repositories": "/nowhere"}, "acme/slugs is not in /nowhere"),
        ({"only_repos": ["acme/none"]}, "acme/slugs"),
        ({"verification": "live"}, "verification"),
        ({"clone_url": "https://localhost/x.git"}, "{repo}"),
        ({"dependencies": "/nowhere"}, "dependencies"),
    ],
)
async def test_wrong_settings_are_named(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        async with solving(tmp_path, ["true"], **changed):
            pass
    assert said in str(caught.value)


async def test_a_dataset_of_the_datasets_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    _, repositories, rows = dataset(tmp_path / "made")
    named = tmp_path / "named"
    named.mkdir()
    texts = [{**row, **{key: json.dumps(row[key]) for key in LISTS if isinstance(row[key], list)}} for row in rows]
    (named / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
    async with solving(tmp_path, ["true"], dataset_name=str(named), repositories=str(repositories)) as env:
        assert list(env.records) == [SLUGS, SPANS, TALLY]
        assert [(await env.get_next_item())["instance_id"] for _ in range(4)] == [SLUGS, SPANS, TALLY, SLUGS]


LISTS = ("FAIL_TO_PASS", "PASS_TO_PASS")


def test_the_command_says_which_records_are_not_sound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, repositories, made = dataset(tmp_path)
    made[2]["PASS_TO_PASS"].append("test/test_it.py::TallyTest::test_never_there")
    file.write_text("".join(json.dumps(row) + "\n" for row in made))
    given = ["swe", str(file), "--repositories", str(repositories), "--fake", "--only-instances", f"{SLUGS},{TALLY}"]
    monkeypatch.setattr(sys, "argv", given)
    assert command.main() == 1
    assert rows(capsys.readouterr().out) == [
        f"ok {SLUGS} 1 0 S",
        f"BAD {TALLY} 0 0 S oracle: not run: test/test_it.py::TallyTest::test_never_there",
        "1 of 2 ok",
    ]
    monkeypatch.setattr(sys, "argv", [*given[:-1], SLUGS, "--oracle"])
    assert command.main() == 0
    assert rows(capsys.readouterr().out) == [f"ok {SLUGS} 1 S", "1 of 1 ok"]
    kept = [*given, "--out", str(tmp_path / "kept")]
    monkeypatch.setattr(sys, "argv", kept)
    assert command.main() == 1
    first = capsys.readouterr().out
    log = tmp_path / "kept" / "rollouts.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:1]))
    monkeypatch.setattr(sys, "argv", [*kept, "--resume"])
    assert command.main() == 1
    assert rows(capsys.readouterr().out) == rows(first)
    assert len(log.read_text().splitlines()) == 2, "the first was not played again"
    monkeypatch.setattr(sys, "argv", [*given, "--resume"])
    with pytest.raises(SystemExit, match="2"):
        command.main()
    assert "--out DIRECTORY" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", [*given[:-1], "nobody"])
    assert command.main() == 2
    assert "only_instances" in capsys.readouterr().err
