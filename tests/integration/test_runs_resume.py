"""Runs that are ended in every way and resumed, as processes: nothing is lost, and nothing is scored twice."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from agentenv.agent.transcript import GroupRecord
from agentenv.runs.directory import FoundRun, runs_in
from agentenv.runs.manifest import GROUPS, MEMBERS, ROLLOUTS
from agentenv.runs.members import read_members
from agentenv.testing import Call, Failure, Reply, ScriptedPolicy, Turn
from agentenv.testing.script import Script
from tests import programs
from tests.waiting import START_S, until

ENVIRONMENT = Path(__file__).parent / "runs_env.py"
LOOK = Call("bash", {"command": "true"})


def played(turn: Turn) -> Reply:
    """One turn or two, and an answer whose length decides the score."""
    if turn.step == 0 and turn.member % 2:
        return Reply("looking", (LOOK,))
    return Reply("done" + "!" * turn.member)


SCRIPT = {"*": [played] * 4}


def flags(policy: ScriptedPolicy, **changed: Any) -> list[str]:
    chosen = {
        "env.tool_pool_mode": "fake",
        "env.group_size": 3,
        "env.max_num_workers": 4,
        "env.use_wandb": False,
        "env.send_trajectory_id": True,
        "env.infra_retries": 0,
        "env.infra_retry_delay_s": 0,
        "env.enabled_toolsets": "terminal",
        "openai.base_url": policy.base_url,
        "openai.model_name": "scripted",
        "openai.api_key": "sk-secret-key",
        **{name.replace("__", "."): value for name, value in changed.items()},
    }
    return [text for name, value in chosen.items() for text in (f"--{name}", str(value))]


@asynccontextmanager
async def started(
    directory: Path, *arguments: str, env: Mapping[str, str] = MappingProxyType({})
) -> AsyncIterator[Any]:
    directory.mkdir(exist_ok=True)
    async with programs.program(
        str(ENVIRONMENT), *arguments, cwd=directory, env={**os.environ, "TMPDIR": str(directory), **env},
        stdout=directory / "out.txt",
    ) as process:  # fmt: skip
        yield process


async def ended(directory: Path, *arguments: str, **env: str) -> tuple[int, str]:
    """Its status, and what it printed."""
    before = said(directory)
    async with started(directory, *arguments, env=env) as process, asyncio.timeout(2 * START_S):
        status = await process.wait()
    return status, said(directory).removeprefix(before)


def said(directory: Path) -> str:
    file = directory / "out.txt"
    return file.read_text(errors="replace") if file.exists() else ""


def the_run(directory: Path) -> FoundRun:
    [run] = runs_in(directory / "runs")
    return run


async def is_killed(directory: Path) -> None:
    """Wait until the run of a killed process is seen to be so. A child that it was starting has its lock too, until it
    has become another program: for 25 ms on a loaded machine."""
    await until(lambda: the_run(directory).state == "killed")


async def enough_scored(directory: Path, enough: int, process: Any) -> None:
    """Wait until so many rollouts have been scored, or the process has ended."""
    await until(
        lambda: len(scored(directory)) >= enough or process.returncode is not None, START_S, lambda: said(directory)
    )


def scored(directory: Path) -> list[str]:
    file = directory / "scored.txt"
    return file.read_text().splitlines() if file.exists() else []


def records(directory: Path) -> list[GroupRecord]:
    file = the_run(directory).path / ROLLOUTS
    lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
    return [GroupRecord.model_validate_json(line) for line in lines if line.endswith(b"\n")]


def recorded(directory: Path) -> set[str]:
    """The names of the rollouts that are in the run's files."""
    found = {each.trajectory for group in records(directory) for each in group.trajectories}
    return found | {each.transcript.trajectory for each in read_members(the_run(directory).path / MEMBERS)}


def by_item(directory: Path) -> dict[int | None, tuple[str, list[float | None]]]:
    return {one.position: (one.item_id, [each.score for each in one.trajectories]) for one in records(directory)}


def trained_on(directory: Path) -> Counter[tuple[float, ...]]:
    lines = (the_run(directory).path / GROUPS).read_text().splitlines()
    return Counter(tuple(json.loads(line)["scores"]) for line in lines)


def numbers(directory: Path) -> dict[str, Any]:
    """The results of a whole run that do not depend on when and where."""
    results = the_run(directory).manifest.results
    return {name: value for name, value in results.items() if name not in ("took_s", "run", "directory", "files")}


VERBS = {
    "process": {"env__total_steps": 30},
    "evaluate": {"env__eval_items": 40, "env__eval_epochs": 2, "env__max_eval_workers": 2},
}


