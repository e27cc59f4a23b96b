"""Which ids a slot has on this machine: no two slots of a node share a range, whatever containers they are in.

A range is a file in the node's store, and the process that holds its lock (``flock``) has the range. The store's owner
makes the files; a lock needs no right to write, so containers see the store read-only. A lock that is not released ends
with the supervisor that holds it, and its slots have ended by then.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from agentenv.errors import SandboxUnavailableError
from agentenv.locks import hold
from agentenv.sandbox.supervisor.user_namespace import (
    FIRST_ID,
    IDS,
    IDS_OF_TREES,
    RANGES,
    TREES,
    IdRange,
    ImageIds,
    LeanIds,
)


class ClaimedRange:
    """A range that no other slot has until :meth:`release`."""

    def __init__(self, ids: ImageIds, lock: int) -> None:
        self.ids = ids
        self._lock = lock

    def release(self) -> None:
        """Free it: no process and no file of it may be left. Repeatable."""
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)


def has_store(directory: Path) -> bool:
    """Whether a store has been made in that directory: its ranges are made last (store/layout.py)."""
    return (directory / "ranges" / str(TREES)).exists()


def ids_of_trees(*maps: str) -> ImageIds | None:
    """The ids under which images are unpacked, by the texts of /proc/self/uid_map and gid_map. LeanIds: slots can have
    no ranges of their own, because the container's user namespace does not have them. None: not even those."""
    lean = LeanIds()
    if all(_has(text, FIRST_ID, IDS * RANGES) for text in maps):
        return IDS_OF_TREES
    return lean if all(_has(text, lean.first, lean.count) for text in maps) else None


def _has(id_map: str, wanted: int, wanted_count: int) -> bool:
    mapped = [(int(first), int(count)) for first, _, count in (line.split() for line in id_map.splitlines())]
    return any(first <= wanted and wanted + wanted_count <= first + count for first, count in mapped)


class IdRanges:
    """The ranges of a node, whose files are in ``directory`` (``ranges`` of its store)."""

    def __init__(self, directory: Path, *, shared: ImageIds | None = None) -> None:
        """``shared``: every slot has these."""
        self._directory = directory
        self._shared = shared
        # Containers begin to look at different places: otherwise each would try all ranges of the others first.
        self._next = secrets.randbelow(TREES)

    def claim(self) -> ClaimedRange:
        """A range of its own. Raises SandboxUnavailableError when none is left on this node, or the store has none."""
        if self._shared is not None:
            return ClaimedRange(self._shared, -1)
        for _ in range(TREES):
            number, self._next = self._next, (self._next + 1) % TREES
            try:
                lock = hold(self._directory / str(number), wait=False)
            except BlockingIOError:
                continue
            except FileNotFoundError:
                raise SandboxUnavailableError(
                    f"the image store was created by an older version: {self._directory / str(number)} is missing",
                    next_step="run `agentenv images list` once to upgrade it",
                ) from None
            return ClaimedRange(IdRange(number), lock)
        raise SandboxUnavailableError(
            f"all {TREES} ranges of ids of this node are in use", next_step="end slots of images, or use more nodes"
        )
