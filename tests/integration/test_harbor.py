"""The harbor environment, end to end: our own task directories in slots of their own images."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from agentenv.cli.app import imported
from agentenv.report import read_records
from agentenv.sdk.roots import store_directory
from agentenv.store import Store
from agentenv.tasks.base_image import make_base
from agentenv.tasks.harbor.directories import read_task
from agentenv.tasks.harbor.env import HarborEnv
from agentenv.tasks.harbor.players import empty
from agentenv.tasks.scripted import play
from agentenv.testing import Call, Reply, ScriptedPolicy
from tests.debian_images import base_in_cache
from tests.integration.results import processed, rows
from tests.integration.test_env_local import leftovers

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="image slots are root's")

README = Path(__file__).parents[2] / "README.md"
TASKS = Path(__file__).parents[2] / "examples/tasks"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache whose image store has the base that the tasks' Dockerfiles begin with."""
    directory = base_in_cache(tmp_path_factory.mktemp("harbor") / "cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGENTENV_CACHE_DIR", str(directory))
        make_base(Store.open(store_directory()))
    return directory


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTENV_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("AGENTENV_CACHE_DIR", str(cache))


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        imported("tasks").main(["check", *map(str, arguments)])
    return int(ended.value.code or 0)


@pytest.mark.timeout(1800)  # two rollouts of every task of the corpus, which install packages: two minutes of CPU
def test_the_oracle_scores_1_and_the_empty_agent_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "    .venv/bin/agentenv tasks check examples/tasks --network\n" in README.read_text()
    assert run(TASKS, "--network", "--out", tmp_path) == 0
    tasks = sorted(path.name for path in TASKS.iterdir())
    *played, end = rows(capsys.readouterr().out)
    assert sorted(played) == [f"ok {task} 1 0 S" for task in tasks]
    assert end == f"{len(tasks)} of {len(tasks)} ok"
    for group in read_records(tmp_path / "rollouts.jsonl"):
        for member in group.trajectories:
            failed = "passed" in member.verification["rewards"] and not member.score  # pytest's own exit code
            assert (member.fault, member.verification["exit code"]) == ("none", int(failed))
    assert leftovers(tmp_path) == []


def test_one_agent_alone_and_a_task_that_is_not_solved_by_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = tmp_path / "tasks"
    shutil.copytree(TASKS / "count-requests", tasks / "count-requests")
    (tasks / "count-requests/solution/solve.sh").write_text("echo '200 1 1' > /app/report.txt\n")
    assert run(tasks, "--agent", "oracle") == 1
    assert rows(capsys.readouterr().out)[0].startswith("BAD count-requests 0 S oracle: ")


@pytest.mark.parametrize(("sealed", "score"), [(False, 1.0), (True, 0.0)])
def test_processes_are_alive_for_the_verifier_unless_the_slot_is_sealed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str],
    *, sealed: bool, score: float,
) -> None:  # fmt: skip
    task = TASKS / "keep-a-heartbeat"
    how = ["--sealed"] if sealed else []
    assert run(task, "--agent", "oracle", *how) == int(score != 1)
    assert f"keep-a-heartbeat {score:g} S" in rows(capsys.readouterr().out)[0]


async def played(tmp_path: Path, commands: Sequence[str], **fields: Any) -> list[Any]:
    """One group on count-requests: each player runs one command."""
    await play(
        tmp_path,
        HarborEnv,
        {"tasks": str(TASKS / "count-requests"), "group_size": len(commands), **fields},
        lambda env: env.tasks,
        lambda _: [[Reply("", (Call("bash", {"command": text}),)), Reply("done")] for text in commands],
    )
    (group,) = read_records(tmp_path / "rollouts.jsonl")
    return list(group.trajectories)


