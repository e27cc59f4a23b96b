"""Files by which a process announces on this machine that it is alive and where it can be reached.

A directory ``<state>/<kind>-<name>`` with a locked file ``lock`` and a file ``said.json`` (mode 0600). The lock is
released when the process ends, however it ends; leftover files are removed by the next sweep of the state directory
(``agentenv gc``, or the next container to start).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from agentenv.errors import SandboxUnavailableError

_LOCK, _SAID = "lock", "said.json"
_LOCK_TRIES, _LOCK_PAUSE_S = 20, 0.02
"""Checking whether a lock is held takes the lock for a moment."""


class AlreadyAnnouncedError(Exception):
    """A running process has announced this already; ``said`` is its content."""

    def __init__(self, said: Mapping[str, Any]) -> None:
        super().__init__("another process has this name")
        self.said = said


class Announcement:
    """The announcement of this process while it is alive. A context manager."""

    def __init__(self, directory: Path, lock: int) -> None:
        self.directory = directory
        self._lock = lock

    @classmethod
    def open(cls, state: Path, kind: str, name: str) -> Self:
        """Create the announcement. Raises AlreadyAnnouncedError, and SandboxUnavailableError when ``state`` cannot
        be written."""
        directory = state / f"{kind}-{name}"
        try:
            lock = _take(directory)
        except OSError as error:
            raise SandboxUnavailableError(
                f"cannot keep state in {state}: {error}", next_step="set AGENTENV_STATE_DIR to a writable directory"
            ) from error
        if lock is None:
            raise AlreadyAnnouncedError(_read(directory) or {})
        return cls(directory, lock)

    def say(self, said: Mapping[str, Any]) -> None:
        """Replace the content; readers see the old or the new, never a mixture. Raises OSError."""
        new = self.directory / f"{_SAID}.new"
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump({**said, "pid": os.getpid()}, file)
        new.replace(self.directory / _SAID)

    def close(self) -> None:
        """Withdraw the announcement. May be repeated."""
        if self._lock >= 0:
            shutil.rmtree(self.directory, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def announced(state: Path, kind: str) -> list[dict[str, Any]]:
    """Announcements of running processes under ``kind``, each with its ``pid``. Changes nothing."""
    found = [_read(directory) for directory in sorted(state.glob(f"{kind}-*")) if is_held(directory)]
    return [said for said in found if said is not None]


def is_held(directory: Path) -> bool:
    """Whether the process that created the directory is alive."""
    return is_locked(directory / _LOCK)


def is_locked(path: Path) -> bool:
    """Whether any process has an exclusive flock on a file. Changes nothing."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _take(directory: Path) -> int | None:
    """A descriptor that holds the directory's lock; None when a running process holds it. Raises OSError."""
    for _ in range(_LOCK_TRIES):
        with contextlib.suppress(FileExistsError):  # not exist_ok, which raises when a sweep removes it meanwhile
            directory.mkdir(parents=True, mode=0o700)
        with contextlib.suppress(FileNotFoundError):  # a sweep has just removed it
            descriptor = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            with contextlib.suppress(BlockingIOError, FileNotFoundError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(descriptor), (directory / _LOCK).stat()):
                    return descriptor
            os.close(descriptor)
        time.sleep(_LOCK_PAUSE_S)
    return None


def _read(directory: Path) -> dict[str, Any] | None:
    try:
        said = json.loads((directory / _SAID).read_text())
    except (OSError, ValueError):
        return None  # not written yet, or withdrawn
    return said if isinstance(said, dict) else None
