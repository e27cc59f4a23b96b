"""Runs that are ended in every way and resumed, as processes: nothing is lost, and nothing is scored twice."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agentenv.agent.transcript import GroupRecord
from agentenv.runs.directory import FoundRun, runs_in
from agentenv.runs.manifest import GROUPS, MEMBERS, ROLLOUTS
from agentenv.runs.members import read_members
from agentenv.testing import Call, Reply, ScriptedPolicy, Turn
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
async def started(directory: Path, *arguments: str, own_interpreter: bool = False, **env: str) -> AsyncIterator[Any]:
    directory.mkdir(exist_ok=True)
    async with programs.program(
        str(ENVIRONMENT), *arguments, cwd=directory, env={**os.environ, "TMPDIR": str(directory), **env},
        stdout=directory / "out.txt", own_interpreter=own_interpreter,
    ) as process:  # fmt: skip
        yield process


async def ended(directory: Path, *arguments: str, **env: str) -> tuple[int, str]:
    """Its status, and what it printed."""
    before = said(directory)
    async with started(directory, *arguments, **env) as process, asyncio.timeout(2 * START_S):
        status = await process.wait()
    return status, said(directory).removeprefix(before)


def said(directory: Path) -> str:
    file = directory / "out.txt"
    return file.read_text(errors="replace") if file.exists() else ""


def the_run(directory: Path) -> FoundRun:
    [run] = runs_in(directory / "runs")
    return run


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
                await until(
                    lambda enough=enough, process=process: len(scored(cut)) >= enough or process.returncode is not None,
                    START_S, lambda: said(cut),
                )  # fmt: skip
                if process.returncode is not None:
                    assert process.returncode == 0, said(cut)
                    break
                process.send_signal(signal.SIGKILL)
                await process.wait()
            kills += 1
            again = set(scored(cut)[len(before) :]) & kept
            assert not again, "what was written down is not played again"
            resume = ["--resume", str(the_run(cut).path)]
            assert the_run(cut).state == "killed"
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
