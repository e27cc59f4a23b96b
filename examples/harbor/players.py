"""Scripted agents. They show that tasks and scoring are sound; their scores say nothing about any model."""

from __future__ import annotations

from typing import Final

import yaml
from pydantic import BaseModel, TypeAdapter

from agentenv.errors import ConfigError
from agentenv.testing import Call, Reply
from examples.harbor.task import HarborTask, inside, text_of, wrong

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
    """Does what the task's own solution says: must score 1. Its script is expected in the slot
    (:mod:`examples.harbor.checked`). Raises ConfigError when there is none."""
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


def empty(_task: HarborTask) -> list[Reply]:
    """Changes nothing: must score 0."""
    return [Reply("I look around.", (Call("bash", {"command": "pwd; ls"}),)), Reply("I leave it as it is.")]