async def test_a_policy_may_be_root_and_what_it_puts_in_the_verifiers_way_is_removed(tmp_path: Path) -> None:
    planted, hidden, broken = await played(
        tmp_path,
        [
            "mkdir -p /logs/verifier /tests; echo 1 > /logs/verifier/reward.txt; touch /tests/expected.txt; id -u",
            "ln -sfn /etc /tests; ln -sfn /etc /logs/verifier; cp /app/access.log /app/report.txt",
            "rm -rf /usr/bin/bash /bin/bash /usr/bin/cat; touch /usr/bin/mine",
        ],
    )
    assert planted.messages[3]["content"] == "exit code: 0\nstdout:\n0"
    for member in (planted, hidden, broken):
        assert (member.score, member.fault) == (0.0, "none")
    assert planted.verification["rewards"] == {"reward": 0.0}
    assert hidden.verification["rewards"] == {"reward": 0.0}
    assert "no reward" in broken.verification["reason"] or "could not be run" in broken.verification["reason"]


async def test_each_phase_has_its_own_network(tmp_path: Path) -> None:
    task = tmp_path / "tasks/sum-orders"
    shutil.copytree(TASKS / "sum-orders", task)
    (task / "tests/test.sh").write_text("wc -l < /proc/net/route > /logs/verifier/reward.txt\n")
    routes = "wc -l < /proc/net/route"
    (member,) = await played(tmp_path, [routes], tasks=str(task), allow_network=True)
    assert member.messages[3]["content"] == "exit code: 0\nstdout:\n1", "a heading, and no route"
    assert member.score > 1


@pytest.mark.parametrize(("storage", "said"), [("memory", "full"), ("disk", "room"), ("auto", "room")])
async def test_storage_is_in_memory_or_on_disk(tmp_path: Path, storage: str, said: str) -> None:
    task = tmp_path / "tasks/count-requests"
    shutil.copytree(TASKS / "count-requests", task)
    toml = (task / "task.toml").read_text()
    (task / "task.toml").write_text(toml.replace("storage_mb = 512", "storage_mb = 1024"))
    half_of_the_memory_is_less = "head -c 600M /dev/zero > /big 2> /dev/null && echo room || echo full"
    (member,) = await played(tmp_path, [half_of_the_memory_is_less], tasks=str(task), storage=storage)
    assert member.messages[3]["content"].endswith(said)


async def test_a_verifier_that_takes_too_long_scores_0(tmp_path: Path) -> None:
    slow = tmp_path / "tasks/count-requests"
    shutil.copytree(TASKS / "count-requests", slow)
    toml = slow / "task.toml"
    toml.write_text(toml.read_text().replace("timeout_sec = 120.0", "timeout_sec = 2.0"))
    (slow / "tests/test.sh").write_text("echo 1 > /logs/verifier/reward.txt; sleep 1000\n")
    (member,) = await played(tmp_path, ["true"], tasks=str(slow))
    assert (member.score, member.fault) == (0.0, "none")
    assert member.verification["reason"] == "the verifier took more than 2 s"


async def test_agent_and_verifier_are_who_the_task_says(tmp_path: Path) -> None:
    task = tmp_path / "tasks/service-account"
    shutil.copytree(TASKS / "service-account", task)
    toml = task / "task.toml"
    ready = "[environment.healthcheck]\ncommand = 'id -un > /srv/ready'\n"
    toml.write_text(toml.read_text().replace("[agent]", '[agent]\nuser = "games"') + ready)
    (task / "tests/test.sh").write_text('[ "$(id -un)" = root ]; echo $((! $?)) > /logs/verifier/reward.txt\n')
    changes = {"tasks": str(task)}
    (member,) = await played(tmp_path, ["id -un; echo $SERVICE; cat /srv/ready; touch /tests 2>&1"], **changes)
    assert member.messages[3]["content"].split("\n")[2:5] == ["games", "ledger", "root"]
    assert "Permission denied" in member.messages[3]["content"]
    assert (member.score, member.fault) == (1.0, "none")


