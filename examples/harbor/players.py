"""Scripted agents. They show that tasks and scoring are sound; their scores say nothing about any model."""

from __future__ import annotations

import base64
import io
import tarfile
from pathlib import Path

from agentenv.errors import ConfigError
from agentenv.testing import Call, Reply
from examples.harbor.task_file import HarborTask

SOLUTION = "/solution"


def oracle(task: HarborTask) -> list[Reply]:
    """Runs the task's own ``solution/solve.sh``: must score 1. Raises ConfigError when there is none."""
    if not (task.solution / "solve.sh").is_file():
        raise ConfigError(
            "solution/solve.sh", f"task {task.name}: is missing", next_step="play it by --agent empty only"
        )
    command = f"mkdir -p {SOLUTION} && base64 -d | tar -xzf - -C {SOLUTION} && bash {SOLUTION}/solve.sh </dev/null"
    arguments = {"command": command, "stdin": _packed(task.solution), "env": dict(task.solution_env)}
    return [Reply("I run the known solution.", (Call("bash", arguments),)), Reply("Done.")]


def empty(_task: HarborTask) -> list[Reply]:
    """Changes nothing: must score 0."""
    return [Reply("I look around.", (Call("bash", {"command": "pwd; ls"}),)), Reply("I leave it as it is.")]


def _packed(directory: Path) -> str:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w:gz") as tar:
        tar.add(directory, ".", filter=_as_root)
    return base64.b64encode(target.getvalue()).decode()


def _as_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = "root"
    return member
