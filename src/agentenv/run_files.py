"""Files by which a process tells others on this machine that it is running, and where it can be reached.

A directory ``<state>/<kind>-<name>`` with a locked file ``lock`` and a file ``said.json`` (mode 0600). The lock is
released when the process ends, however it ends; leftover files are removed by the next sweep of the state directory
(``agentenv gc``, or the next container to start).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from agentenv.errors import SandboxUnavailableError
from agentenv.locks import TRIES, TRY_PAUSE_S, is_locked, try_lock

_LOCK, _CONTENT = "lock", "said.json"


class AlreadyRunningError(Exception):
    """A process of this kind and name is already running; ``content`` is the content of its file."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        super().__init__("another process has this name")
        self.content = content


class RunFile:
    """A directory of this process with a file that others read while it is running. A context manager."""

    def __init__(self, directory: Path, lock: int) -> None:
        self.directory = directory
        self._lock = lock

    @classmethod
    def open(cls, state: Path, kind: str, name: str) -> Self:
        """Create the directory. Raises AlreadyRunningError, and SandboxUnavailableError when ``state`` cannot be
        written."""
        directory = state / f"{kind}-{name}"
        try:
            lock = _take(directory)
        except OSError as error:
            raise SandboxUnavailableError(
                f"cannot keep state in {state}: {error}", next_step="set AGENTENV_STATE_DIR to a writable directory"
            ) from error
        if lock is None:
            raise AlreadyRunningError(_read(directory) or {})
        return cls(directory, lock)

    @property
    def file(self) -> Path:
        """The file that others read."""
        return self.directory / _CONTENT

    def write(self, content: Mapping[str, Any]) -> None:
        """Replace the content, adding this process's ``pid``; readers see the old or the new, never a mixture.
        Raises OSError."""
        new = self.directory / f"{_CONTENT}.new"
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump({**content, "pid": os.getpid()}, file)
        new.replace(self.file)

    def close(self) -> None:
        """Remove the directory and release its lock. Repeatable."""
        if self._lock >= 0:
            shutil.rmtree(self.directory, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def running(state: Path, kind: str) -> list[dict[str, Any]]:
    """The content of each running process's file of this ``kind``, with its ``pid``. Changes nothing."""
    found = [_read(directory) for directory in sorted(state.glob(f"{kind}-*")) if is_held(directory)]
    return [content for content in found if content is not None]


def is_held(directory: Path) -> bool:
    """Whether the process that created the directory is still running."""
    return is_locked(directory / _LOCK)


def remove_if_dead(directory: Path) -> None:
    """Remove the directory of a process that has ended. One created a moment ago, which has no lock yet, is kept."""
    with contextlib.suppress(BlockingIOError, FileNotFoundError):
        lock = try_lock(directory / _LOCK)
        if lock is not None:
            shutil.rmtree(directory, ignore_errors=True)
            os.close(lock)


def _take(directory: Path) -> int | None:
    """A descriptor that holds the directory's lock; None when a running process holds it. Raises OSError."""
    for _ in range(TRIES):
        with contextlib.suppress(FileExistsError):  # not exist_ok, which raises when a sweep removes it meanwhile
            directory.mkdir(parents=True, mode=0o700)
        with contextlib.suppress(BlockingIOError, FileNotFoundError):  # not found: a sweep has just removed it
            descriptor = try_lock(directory / _LOCK, create=True)
            if descriptor is not None:
                return descriptor
        time.sleep(TRY_PAUSE_S)
    return None


def _read(directory: Path) -> dict[str, Any] | None:
    try:
        content = json.loads((directory / _CONTENT).read_text())
    except (OSError, ValueError):
        return None  # not written yet, or removed already
    return content if isinstance(content, dict) else None