async def test_a_verifier_elsewhere_gets_what_is_declared_and_nothing_else(tmp_path: Path) -> None:
    task = tmp_path / "tasks/count-requests"
    shutil.copytree(TASKS / "count-requests", task)
    toml = (task / "task.toml").read_text().replace("[verifier]", '[verifier]\nenvironment_mode = "separate"')
    (task / "task.toml").write_text(f'artifacts = ["/app/report.txt", "/app/missing", "/app/notes"]\n{toml}')
    verify = "[ ! -e /srv/hidden ] && diff /app/access.log /app/report.txt && cat /app/notes/deep/a /logs/artifacts/b"
    (task / "tests/test.sh").write_text(f"{verify} && echo 1 > /logs/verifier/reward.txt\n")
    leave = "cp access.log report.txt; mkdir -p notes/deep; echo a > notes/deep/a; echo b > /logs/artifacts/b"
    good, forged, much = await played(
        tmp_path,
        [
            f"{leave}; rm -f /usr/bin/diff /usr/bin/cat; touch /srv/hidden; echo x >> access.log",
            "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; printf '#!/bin/sh\\n' > /usr/bin/diff",
            "truncate -s 2G report.txt",
        ],
        tasks=str(task),
    )
    assert [member.score for member in (good, forged, much)] == [1.0, 0.0, 0.0]
    assert {member.fault for member in (good, forged, much)} == {"none"}
    assert good.verification["output"] == "a\nb\n"
    assert "no reward" in forged.verification["reason"]
    assert "/app/report.txt cannot be copied" in much.verification["reason"]
    assert leftovers(tmp_path) == []


def test_what_cannot_be_played_is_listed_and_the_rest_is_played(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    for name, change in (("good", ""), ("gpu", "gpus = 1"), ("large", "cpus = 4096"), ("unsolved", "")):
        shutil.copytree(TASKS / "count-requests", tmp_path / "tasks" / name)
        toml = (tmp_path / "tasks" / name / "task.toml").read_text()
        (tmp_path / "tasks" / name / "task.toml").write_text(toml.replace("cpus = 1", change or "cpus = 1"))
    shutil.rmtree(tmp_path / "tasks/unsolved/solution")
    assert run(tmp_path / "tasks") == 0
    good, gpu, large, unsolved, end = rows(capsys.readouterr().out)
    assert (good, end) == ("ok good 1 0 S", "1 of 1 ok, 3 refused")
    assert gpu == "-- gpu refused: environment.gpus: task gpu: slots have no GPU (task.toml)"
    assert large.startswith("-- large refused: environment.cpus: task large: requests 4096 cores")
    assert unsolved.startswith("-- unsolved refused: solution: task unsolved: is missing")
    assert run(tmp_path / "tasks", "--strict") == 2
    assert "slots have no GPU" in capsys.readouterr().err
    assert [record.getMessage()[:27] for record in caplog.records if record.getMessage().startswith("refused: ")] == [
        "refused: environment.cpus: ",
        "refused: solution: task uns",
    ]
    assert run(tmp_path / "tasks", "--only-tasks", "gpu,large") == 2


def test_more_than_this_machine_has_is_refused_before_anything_is_played_unless_it_is_capped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = tmp_path / "count-requests"
    shutil.copytree(TASKS / "count-requests", task)
    toml = (task / "task.toml").read_text().replace("cpus = 1", "cpus = 4096")
    (task / "task.toml").write_text(toml)
    assert run(task, "--agent", "oracle") == 2
    assert "environment.cpus: task count-requests: requests 4096 cores" in capsys.readouterr().err
    assert run(task, "--agent", "oracle", "--max-cpus", 1) == 0


async def test_the_environments_own_command_plays_tasks_for_a_model(tmp_path: Path) -> None:
    task = read_task(TASKS / "count-requests", {})
    solution = Call("bash", {"command": (task.solution / "solve.sh").read_text()})
    async with ScriptedPolicy({task.name: [[Reply("", (solution,)), Reply("done")], empty(task)]}) as policy:
        groups = await processed(tmp_path, policy, "agentenv.tasks.harbor.env", {"tasks": str(task.directory)})
    assert [[member.score for member in group.trajectories] for group in groups] == [[1.0, 0.0]]
    assert groups[0].trajectories[0].messages[1]["content"].startswith("[task:count-requests]")
