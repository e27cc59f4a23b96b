"""Scripted agents, and the environment as they play it. They show that tasks and scoring are sound; their scores say
nothing about any model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import yaml
from pydantic import BaseModel, Field, TypeAdapter

from agentenv import AgentSettings, ToolContext
from agentenv.agent.transcript import GroupRecord
from agentenv.env.farm_fields import Names
from agentenv.errors import ConfigError, TaskError
from agentenv.sandbox.supervisor.cgroups import this_machine
from agentenv.tasks.harbor.env import HarborConfig, HarborEnv
from agentenv.tasks.harbor.rewards import NoRewardError
from agentenv.tasks.harbor.steps import DONE
from agentenv.tasks.harbor.task import HarborTask, inside, text_of, wrong
from agentenv.tasks.harbor.verifier import lay
from agentenv.tasks.scripted import Room, Table, play
from agentenv.testing import Call, Player, Reply
from agentenv.testing.scripted_policy import MEMBER_MARK

SOLUTION: Final = "/solution"
"""Where the oracle's slot has it."""
SOLVE: Final = "solve.sh"


class Keys(BaseModel):
    """A command of a ``solution.yaml``: what is typed, and what is waited for."""

    command: str
    append_enter: bool = True
    block: bool = False
    """Wait until it has ended, at most ``max_timeout_sec``; else no longer than ``min_timeout_sec``."""
    min_timeout_sec: float = 0.0
    max_timeout_sec: float = 180.0

    def arguments(self) -> dict[str, object]:
        """Of the ``tmux`` tool."""
        keys = [self.command, "Enter"] if self.append_enter else [self.command]
        waiting = {"min_wait_s": self.min_timeout_sec, "max_wait_s": self.max_timeout_sec}
        return {"keys": keys, "block": self.block, **waiting}


_KEYS = TypeAdapter(list[Keys])


def oracle(task: HarborTask) -> list[Reply]:
    """Runs the solution of the task, or of each of its steps: must score 1. Raises ConfigError when there is none."""
    return [reply for part in task.parts for reply in _solving(part)]


def _solving(task: HarborTask) -> list[Reply]:
    """Runs the task's own solution: must score 1. Its script is expected in the slot
    (:class:`CheckedEnv`). Raises ConfigError when there is none."""
    found = task.solution / SOLVE if task.solution.is_dir() else task.solution
    name = str(found.relative_to(task.directory))
    if inside(task.directory, name) is None:
        raise ConfigError(name, f"task {task.name}: is missing", next_step="play it by --agent empty only")
    script = script_of(task)
    calls = (_run(task, script),) if script else typed(task)
    return [Reply("I do what the known solution says.", calls), Reply("Done.")]


def script_of(task: HarborTask) -> str:
    """The name of the script that is the task's solution; empty: it is keys to be typed."""
    if task.solution.suffix == ".yaml":
        return ""
    return SOLVE if task.solution.is_dir() else task.solution.name


def _run(task: HarborTask, script: str) -> Call:
    """As Harbor, by its own first line; that of Terminal-Bench 1 by bash."""
    by = "" if script == SOLVE else "bash "
    env = {"DEBIAN_FRONTEND": "noninteractive", **task.solution_env}
    return Call("bash", {"command": f"{by}{SOLUTION}/{script} </dev/null", "env": env})


def typed(task: HarborTask) -> tuple[Call, ...]:
    """The commands of a ``solution.yaml``, typed into a terminal as Terminal-Bench 1 does. Raises ConfigError."""
    text = text_of(task.directory, str(task.solution.relative_to(task.directory)))
    try:
        commands = _KEYS.validate_python(yaml.safe_load(text))
    except (ValueError, yaml.YAMLError) as error:
        raise wrong(task.directory, task.solution.name, f"is not valid: {error}") from error
    start = Call("tmux", {"action": "start"})
    return (start, *(Call("tmux", {"action": "send_keys", **keys.arguments()}) for keys in commands))


def empty(task: HarborTask) -> list[Reply]:
    """Changes nothing: must score 0."""
    look = Reply("I look around.", (Call("bash", {"command": "pwd; ls"}),))
    return [look, Reply("I leave it as it is.")] * len(task.parts)


class CheckConfig(HarborConfig):
    """An environment's settings, and who plays."""

    players: Names = Field(default_factory=list, description="The scripted agent of each member of a group")


class CheckedEnv(HarborEnv):
    """The oracle finds its task's solution in a directory, uploaded as root before it begins, as Harbor's does. No one
    else has it."""

    env_config_cls = CheckConfig

    def as_played(self, task: HarborTask) -> HarborTask:
        """As every run's; the oracle needs a solution. Raises ConfigError."""
        task = super().as_played(task)
        if "oracle" in self.config.players:
            oracle(task)
        return task

    def list_refused(self) -> None:
        """The table of the check has them."""

    async def setup_trajectory_workspace(self, item: Any, *, exec_tool: ToolContext, **named: Any) -> dict[str, Any]:
        """As every rollout's; with the solution, if it is the oracle's. Raises TaskError."""
        workspace = await super().setup_trajectory_workspace(item, exec_tool=exec_tool, **named)
        await self._give_solution(self.tasks[item["task_id"]].parts[0], exec_tool, named["trajectory_id"])
        return workspace

    async def continue_task(
        self, item: Any, *, exec_tool: ToolContext, workspace_meta: dict[str, Any], **named: Any
    ) -> tuple[str, AgentSettings] | None:
        """As every rollout's; with the solution of the step that begins, over that of the one before."""
        more = await super().continue_task(item, exec_tool=exec_tool, workspace_meta=workspace_meta, **named)
        if more is not None:
            step = self.tasks[item["task_id"]].steps[len(workspace_meta[DONE])]
            await self._give_solution(step, exec_tool, named["trajectory_id"])
        return more

    async def _give_solution(self, task: HarborTask, exec_tool: ToolContext, trajectory_id: str) -> None:
        """To the oracle alone. Raises TaskError."""
        member = MEMBER_MARK.search(trajectory_id)
        if member and self.config.players[int(member[1])] == "oracle" and (script := script_of(task)):
            try:
                await lay(exec_tool, SOLUTION, (task.solution,), script)
            except NoRewardError as error:
                raise TaskError(f"the solution of {task.name} cannot be uploaded: {error}") from error


AGENTS: Final[Mapping[str, Callable[[HarborTask], Player]]] = {"oracle": oracle, "empty": empty}


async def check(directory: Path, table: Table, *, jobs: int | None = None, **fields: Any) -> list[GroupRecord]:
    """Play every task once with each of the table's agents; ``jobs`` tasks at once, by default as many as this machine
    has cores, and fewer if they need more memory than it has. Raises: ConfigError and what the environment's setup
    raises."""
    this = this_machine()

    def records(env: CheckedEnv) -> Mapping[str, HarborTask]:
        table.refused = {name: str(error) for name, error in env.refused.items()}
        return env.tasks

    def needs_mib(task: HarborTask) -> float:
        usual = CheckConfig.model_fields["slot_memory_mib"].default
        machines = (task, *task.separates[:1])
        return len(table.names) * sum(machine.memory_mib or usual for machine in machines)

    return await play(
        directory,
        CheckedEnv,
        {"group_size": len(table.names), "players": list(table.names), "tool_timeout_s": 3000.0, **fields},
        records,
        lambda task: [AGENTS[name](task) for name in table.names],
        table,
        room=Room(jobs or this.cores, this.memory_bytes / 2**20),
        needs_mib=needs_mib,
    )
