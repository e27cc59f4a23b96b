"""Removes the leftovers of dead containers: ``python -m agentenv.sandbox.supervisor.sweep STATE_DIR``.

A dead container leaves cgroup directories and its data directory; everything else (processes, mounts, sockets) is
removed with its namespaces. Running containers are recognised by the lock each supervisor holds on
``STATE_DIR/<container>/lock`` while it is alive.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from agentenv.deadlines import scaled
from agentenv.locks import try_lock
from agentenv.sandbox.supervisor import cgroups

LOCK_FILE = "lock"
CGROUPS_FILE = "cgroups"
_SWEPT_WITHIN_S = scaled(5.0)
"""A sweep that kills leftover processes takes up to 2 s for each hierarchy of cgroups."""


@dataclass(frozen=True)
class Swept:
    """Result for one dead container. ``left`` names what could not be removed."""

    container: str
    removed: tuple[str, ...]
    left: tuple[str, ...]


class StillRunningError(RuntimeError):
    """Another process holds the container's lock."""


def take_lock(directory: Path) -> int:
    """Create ``directory`` and lock it; the descriptor is the lock.

    Raises StillRunningError when a running supervisor holds it, OSError when it cannot be created.
    """
    ends_s = time.monotonic() + _SWEPT_WITHIN_S
    while True:
        directory.mkdir(parents=True, exist_ok=True, mode=0o755)
        try:
            fd = try_lock(directory / LOCK_FILE, create=True)
        except FileNotFoundError:
            continue  # a sweep removed the directory under us
        except BlockingIOError:
            # Held for long only by a running supervisor; for a moment, by a sweep of leftovers.
            if time.monotonic() > ends_s:
                raise StillRunningError(str(directory)) from None
            time.sleep(0.01)
            continue
        if fd is not None:
            return fd


def record_cgroups(directory: Path, bases: tuple[Path, ...]) -> None:
    """Record the container's cgroups before they are created, so that a sweep finds them."""
    (directory / CGROUPS_FILE).write_text("".join(f"{base}\n" for base in bases))


def sweep_container(directory: Path) -> Swept | None:
    """Remove one dead container's cgroups (killing processes left in them) and its directory.

    None when it is alive, or already removed.
    """
    try:
        lock = try_lock(directory / LOCK_FILE)
    except OSError:  # its supervisor lives, or another process sweeps it, or has
        return None
    if lock is None:
        return None
    removed: list[str] = []
    left: list[str] = []
    try:
        for base in _recorded(directory):
            was_there = base.is_dir()
            if not cgroups.remove_tree(base):  # whose processes may be left to move back, if it no longer exists
                left.append(str(base))
            elif was_there:
                removed.append(str(base))
        if not left:
            shutil.rmtree(directory, ignore_errors=True)
            (left if directory.exists() else removed).append(str(directory))
    finally:
        os.close(lock)
    return Swept(directory.name, tuple(removed), tuple(left))


def _recorded(directory: Path) -> list[Path]:
    """Only cgroups with this container's name: the file is ours, but its content can do damage."""
    try:
        lines = (directory / CGROUPS_FILE).read_text().splitlines()
    except OSError:
        return []
    paths = [Path(line) for line in lines]
    return [path for path in paths if path.parts[-2:] == ("agentenv", directory.name) and ".." not in path.parts]


def sweep(state_dir: Path) -> list[Swept]:
    """Remove everything dead containers left under ``state_dir``. Running ones are not touched."""
    found: list[Swept] = []
    with contextlib.suppress(OSError):
        for directory in sorted(state_dir.iterdir()):
            if directory.is_dir() and not directory.is_symlink():
                swept = sweep_container(directory)
                if swept is not None:
                    found.append(swept)
    return found


def main(arguments: list[str]) -> int:
    """Sweep the given directory and print one JSON line per dead container."""
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m agentenv.sandbox.supervisor.sweep STATE_DIR\n")
        return 2
    found = sweep(Path(arguments[0]))
    for swept in found:
        line = {"container": swept.container, "removed": swept.removed, "left": swept.left}
        sys.stdout.write(json.dumps(line) + "\n")
    return 1 if any(swept.left for swept in found) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
