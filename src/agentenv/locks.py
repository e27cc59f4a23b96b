"""Locks of files (``flock``): held by a descriptor, and released when it is closed or its process ends, however
that happens. Standard library only."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

TRIES: Final = 100
TRY_PAUSE_S: Final = 0.02
"""How often a lock is tried, and the pause between: who looks whether it is held, or sweeps, holds it for a moment.
Tries are counted and not timed: in two seconds a process that is stalled may have tried once."""


@contextmanager
def locked(
    path: Path, *, flags: int = os.O_RDWR, shared: bool = False, waiting: Callable[[], None] | None = None
) -> Iterator[int]:
    """Hold the lock of a file, which is created (mode 0644) if missing; yields the descriptor that holds it, opened
    with ``flags``.

    Waits while others hold it (with ``shared``: exclusively); ``waiting`` is called once when it has to. Raises
    OSError when the file cannot be opened.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, flags | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if waiting is not None:
                waiting()
            fcntl.flock(descriptor, kind)
        yield descriptor
    finally:
        os.close(descriptor)


def hold(
    path: Path,
    *,
    flags: int = os.O_RDONLY,
    shared: bool = False,
    wait: bool = True,
    waiting: Callable[[], None] | None = None,
) -> int:
    """A descriptor, opened with ``flags``, that holds the lock of what lies at ``path``, a file or a directory. What is
    replaced while its lock is waited for is let go of. A symbolic link is not followed; a file that ``flags`` create
    has mode 0644.

    ``waiting`` is called once when others hold the lock; without ``wait`` they are not waited for. Raises:
    FileNotFoundError when there is nothing, or it was removed meanwhile; BlockingIOError; OSError.
    """
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    while True:
        descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            try:
                fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                if not wait:
                    raise
                if waiting is not None:
                    waiting()
                    waiting = None
                fcntl.flock(descriptor, kind)
            if os.path.samestat(os.fstat(descriptor), path.lstat()):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def try_lock(path: Path, *, create: bool = False) -> int | None:
    """A descriptor that holds the lock of a file (created with mode 0600); None when the file was removed or
    replaced meanwhile, so that the lock would be useless. A symbolic link is not followed.

    Raises: BlockingIOError when somebody holds it; FileNotFoundError, OSError.
    """
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
    descriptor = os.open(path, flags, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), path.stat()):
            return descriptor
    except FileNotFoundError:
        pass
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def is_locked(path: Path) -> bool:
    """Whether any process holds the file's lock exclusively. False if there is no such file. Changes nothing."""
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