@pytest.mark.parametrize("verb", ["process", "evaluate"])
async def test_ten_kills_change_no_result(tmp_path: Path, verb: str) -> None:
    chance = random.Random(28)
    async with ScriptedPolicy(SCRIPT, latency_s=0.05) as policy:
        whole, cut = tmp_path / "whole", tmp_path / "cut"
        status, log = await ended(whole, verb, *flags(policy, **VERBS[verb]))
        assert status == 0, log
        resume: list[str] = []
        kills = 0
        while kills < 10:
            kept = recorded(cut) if resume else set()
            before = scored(cut)
            async with started(cut, verb, *flags(policy, **VERBS[verb]), *resume) as process:
                enough = len(before) + chance.randrange(3, 8)
                await enough_scored(cut, enough, process)
                if process.returncode is not None:
                    assert process.returncode == 0, said(cut)
                    break
                process.send_signal(signal.SIGKILL)
                await process.wait()
            kills += 1
            again = set(scored(cut)[len(before) :]) & kept
            assert not again, "what was written down is not played again"
            resume = ["--resume", str(the_run(cut).path)]
            await is_killed(cut)
        assert kills > 5, "each process plays a few rollouts of a hundred"
        status, log = await ended(cut, verb, *flags(policy, **VERBS[verb]), *resume)
    assert status == 0, log
    assert the_run(cut).state == "finished"
    assert by_item(cut) == by_item(whole)
    assert len(records(cut)) == len(by_item(cut)), "each item once"
    assert numbers(cut) == numbers(whole)
    if verb == "process":
        assert trained_on(cut) == trained_on(whole)
    assert not (the_run(cut).path / MEMBERS).exists()


async def interrupted(directory: Path, policy: ScriptedPolicy, verb: str, after: int, **changed: Any) -> str:
    """Ctrl-C after so many rollouts have been written down. Returns the whole output."""
    async with started(directory, verb, *flags(policy, **changed)) as process, asyncio.timeout(2 * START_S):
        await until(
            lambda: bool(scored(directory)) and len(recorded(directory)) >= after, START_S, lambda: said(directory)
        )
        process.send_signal(signal.SIGINT)
        assert await process.wait() == 128 + signal.SIGINT, said(directory)
    return said(directory)


