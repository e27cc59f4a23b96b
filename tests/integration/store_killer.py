"""Runs an operation of a store again and again, killed (SIGKILL) one step later each time: ``store_killer.py WHAT
DIRECTORY REFERENCE`` with ``pull`` or ``gc``. A program of its own, because it forks.

A step is whatever touches the file system or a lock (Python's audit events), and every report of progress. After
each kill the operation is done again, without being killed, and the store must look as if nothing had happened.
Prints how many steps there were.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentenv.store import Store

EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.utime", "fcntl.flock"}


def folders(store: Store) -> list[Path]:
    """A store's directories, but for the 4,096 ranges of ids: they are always there, and each would be a step."""
    return [path for path in sorted(store.layout.directory.iterdir()) if path.is_dir() and path != store.layout.ranges]


def content(store: Store) -> dict[str, str]:
    """Every file and directory of a store's folders."""
    top = store.layout.directory
    return {
        str(path.relative_to(top)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        for folder in folders(store)
        for path in (folder, *sorted(folder.rglob("*")))
    }


def killed_at(step: int, operation: Callable[[Callable[[Any], None]], object]) -> bool:
    """Whether the operation came to that step, at which it was killed."""
    if (child := os.fork()) == 0:
        left = step

        def count(event: str, _: Any = None) -> None:
            nonlocal left
            if event in EVENTS:
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        operation(lambda _: count("open"))
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL, status
        return True
    assert status == 0, "the operation failed"
    return False


def main(what: str, directory: str, reference: str) -> None:
    store = Store(Path(directory))

    def pull(progress: Callable[[Any], None]) -> None:
        store.layout.create()
        store.ensure(reference, progress=progress)

    def collect(_: Callable[[Any], None]) -> None:
        store.gc(budget_bytes=0, keep_s=0)

    def silently(_: Any) -> None:
        pass

    pull(silently)
    whole = content(store)
    for step in itertools.count():
        if what == "pull":  # as it was at first
            for folder in folders(store):
                shutil.rmtree(folder)
        if not killed_at(step, pull if what == "pull" else collect):
            break
        if what == "gc":
            collect(silently)
            left = [name for name, digest in content(store).items() if digest]
            assert left == [], f"killed at step {step}, gc left {left}"
        pull(silently)
        assert content(store) == whole, f"killed at step {step}: {content(store).keys() ^ whole.keys()}"
    print(step)


if __name__ == "__main__":
    main(*sys.argv[1:])
