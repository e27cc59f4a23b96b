"""Real tasks of one small package, made once per test run (and cached by content in the checkout)."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentenv.agent.transcript import GroupRecord, Transcript
from agentenv.report import read_records
from agentenv.testing import Player, ScriptedPolicy
from examples.repair import tasks
from examples.repair.env import RepairConfig, RepairEnv
from examples.repair.packages import Catalogue, Package, fetch
from examples.repair.tasks import Task
from tests.unit.env.env_stubs import server_of, settings

PACKAGE = "inflection"


@functools.cache
def fetched() -> Catalogue:
    return fetch()


def one_package(name: str = PACKAGE) -> Catalogue:
    return replace(fetched(), packages=(fetched().by_name[name],))


@functools.cache
def made() -> tuple[Task, ...]:
    return tuple(tasks.make_tasks(one_package(), seed=1))


def package() -> Package:
    return one_package().packages[0]


def with_bugs(number: int) -> list[Task]:
    return [task for task in made() if len(task.bugs) == number]


@asynccontextmanager
async def repairing(
    directory: Path, script: dict[str, list[Player]], chosen: Sequence[Task], **changed: Any
) -> AsyncIterator[RepairEnv]:
    """A RepairEnv on the local backend, played by a script."""
    values = settings(directory).model_dump(exclude_unset=True)
    values |= {"tool_pool_mode": "local", "max_containers": 1, "slots_per_container": 4, **changed}
    values |= {"agent_max_steps": 12, "slot_processes": 128}
    async with (
        ScriptedPolicy(script) as policy,
        RepairEnv(RepairConfig(**values), server_of(policy), catalogue=one_package(), tasks=chosen) as env,
    ):
        yield env


def recorded(directory: Path) -> dict[str, list[Transcript]]:
    """Transcripts by item."""
    groups: list[GroupRecord] = list(read_records(directory / "rollouts.jsonl"))
    return {group.item_id: group.trajectories for group in groups}
