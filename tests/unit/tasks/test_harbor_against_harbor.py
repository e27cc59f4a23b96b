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
from agentenv.tasks.harbor.task_file import NETWORKS, instruction_of
from tests.golden.harbor_answers import ANSWERS
from tests.golden.harbor_cases import HOST_ENV, INSTRUCTIONS, ONLY_HERE, REWARDS, TOML

HARBOR: dict[str, Any] = json.loads(ANSWERS.read_text())


def read(tmp_path: Path, toml: str) -> dict[str, Any] | None:
    """The task in the words of Harbor's answers; None: it is refused."""
    for name, text in (
        ("task.toml", toml),
        ("instruction.md", "Do it.\n"),
        ("tests/test.sh", ""),
        ("environment/Dockerfile", "FROM debian\n"),
    ):
        file = tmp_path / "one" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    try:
        task = read_task(tmp_path / "one", HOST_ENV)
    except ConfigError:
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
    assert HARBOR["rewards"].keys() == REWARDS.keys()


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
