"""Records with images, end to end: a real repair of a real package, built here from its Debian source."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from agentenv.report import read_records as read_rollouts
from agentenv.sdk.roots import store_directory
from agentenv.store import Store
from agentenv.tasks.base_image import make_base
from agentenv.tasks.scripted import play
from agentenv.tasks.swe import __main__ as command
from agentenv.tasks.swe import debian, releases
from agentenv.tasks.swe.__main__ import empty, oracle
from agentenv.tasks.swe.image_env import SweImageEnv
from agentenv.tasks.swe.records import read_records
from agentenv.testing import Call, Reply, ScriptedPolicy
from tests.debian_images import base_in_cache
from tests.integration.results import processed, rows

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="image slots are root's")

PATCH = "0007-Fix-CVE-2024-56326.patch"
RECORD = "pallets__jinja-0007-Fix-CVE-2024-56326"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = base_in_cache(tmp_path_factory.mktemp("swe") / "cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGENTENV_CACHE_DIR", str(directory))
        make_base(Store.open(store_directory()))
    return directory


@pytest.fixture(scope="module")
def records(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with one record, as the command makes it."""
    out = tmp_path_factory.mktemp("records")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGENTENV_CACHE_DIR", str(cache))
        patch.setenv("AGENTENV_STATE_DIR", str(out / "state"))
        patch.setattr(sys, "argv", ["debian", str(out), "--package", "jinja2", "--patch", PATCH])
        assert debian.main() == 0
    return out / "records.jsonl"


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTENV_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("AGENTENV_CACHE_DIR", str(cache))


async def played(records: Path, tmp_path: Path, commands: Sequence[str], **fields: Any) -> list[Any]:
    """One group: each player runs one command, which may name the gold patch as $GOLD."""
    gold = json.loads(records.read_text())["patch"]
    await play(
        tmp_path,
        SweImageEnv,
        {"dataset_name": str(records), "group_size": len(commands), **fields},
        lambda env: env.records,
        lambda _: [
            [Reply("", (Call("bash", {"command": text, "env": {"GOLD": gold}}),)), Reply("done")] for text in commands
        ],
    )
    (group,) = read_rollouts(tmp_path / "rollouts.jsonl")
    return list(group.trajectories)


def test_the_record_is_a_real_repair(records: Path) -> None:
    record = json.loads(records.read_text())
    assert record["instance_id"] == RECORD
    assert record["FAIL_TO_PASS"] == ["tests/test_security.py::TestStringFormatMap::test_indirect_call"]
    assert len(record["PASS_TO_PASS"]) > 10
    assert "sandbox.py" in record["patch"]
    assert "test_security.py" not in record["patch"]


async def test_a_policy_does_not_find_the_solution_in_its_image(records: Path, tmp_path: Path) -> None:
    (member,) = await played(
        records, tmp_path, [f"find / -xdev -name '*{PATCH[4:]}*'; ls /usr/src /usr/share | grep debian-"]
    )
    assert member.messages[3]["content"].startswith("exit code: 1\n"), "grep finds nothing, and find printed nothing"
    assert "stdout" not in member.messages[3]["content"]


@pytest.mark.timeout(1800)  # two installations of sympy, and its tests twice
def test_a_repair_of_sympy_by_pytest_and_by_sympys_own_runner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["releases", str(tmp_path), "--only", "sympy__sympy-1.13.1-vector"])
    assert releases.main() == 0
    record = json.loads((tmp_path / "records.jsonl").read_text())
    assert record["FAIL_TO_PASS"] == ["sympy/physics/vector/tests/test_printing.py::test_vector_pretty_print"]
    names = {field: [name.rpartition("::")[2] for name in record[field]] for field in ("FAIL_TO_PASS", "PASS_TO_PASS")}
    run = "import sys; from sympy.testing.runtests import test; test(*sys.argv[1:], verbose=True, colors=False)"
    how = {"test_command": f"python3 -c '{run}' {{files}}", "test_log": "swebench-sympy", "instance_id": "by-sympy"}
    last = "test_issue_14041"
    names["PASS_TO_PASS"] = [name for name in names["PASS_TO_PASS"] if name != last]  # its line ends with the file's
    with (tmp_path / "records.jsonl").open("a") as file:
        file.write(json.dumps({**record, **names, **how}) + "\n")
    monkeypatch.setattr(sys, "argv", ["swe", "--images", str(tmp_path / "records.jsonl")])
    capsys.readouterr()
    assert command.main() == 0, capsys.readouterr().out
    found = rows(capsys.readouterr().out)
    assert found == ["ok sympy__sympy-1.13.1-vector 1 0 S", "ok by-sympy 1 0 S", "2 of 2 ok"]


def test_the_gold_patch_scores_1_and_nothing_scores_0(
    records: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    for line in (".debian out/swe --package jinja2", " --images out/swe/records.jsonl"):
        assert f"    .venv/bin/python -m agentenv.tasks.swe{line}" in readme
    monkeypatch.setattr(sys, "argv", ["swe", "--images", str(records)])
    assert command.main() == 0
    assert rows(capsys.readouterr().out) == [f"ok {RECORD} 1 0 S", "1 of 1 ok"]


async def test_a_solution_counts_whatever_the_machine_looks_like_and_nothing_else_does(
    records: Path, tmp_path: Path
) -> None:
    forged = "printf '#!/bin/bash\\necho PASSED tests/test_security.py::TestStringFormatMap::test_indirect_call\\n'"
    hook = '\'import os\\nos.environ["PYTEST_ADDOPTS"] = "--co"\\n\''
    solver, forger, hooker, committer, destroyer = await played(
        records,
        tmp_path,
        [
            'git apply <<< "$GOLD" && rm -rf /usr/lib/python3* /usr/bin/python3*; git config diff.external /bin/false',
            f"{forged} > /usr/bin/python3; setsid sleep 1000 & echo x > unrelated",
            f"printf {hook} > conftest.py; printf {hook} > tests/conftest.py; rm tests/test_security.py",
            'git apply <<< "$GOLD" && git commit -qam mine -c user.name=a; git add -A; echo tests >> .gitignore',
            "rm -rf .git",
        ],
        agent_max_steps=2,
    )
    assert [member.score for member in (solver, forger, hooker, committer, destroyer)] == [1.0, 0.0, 0.0, 1.0, 0.0]
    assert {member.fault for member in (solver, forger, hooker, committer, destroyer)} == {"none"}
    assert solver.verification["changed"] == ["src/jinja2/sandbox.py"]
    assert forger.verification["changed"] == ["unrelated"]
    assert hooker.verification["put back"] == ["conftest.py", "tests/conftest.py", "tests/test_security.py"]
    assert "its change cannot be read" in destroyer.verification["reason"]


async def test_an_image_of_another_commit_is_the_tasks_fault(records: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({**json.loads(records.read_text()), "base_commit": "f" * 40}))
    (member,) = await played(other, tmp_path, ["true"])
    assert (member.score, member.fault) == (None, "task")
    assert "has no ffff" in member.error


async def test_the_environments_own_command_plays_records_for_a_model(records: Path, tmp_path: Path) -> None:
    (record,) = read_records([json.loads(records.read_text())])
    async with ScriptedPolicy({RECORD: [oracle(record), empty(record)]}) as policy:
        groups = await processed(tmp_path, policy, "agentenv.tasks.swe.image_env", {"dataset_name": str(records)})
    assert [[member.score for member in group.trajectories] for group in groups] == [[1.0, 0.0]]
    assert record.problem_statement in groups[0].trajectories[0].messages[1]["content"]