async def agentenv(directory: Path, *words: str, **env: str) -> tuple[int, str]:
    """The agentenv command, in that directory."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "from agentenv.cli import main; main()", *words,
        cwd=directory, env={**os.environ, **env}, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    async with asyncio.timeout(START_S):
        out, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode()


async def test_ctrl_c_and_resume_by_the_command(tmp_path: Path) -> None:
    async with ScriptedPolicy(SCRIPT, latency_s=0.1) as policy:
        log = await interrupted(tmp_path, policy, "process", 8, env__total_steps=12)
        run = the_run(tmp_path)
        assert run.state == "interrupted"
        kept, before = recorded(tmp_path), len(scored(tmp_path))
        assert f"run      runs/{run.name}\nnext     agentenv runs resume {run.name}\n" in log
        status, out = await agentenv(tmp_path, "runs", "resume", "last")
        assert (status, out.splitlines()[0].split(": ")[0]) == (2, "error --openai.api_key"), out
        status, out = await agentenv(tmp_path, "runs", "resume", "last", "--openai.api_key", "sk-secret-key")
        assert status == 0, out
        assert "scored   36 of 36 rollouts" in out
        status, out = await agentenv(tmp_path, "runs", "resume", run.name, OPENAI_API_KEY="sk-secret-key")
        assert status == 0, out
        assert "nothing to do: every rollout of this run has ended" in out
        assert "scored   36 of 36 rollouts" in out
    assert by_item(tmp_path).keys() == set(range(12))
    assert len(kept) >= 8
    assert not kept & set(scored(tmp_path)[before:]), "what was written down is not played again"
    written = b"".join(path.read_bytes() for path in run.path.iterdir())
    assert b"sk-secret-key" not in written
    status, out = await agentenv(tmp_path, "runs", "list", "--json")
    [row] = json.loads(out)
    assert (row["name"], row["state"], row["groups"], row["goal"]) == (run.name, "finished", 12, 12)


@pytest.mark.parametrize("verb", ["process", "evaluate"])
async def test_only_members_that_infrastructure_failed_are_played_again(tmp_path: Path, verb: str) -> None:
    broken = {"now": True}

    def failing(turn: Turn) -> Reply | Failure:
        return Failure(404) if broken["now"] else played(turn)

    script: Script = {"item-2": [played, failing, played], "*": [played] * 3}
    settings = {"env__total_steps": 3, "env__eval_items": 3, "env__eval_epochs": 3}
    async with ScriptedPolicy(script) as policy:
        status, log = await ended(tmp_path, verb, *flags(policy, **settings))
        assert status == 0, log
        assert "scored   8 of 9 rollouts" in log
        [cut] = [one for one in records(tmp_path) if one.outcome == "partial"]
        before, run = scored(tmp_path), str(the_run(tmp_path).path)
        broken["now"] = False
        status, log = await ended(tmp_path, verb, *flags(policy, **settings), "--resume", run)
    assert status == 0, log
    assert "scored   9 of 9 rollouts" in log
    assert scored(tmp_path)[len(before) :] == [f"{cut.group}-1"]
    assert {one.outcome for one in records(tmp_path)} == {"complete"}
    assert len(records(tmp_path)) == 3
    [whole] = [one for one in records(tmp_path) if one.group == cut.group]
    assert whole.trajectories[::2] == cut.trajectories[::2]
    if verb == "process":
        assert all(len(scores) == 3 for scores in trained_on(tmp_path).elements())
        assert trained_on(tmp_path).total() == 3


async def test_an_item_that_was_dropped_for_infrastructure_is_played_again(tmp_path: Path) -> None:
    broken = {"now": True}

    def failing(turn: Turn) -> Reply | Failure:
        return Failure(404) if broken["now"] else played(turn)

    script: Script = {"item-2": [failing] * 3, "*": [played] * 3}
    settings = {"env__eval_items": 3}
    async with ScriptedPolicy(script) as policy:
        status, log = await ended(tmp_path, "evaluate", *flags(policy, **settings))
        assert (status, the_run(tmp_path).state) == (1, "failed"), log
        assert "InfraError: 1 item without a score: item-2" in the_run(tmp_path).manifest.error
        broken["now"] = False
        run = str(the_run(tmp_path).path)
        status, log = await ended(tmp_path, "evaluate", *flags(policy, **settings), "--resume", run)
    assert (status, the_run(tmp_path).state) == (0, "finished"), log
    assert "scored   3 of 3 rollouts" in log
    assert (the_run(tmp_path).manifest.error, len(records(tmp_path))) == ("", 3)


@pytest.mark.parametrize(
    ("changed", "env", "said_at_the_end"),
    [
        ({"env__agent_max_steps": 7}, {}, "has other settings: agent_max_steps (set them as they were, or start anew)"),
        ({"openai__model_name": "other"}, {}, "is process with model scripted, this is process with other"),
        (
            {},
            {"RUNS_ENV_ITEM": "thing"},
            "get_next_item: item 0 was 'item-1' and is 'thing-1' (get_next_item must give",
        ),
        ({}, {"RUNS_ENV_ITEMS": "1"}, "which this run has played (get_next_item must give the same items"),
    ],
)
async def test_what_is_not_the_same_run_is_refused(
    tmp_path: Path, changed: dict[str, Any], env: dict[str, str], said_at_the_end: str
) -> None:
    async with ScriptedPolicy(SCRIPT, latency_s=0.05) as policy:
        await interrupted(tmp_path, policy, "process", 12, env__total_steps=20)
        run, before = the_run(tmp_path), records(tmp_path)
        again = flags(policy, env__total_steps=20, **changed)
        status, log = await ended(tmp_path, "process", *again, "--resume", str(run.path), **env)
    assert status == 2, log
    assert said_at_the_end in log.splitlines()[-1]
    assert records(tmp_path) == before


async def test_a_run_that_runs_is_neither_resumed_nor_removed(tmp_path: Path) -> None:
    async with ScriptedPolicy(SCRIPT, latency_s=0.2) as policy:
        arguments = flags(policy, env__total_steps=1000)
        async with started(tmp_path, "process", *arguments) as process:
            await until(lambda: scored(tmp_path), START_S, lambda: said(tmp_path))
            run = the_run(tmp_path)
            assert run.state == "running"
            for words in (["resume", "last", "--openai.api_key", "k"], ["rm", "--yes", "last"]):
                status, out = await agentenv(tmp_path, "runs", *words)
                assert (status, out.splitlines()[0]) == (2, f"error RUN: {run.name} is running"), out
            process.send_signal(signal.SIGKILL)
            await process.wait()
        await is_killed(tmp_path)
        status, out = await agentenv(tmp_path, "runs", "rm", "--yes", run.name[:8])
    assert (status, out) == (0, f"removed {run.name}\n")
    assert not run.path.exists()


async def test_a_resumed_run_that_cannot_go_on_has_the_figures_that_it_had(tmp_path: Path) -> None:
    async with ScriptedPolicy(SCRIPT, latency_s=0.1) as policy:
        await interrupted(tmp_path, policy, "process", 45, env__total_steps=20)
    run = the_run(tmp_path)
    had = [each for group in records(tmp_path) for each in group.trajectories]
    status, log = await ended(  # its model server is gone
        tmp_path, "process", *flags(policy, env__total_steps=20), "--resume", str(run.path)
    )
    assert status == 1, log
    assert f"scored   {len(had)} of {len(had)} rollouts" in log
    assert the_run(tmp_path).manifest == run.manifest


async def test_no_directory_without_a_rollout(tmp_path: Path) -> None:
    async with ScriptedPolicy({}) as policy:
        for more, expected in ((["--dry-run"], 0), (["--env.group_size", "0"], 2), (["--env.prompt_field"], 2)):
            status, log = await ended(tmp_path, "process", *flags(policy, env__total_steps=2), *more)
            assert status == expected, log
        status, log = await ended(tmp_path, "process", *flags(policy, openai__base_url="http://127.0.0.1:9/v1"))
        assert status == 1, log
        status, log = await ended(
            tmp_path, "process", *flags(policy, env__total_steps=1), "--env.runs_dir=", "--env.group_size", "1"
        )
    assert not (tmp_path / "runs").exists()
    assert (tmp_path / "data").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts")
async def test_a_full_disk_ends_with_a_line_and_is_resumed_when_there_is_room(tmp_path: Path) -> None:
    disk = tmp_path / "runs"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=60k,mode=1777", "none", disk], check=True)
    try:
        async with ScriptedPolicy(SCRIPT) as policy:
            arguments = flags(policy, env__total_steps=15)
            status, log = await ended(tmp_path, "process", *arguments)
            assert status == 1, log
            assert "No space left on device" in log.splitlines()[-1]
            assert "Traceback" not in log
            kept = len(records(tmp_path))
            assert 0 < kept < 15
            subprocess.run(["mount", "-o", "remount,size=4m", disk], check=True)
            before = recorded(tmp_path)
            cut = len(scored(tmp_path))
            status, log = await ended(tmp_path, "process", *arguments, "--resume", str(the_run(tmp_path).path))
        assert status == 0, log
        assert not before & set(scored(tmp_path)[cut:])
        assert len(by_item(tmp_path)) == len(records(tmp_path)) == trained_on(tmp_path).total() == 15
        assert the_run(tmp_path).state == "finished"
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts")
async def test_records_that_were_lost_elsewhere_are_written_when_there_is_room(tmp_path: Path) -> None:
    """The run's own directory has room; the disk of `rollouts_path` does not."""
    disk = tmp_path / "elsewhere"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k,mode=1777", "none", disk], check=True)
    path = disk / "r.jsonl"
    try:
        async with ScriptedPolicy(SCRIPT) as policy:
            arguments = flags(policy, env__total_steps=6, env__rollouts_path=path)
            status, log = await ended(tmp_path, "process", *arguments)
            assert status == 1, log
            lost = 6 - len(path.read_bytes().splitlines())
            assert f"lost {lost} records: No space left on device" in log.splitlines()[-1]
            assert trained_on(tmp_path).total() == 6
            cut = len(scored(tmp_path))
            subprocess.run(["mount", "-o", "remount,size=4m", disk], check=True)
            resume = ["process", *arguments, "--resume", str(the_run(tmp_path).path)]
            status, log = await ended(tmp_path, *resume)
        assert status == 0, log
        assert len(scored(tmp_path)) == cut, "nothing is scored twice"
        written = [GroupRecord.model_validate_json(line) for line in path.read_bytes().splitlines()]
        assert sorted(one.position or 0 for one in written) == list(range(6))
        assert trained_on(tmp_path).total() == 6
    finally:
        subprocess.run(["umount", disk], check=True)


async def test_a_refused_run_has_no_results(tmp_path: Path) -> None:
    async with ScriptedPolicy(SCRIPT) as policy:
        arguments = flags(policy, env__total_steps=2)
        status, log = await ended(tmp_path, "process", *arguments)
        assert status == 0, log
        run = the_run(tmp_path).path
        (run / ROLLOUTS).write_bytes(b"")
        (run / "run.json").write_text((run / "run.json").read_text().replace('"finished"', '"failed"'))
        status, log = await ended(tmp_path, "process", *arguments, "--resume", str(run))
    assert status == 2, log
    assert "has 2 groups that no record knows" in log.splitlines()[-1]
    assert not [line for line in log.splitlines() if line.startswith(("scored", "next"))]
