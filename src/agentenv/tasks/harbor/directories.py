"""Finds task directories, and reads each in its own format."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

from agentenv.errors import ConfigError
from agentenv.tasks.harbor import task_file, terminal_bench
from agentenv.tasks.harbor.task import HarborTask

Reader = Callable[[Path, Mapping[str, str]], HarborTask]
READERS: Final[Mapping[str, Reader]] = {
    task_file.FILE: task_file.read_task_file,
    terminal_bench.FILE: terminal_bench.read_task_file,
}
"""The file by which a format is known, and what reads it; a directory with several has the first."""


def read_tasks(place: Path, host_env: Mapping[str, str], only: Iterable[str] = ()) -> tuple[HarborTask, ...]:
    """The tasks at ``place``: a task directory, or a directory of them; in the order of their names.

    ``host_env``: what templates may name. Raises ConfigError naming the task and the field.
    """
    directories = [place] if _reader(place) else sorted(each for each in _below(place) if _reader(each))
    wanted = set(only)
    if missing := wanted - {directory.name for directory in directories}:
        raise ConfigError("only_tasks", f"{min(missing)!r} is not a task of {place}")
    if not directories:
        files = " or ".join(READERS)
        raise ConfigError(
            "tasks", f"{place} has no {files}, and no directory below it has", next_step="name task directories"
        )
    return tuple(read_task(each, host_env) for each in directories if not wanted or each.name in wanted)


def read_task(directory: Path, host_env: Mapping[str, str]) -> HarborTask:
    """One task directory. Raises ConfigError naming the task and the field."""
    directory = directory.absolute()
    return (_reader(directory) or task_file.read_task_file)(directory, host_env)


def _below(place: Path) -> Iterable[Path]:
    return place.iterdir() if place.is_dir() else ()


def _reader(directory: Path) -> Reader | None:
    return next((reader for file, reader in READERS.items() if os.path.lexists(directory / file)), None)
