"""Writable layers on the container's disk: a directory for each image slot that asks for one.

They go away in the time of a rename; the deletion itself takes as long as it takes, beside everything else.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
from pathlib import Path
from typing import Final

from agentenv.sandbox.supervisor.attest import parse_mounts
from agentenv.wire.spec import Isolation

log = logging.getLogger(__name__)

NAME: Final = "disk"
"""Where they are, in the container's directory."""
_ON_DISK: Final = ("btrfs", "ext4", "xfs")
"""File systems that are on a disk and can lie above an overlay's image: with extended attributes of users."""


class DiskLayers:
    """Directories below ``place``, which is this container's own."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._trash = place / "trash"

    def make(self, uid: int) -> Path:
        """A new, empty directory of this user and the group of the same number. Raises OSError."""
        self._trash.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._place.chmod(0o711)
        made = self._place / secrets.token_hex(8)
        made.mkdir(mode=0o700)
        os.chown(made, uid, uid)
        made.chmod(0o755)
        return made

    def discard(self, made: Path) -> None:
        """Remove one, in the background. Raises OSError when it is not there."""
        gone = self._trash / made.name
        made.rename(gone)
        threading.Thread(target=_delete, args=(gone,), name=f"delete {gone.name}", daemon=True).start()


def _delete(directory: Path) -> None:
    try:
        delete_tree(directory)
    except OSError:
        log.exception("%s could not be deleted", directory)


def delete_tree(directory: Path) -> None:
    """Delete a directory with all that is in it, however deep, following no link. Raises OSError.

    Directories in it are moved up, to where their names are short, and deleted in turn: neither our stack nor the
    length of a path bounds the depth.
    """
    waiting = 0
    todo = [directory]
    while todo:
        current = todo.pop()
        with os.scandir(current) as entries:
            inside = [(entry.path, entry.is_dir(follow_symlinks=False)) for entry in entries]
        for path, is_directory in inside:
            if is_directory:
                waiting += 1
                todo.append(directory.parent / f"{directory.name}.{waiting}")
                os.rename(path, todo[-1])  # noqa: PTH104
            else:
                os.unlink(path)  # noqa: PTH108
        current.rmdir()


def delete_all(place: Path) -> None:
    """Delete what is left of a dead container's layers. No effect if there are none."""
    with contextlib.suppress(FileNotFoundError):
        delete_tree(place)


def refusal(mountinfo: str, data_dir: str, isolation: Isolation) -> str:
    """Why slots of this container cannot write to its disk; empty if they can."""
    kind = _file_system(mountinfo, data_dir)
    if kind not in _ON_DISK:
        return f"the container's data_dir lies on {kind or 'no known file system'}, which is not a disk's"
    if isolation == "full":
        # Project quotas would bound it; until they are used, the whole disk does.
        return "nothing bounds what a slot writes to the disk, so a container of isolation=full refuses it"
    return ""


def _file_system(mountinfo: str, path: str) -> str:
    """The kind of the file system that a path is on, by the longest mount point above it; the last one covers."""
    found, longest = "", -1
    for mount in parse_mounts(mountinfo):
        point = mount.point.rstrip("/")
        if (path == point or path.startswith(f"{point}/")) and len(point) >= longest:
            found, longest = mount.kind, len(point)
    return found
