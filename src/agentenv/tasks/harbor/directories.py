"""Finds task directories, and reads each in its own format."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Found:
    """The tasks of a directory, in the order of their names, and by name why others cannot be played."""

    tasks: tuple[HarborTask, ...]
    refused: Mapping[str, ConfigError]


def read_tasks(
    place: Path,
    host_env: Mapping[str, str],
    only: Iterable[str] = (),
    prepare: Callable[[HarborTask], HarborTask] = lambda task: task,
) -> Found:
    """The tasks at ``place``: a task directory, or a directory of them.

    ``host_env``: what templates may name. ``prepare``: what is done with each; it may refuse one with a ConfigError.
    Raises ConfigError when there are none, or one of ``only`` is missing.
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
    tasks, refused = [], {}
    for directory in directories:
        if wanted and directory.name not in wanted:
            continue
        try:
            tasks.append(prepare(read_task(directory, host_env)))
        except ConfigError as error:
            refused[directory.name] = error
    return Found(tuple(tasks), refused)


def read_task(directory: Path, host_env: Mapping[str, str]) -> HarborTask:
    """One task directory. Raises ConfigError naming the task, the file and the field."""
    directory = directory.absolute()
    return (_reader(directory) or task_file.read_task_file)(directory, host_env)


def _below(place: Path) -> Iterable[Path]:
    return place.iterdir() if place.is_dir() else ()


def _reader(directory: Path) -> Reader | None:
    return next((reader for file, reader in READERS.items() if os.path.lexists(directory / file)), None)
