"""What is read of a task, and what Harbor's package makes of the same files (``tests/golden/harbor_answers.py``)."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from agentenv.errors import ConfigError
from agentenv.tasks.harbor.directories import read_task
from agentenv.tasks.harbor.rewards import NoRewardError, parse_json, parse_text
from agentenv.tasks.harbor.steps import all_together, shortfall
from agentenv.tasks.harbor.task import HarborTask
from agentenv.tasks.harbor.task_file import ARTIFACTS, NETWORKS, instruction_of
from tests.golden.harbor_answers import ANSWERS
from tests.golden.harbor_cases import (
    HOST_ENV,
    INSTRUCTIONS,
    ONLY_HERE,
    REWARDS,
    SHORTFALLS,
    STEP_REWARDS,
    STEPS,
    TOML,
)

HARBOR: dict[str, Any] = json.loads(ANSWERS.read_text())


def task_of(tmp_path: Path, toml: str, *instructions: str) -> HarborTask | None:
    """The task of these files; None: it is refused."""
    usual = {"task.toml": toml, "tests/test.sh": "", "environment/Dockerfile": "FROM debian\n"}
    for name, text in {**usual, **dict.fromkeys(instructions, "Do it.\n")}.items():
        file = tmp_path / "one" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    try:
        return read_task(tmp_path / "one", HOST_ENV)
    except ConfigError:
        return None


def read(tmp_path: Path, toml: str) -> dict[str, Any] | None:
    """The task in the words of Harbor's answers."""
    task = task_of(tmp_path, toml, "instruction.md")
    if task is None:
        return None
    check = task.healthcheck
    return {
        "agent_timeout_s": task.agent.timeout_s if task.agent.timeout_s < math.inf else None,
        "verifier_timeout_s": task.verifier.timeout_s,
        "build_timeout_s": task.build_timeout_s,
        "limits": [task.cpus, task.memory_mib, task.storage_mib],
        "networks": [[each.network.kind, list(each.network.hosts)] for each in (task.agent, task.verifier)],
        "users": [task.agent.user, task.verifier.user],
        "env": [dict(each) for each in (task.env, task.verifier_env, task.solution_env)],
        "healthcheck": check and [check.command, check.interval_s, check.start_period_s, check.retries],
        "separate": task.separate is not None,
        "separate_cpus": task.separate and task.separate.cpus,
        "workdir": task.workdir,
    }


def in_our_words(answer: dict[str, Any]) -> dict[str, Any]:
    """Without a limit no number, without a user or a directory no text; an allow list of nobody is no network."""
    return {
        **answer,
        "agent_timeout_s": None if answer["agent_timeout_s"] == math.inf else answer["agent_timeout_s"],
        "networks": [
            ["none", []] if mode == "allowlist" and not hosts else [NETWORKS[mode], hosts]
            for mode, hosts in answer["networks"]
        ],
        "users": ["" if user is None else str(user) for user in answer["users"]],
        "workdir": answer["workdir"] or "",
    }


def test_the_answers_are_to_these_cases() -> None:
    assert (HARBOR["toml"].keys(), HARBOR["instructions"].keys()) == (TOML.keys(), INSTRUCTIONS.keys())
    assert (HARBOR["rewards"].keys(), HARBOR["steps"].keys()) == (REWARDS.keys(), STEPS.keys())
    assert (HARBOR["step_rewards"].keys(), HARBOR["shortfalls"].keys()) == (STEP_REWARDS.keys(), SHORTFALLS.keys())


@pytest.mark.parametrize("name", TOML)
def test_a_task_is_what_harbor_makes_of_it(tmp_path: Path, name: str) -> None:
    answer, found = HARBOR["toml"][name], read(tmp_path, TOML[name])
    if name in ONLY_HERE:
        assert (found, answer is None) == (None, False)
    else:
        assert found == (answer and in_our_words(answer))


@pytest.mark.parametrize("name", INSTRUCTIONS)
def test_an_agent_reads_what_harbor_gives_it(name: str) -> None:
    assert instruction_of(INSTRUCTIONS[name]) == HARBOR["instructions"][name]


