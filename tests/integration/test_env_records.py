"""What commands of an environment write down, and how they end when that, or a score, is missing."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agentenv.agent.parsers import ParsedCall
from agentenv.agent.parsers.hermes import HermesParser
from agentenv.agent.transcript import GroupRecord
from agentenv.cli.app import app
from agentenv.testing import Failure, Reply, ScriptedPolicy, Turn
from tests.integration import test_env_commands as commands
from tests.unit.env.env_stubs import IDLE, SOLVE

NO_SPACE = "No space left on device"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk with room for some groups, and records, of SOLVE and IDLE, and not for eight."""
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40k,mode=1777", "none", disk], check=True)
    try:
        yield disk
    finally:
        subprocess.run(["umount", disk], check=True)


def results(log: str) -> dict[str, str]:
    """The results at the end, by name."""
    rows = [line.split(maxsplit=1) for line in log.splitlines() if not line.startswith(" ")]
    return {row[0]: row[1] for row in rows if len(row) == 2}


async def play(directory: Path, verb: str, script: Any = None, **changed: Any) -> tuple[int, str]:
    """A command of 8 groups, or so many items, unless ``changed``."""
    settings: dict[str, Any] = {"env__total_steps": 8, "env__eval_items": 8, **changed}
    async with ScriptedPolicy(script or {"*": [SOLVE, IDLE]}) as policy:
        return await commands.run(directory, verb, *commands.flags(directory, policy, **settings))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts; /dev/full is the same for everybody")
@pytest.mark.parametrize("field", ["rollouts_path", "data_path_to_save_groups"])
async def test_a_disk_that_becomes_full_keeps_whole_lines_and_is_reported(
    tmp_path: Path, small_disk: Path, field: str
) -> None:
    file = small_disk / "kept.jsonl"
    status, log = await play(
        tmp_path, "process", **{"env__data_path_to_save_groups": tmp_path / "g.jsonl", f"env__{field}": file}
    )
    what = {"rollouts_path": "records", "data_path_to_save_groups": "groups"}[field]
    kept = [json.loads(line) for line in file.read_text().splitlines()]
    assert 0 < len(kept) < 8, log
    assert file.read_text().endswith("\n")
    assert status == 1, log
    lost = f"{8 - len(kept)} {what}: {NO_SPACE}"
    assert f"lost     {lost}\n" in log
    assert results(log)["scored"].startswith("16 of 16 rollouts")
    assert log.splitlines()[-1].startswith(f"InfraError: lost {lost}")
    assert not list(small_disk.glob("*.html"))  # of the groups: there is no room for all of it
    assert log.count(f"cannot be written to {file}: {NO_SPACE}") == 1
    assert "Traceback" not in log


@pytest.mark.parametrize("verb", ["process", "evaluate"])
async def test_records_that_cannot_be_written_end_a_command_with_1(tmp_path: Path, verb: str) -> None:
    (tmp_path / "evals" / "metrics.json").mkdir(parents=True)
    where = {"env__rollouts_path": "/dev/full", "env__data_dir_to_save_evals": tmp_path / "evals"}
    status, log = await play(tmp_path, verb, **where)
    assert status == 1, log
    evaluation = "; lost 1 evaluation: Is a directory" * (verb == "evaluate")
    assert log.splitlines()[-1] == f"InfraError: lost 8 records: {NO_SPACE}{evaluation}"
    assert f"lost     8 records: {NO_SPACE}\n" in log
    assert "Traceback" not in log


@pytest.mark.parametrize("verb", ["process", "evaluate"])
async def test_an_item_without_a_score_ends_a_command_with_1(tmp_path: Path, verb: str) -> None:
    script = {"item-2": [[Failure(404)]], "*": [SOLVE]}
    status, log = await play(tmp_path, verb, script, env__infra_retries=0, env__item_retries=1)
    assert status == 1, log
    assert results(log)["dropped"] == "1 item without a score: item-2"
    error = "× ModelServerError: "
    assert log.splitlines()[-1].startswith(f"InfraError: 1 item without a score: item-2 ({1 + (verb == 'process')} ")
    assert error in log.splitlines()[-1]
    assert len(results(log)["scored"].partition(" of ")[0]) in (1, 2)


async def test_partial_groups_and_retried_rollouts_end_with_0(tmp_path: Path) -> None:
    failures = iter([Failure(404)])

    def failing_once(turn: Turn) -> Reply | Failure:
        return next(failures, Reply("done"))

    script = {"*": [failing_once, [Failure(404)]]}
    status, log = await play(tmp_path, "process", script, env__infra_retries=1, env__total_steps=2)
    assert status == 0, log
    assert "a new attempt follows: ModelServerError" in log
    assert results(log)["scored"].startswith("2 of 4 rollouts")
    assert "dropped" not in results(log)


async def test_two_runs_in_one_file_are_told_apart(tmp_path: Path) -> None:
    groups = tmp_path / "groups.jsonl"
    changes: list[dict[str, Any]] = [{}, {}, {"env__agent_max_steps": 7}]
    logs = [
        await play(tmp_path, "process", env__total_steps=2, env__data_path_to_save_groups=groups, **change)
        for change in changes
    ]
    assert [status for status, _ in logs] == [0, 0, 0], logs
    file = tmp_path / "rollouts.jsonl"
    records = [GroupRecord.model_validate_json(line).run for line in file.read_text().splitlines()]
    first, second, third = (one for one in records[::2] if one is not None)
    assert records == [first, first, second, second, third, third]
    assert len({first.id, second.id, third.id}) == 3
    assert first.began_unix_s <= second.began_unix_s <= third.began_unix_s
    assert (first.environment, first.model, first.agentenv) == ("command", "scripted", "0.1.0")
    assert first.settings == second.settings != third.settings
    ends = [log.splitlines()[-1].strip() for _, log in logs]
    assert ends == [f"agentenv report {file}"] + [f"agentenv report {file} --run {run.id}" for run in (second, third)]

    shown = CliRunner().invoke(app, ["report", str(file), "--json"])
    assert [run["id"] for run in json.loads(shown.stdout)["runs"]] == [first.id, second.id, third.id]
    chosen = CliRunner().invoke(app, ["report", str(file), "--json", "--run", second.id])
    assert json.loads(chosen.stdout)["groups"] == 2


async def test_a_command_that_does_not_start_leaves_no_empty_file(tmp_path: Path, unused_tcp_port: int) -> None:
    url = f"http://127.0.0.1:{unused_tcp_port}/v1"
    groups = tmp_path / "groups.jsonl"
    status, log = await play(tmp_path, "process", env__data_path_to_save_groups=groups, openai__base_url=url)
    assert status == 1, log
    assert not groups.exists()


async def test_a_server_that_parses_no_calls_is_named_at_the_end(tmp_path: Path) -> None:
    text = f"I look. {HermesParser().written([ParsedCall('bash', {'command': 'ls'})])}"
    status, log = await play(tmp_path, "process", {"*": [[Reply(text)]]}, env__total_steps=2)
    assert status == 0, log
    assert results(log)["warning"].startswith(
        "no rollout called a tool; the answers look like unparsed hermes calls: start the model's server with "
        "--enable-auto-tool-choice --tool-call-parser hermes"
    )
