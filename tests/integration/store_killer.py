"""Runs an operation of a store again and again, killed (SIGKILL) one step later each time: ``store_killer.py WHAT
DIRECTORY REFERENCE`` with ``pull``, ``gc`` or ``unpack`` (of layers, as root). A program of its own, because it forks.

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
from functools import partial
from pathlib import Path
from typing import Any

from agentenv.store import Store, names
from agentenv.store.unpacked import sweep_trees, unpack

EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.utime", "fcntl.flock"}


def folders(store: Store) -> list[Path]:
    """A store's directories, but for the 4,096 ranges of ids: they are always there, and each would be a step."""
    return [path for path in sorted(store.layout.directory.iterdir()) if path.is_dir() and path != store.layout.ranges]


def content(store: Store) -> dict[str, str]:
    """Every file and directory of a store's folders. Of a name it does not matter when it was given."""
    top = store.layout.directory

    def told(path: Path) -> str:
        if path.parent == store.layout.names and path.suffix == ".json":
            name = names.read(path)
            return str(name and (name.reference, name.digest))
        return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""

    return {
        str(path.relative_to(top)): told(path)
        for folder in folders(store)
        for path in (folder, *sorted(folder.rglob("*")))
    }


def make_all(store: Store, what: str, reference: str, progress: Callable[[Any], None]) -> None:
    """Pull the image, and unpack it unless only that is tried."""
    store.layout.create()
    image = store.ensure(reference, progress=progress)
    if what != "pull":
        sweep_trees(store.layout)
        unpack(store.layout, image.diff_ids)


def collect(store: Store, what: str, reference: str, progress: Callable[[Any], None]) -> None:
    """Remove everything."""
    store.gc(budget_bytes=0, keep_s=0)


def silently(_: Any) -> None:
    """No progress is looked at."""


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
    operations = {"pull": make_all, "gc": collect, "unpack": make_all}
    make_all(store, what, reference, silently)
    whole = content(store)
    for step in itertools.count():
        for folder in folders(store) if what == "pull" else [store.layout.trees] * (what == "unpack"):
            shutil.rmtree(folder)  # as it was at first
        if not killed_at(step, partial(operations[what], store, what, reference)):
            break
        if what == "gc":
            collect(store, what, reference, silently)
            left = [name for name, digest in content(store).items() if digest]
            assert left == [], f"killed at step {step}, gc left {left}"
        make_all(store, what, reference, silently)
        assert content(store) == whole, f"killed at step {step}: {content(store).keys() ^ whole.keys()}"
    print(step)


if __name__ == "__main__":
    main(*sys.argv[1:])