@pytest.mark.parametrize("name", REWARDS)
def test_a_reward_is_what_harbor_reads(name: str) -> None:
    files = REWARDS[name]
    read_file = {"reward.json": parse_json, "reward.txt": parse_text}
    try:
        first = next(each for each in read_file if each in files)  # the order is tested where files are
        found = read_file[first](files[first])
    except (NoRewardError, StopIteration):
        found = None
    assert found == HARBOR["rewards"][name]


def step_in_our_words(step: dict[str, Any]) -> dict[str, Any]:
    """As :func:`in_our_words`. Artifacts are a separate verifier's, with Harbor's usual one first."""
    agent_s, verifier_s = step["timeouts_s"]
    return {
        **step,
        "timeouts_s": [math.inf if agent_s is None else agent_s, verifier_s],
        "users": ["" if user is None else str(user) for user in step["users"]],
        "networks": [[NETWORKS[mode], hosts] for mode, hosts in step["networks"]],
        "min_reward": step["min_reward"] or {},
        "artifacts": [ARTIFACTS, *step["artifacts"]] if step["separate_cpus"] else None,
    }


@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_what_harbor_makes_of_it(tmp_path: Path, name: str) -> None:
    answer = HARBOR["steps"][name]
    names = ["a", "b", *(step["name"] for step in (answer or {}).get("steps", ()))]
    task = task_of(tmp_path, STEPS[name], "instruction.md", *(f"steps/{step}/instruction.md" for step in names))
    assert (task is None) == (answer is None)
    if task is None:
        return
    assert task.reward_of_steps == ("final" if answer["final"] else "mean")
    assert [
        {
            "name": step.step,
            "timeouts_s": [step.agent.timeout_s, step.verifier.timeout_s],
            "users": [step.agent.user, step.verifier.user],
            "env": dict(step.verifier_env),
            "networks": [[each.network.kind, list(each.network.hosts)] for each in (step.agent, step.verifier)],
            "separate_cpus": step.separate and [step.separate.cpus],
            "healthcheck": step.healthcheck and [step.healthcheck.command, step.healthcheck.retries],
            "min_reward": dict(step.min_reward),
            "artifacts": step.separate and list(step.separate.artifacts),
        }
        for step in task.steps
    ] == [step_in_our_words(step) for step in answer["steps"]]


def of_steps(tmp_path: Path, toml: str) -> HarborTask:
    task = task_of(tmp_path, toml, "steps/a/instruction.md", "steps/b/instruction.md")
    assert task is not None
    return task


@pytest.mark.parametrize("name", STEP_REWARDS)
@pytest.mark.parametrize("strategy", ["mean", "final"])
def test_rewards_of_steps_come_to_what_harbor_says(tmp_path: Path, name: str, strategy: str) -> None:
    task = of_steps(tmp_path, f"multi_step_reward_strategy = '{strategy}'\n{STEPS['two']}")
    records = [{"step": str(number), "rewards": rewards} for number, rewards in enumerate(STEP_REWARDS[name])]
    assert all_together(task, records).rewards == HARBOR["step_rewards"][name][strategy]


@pytest.mark.parametrize("name", SHORTFALLS)
def test_a_further_step_begins_when_it_does_in_harbor(tmp_path: Path, name: str) -> None:
    least, rewards = SHORTFALLS[name]
    table = ", ".join(f"{key} = {value}" for key, value in least.items()) if isinstance(least, dict) else least
    text = f"min_reward = {{{table}}}" if isinstance(least, dict) else f"min_reward = {least}"
    step = of_steps(tmp_path, f'[[steps]]\nname = "a"\n{text}\n').steps[0]
    assert bool(shortfall(step, rewards)) == HARBOR["shortfalls"][name]


def test_a_step_without_a_reward_counts_as_0_and_is_the_last(tmp_path: Path) -> None:
    task = of_steps(tmp_path, STEPS["two"])
    assert shortfall(task.steps[0], {}) == "step a has no reward"
    found = all_together(task, [{"step": "a", "rewards": {"reward": 1.0}}, {"step": "b", "reason": "no reward: x"}])
    assert (found.score, found.reason) == (0.5, "step b: no reward: x")
    assert all_together(task, [{"step": "a", "reason": "none"}]).score == 0.0
