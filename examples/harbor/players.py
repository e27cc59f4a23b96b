"""Scripted agents. They show that tasks and scoring are sound; their scores say nothing about any model."""

from __future__ import annotations

import base64
import io
import tarfile
from pathlib import Path

import yaml
from pydantic import BaseModel, TypeAdapter

from agentenv.errors import ConfigError
from agentenv.testing import Call, Reply
from examples.harbor.task import HarborTask, wrong

SOLUTION = "/solution"


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
    """Does what the task's own solution says: must score 1. Raises ConfigError when there is none."""
    script = task.solution / "solve.sh" if task.solution.is_dir() else task.solution
    if not script.is_file():
        name = script.relative_to(task.directory)
        raise ConfigError(str(name), f"task {task.name}: is missing", next_step="play it by --agent empty only")
    calls = typed(task) if script.suffix == ".yaml" else (_run(task, script.name),)
    return [Reply("I do what the known solution says.", calls), Reply("Done.")]


def _run(task: HarborTask, script: str) -> Call:
    command = f"mkdir -p {SOLUTION} && base64 -d | tar -xzf - -C {SOLUTION} && bash {SOLUTION}/{script} </dev/null"
    return Call("bash", {"command": command, "stdin": _packed(task.solution), "env": dict(task.solution_env)})


def typed(task: HarborTask) -> tuple[Call, ...]:
    """The commands of a ``solution.yaml``, typed into a terminal as Terminal-Bench 1 does. Raises ConfigError."""
    try:
        commands = _KEYS.validate_python(yaml.safe_load(task.solution.read_text(encoding="utf-8")))
    except (ValueError, yaml.YAMLError) as error:
        raise wrong(task.directory, task.solution.name, f"is not valid: {error}") from error
    start = Call("tmux", {"action": "start"})
    return (start, *(Call("tmux", {"action": "send_keys", **keys.arguments()}) for keys in commands))


def empty(_task: HarborTask) -> list[Reply]:
    """Changes nothing: must score 0."""
    return [Reply("I look around.", (Call("bash", {"command": "pwd; ls"}),)), Reply("I leave it as it is.")]


def _packed(place: Path) -> str:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w:gz") as tar:
        tar.add(place, "." if place.is_dir() else place.name, filter=_as_root)
    return base64.b64encode(target.getvalue()).decode()


def _as_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = "root"
    return member
