"""Files of containers on this machine: what their starter writes for them, and what dead ones leave."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path

from agentenv import subordinate_ids
from agentenv.config import cache_dir
from agentenv.sandbox.supervisor.sweep import sweep_container
from agentenv.slots.backends.base import StartFailed
from agentenv.slots.backends.fleet import StartFailedError
from agentenv.store.layout import Layout
from agentenv.wire.spec import Isolation

logger = logging.getLogger(__name__)

_SWEEP_WITHIN_S, _SWEEP_PAUSE_S = 5.0, 0.05


def local_store(isolation: Isolation) -> str:
    """The image store of this user, if containers of that isolation may have image slots here: root's, and those of
    users who have subordinate ids. It is made if it is missing: a container finds out at its start what it can show of
    a store. Blocks."""
    if os.geteuid() != 0 and (isolation == "user" or subordinate_ids.refusal() is not None):
        return ""
    directory = cache_dir() / "store"
    try:
        Layout(directory).create()
    except OSError as error:  # plain slots need none
        logger.warning("the image store cannot be made in %s, so there are no slots with images: %s", directory, error)
        return ""
    return str(directory)


def local_disk() -> str:
    """Where containers on this machine keep layers on its disk: the state directory is in memory on many."""
    return str(cache_dir() / "disk")


def write_private(texts: Mapping[Path, str]) -> None:
    """Create these files with mode 0600. Raises StartFailedError (the disk is full); some may exist then."""
    for path, text in texts.items():
        try:
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(text)
        except OSError as error:
            raise cannot_write(path.parent, error) from error


def cannot_write(directory: Path, error: OSError) -> StartFailedError:
    """The error of a container whose files could not be written."""
    return StartFailedError(
        StartFailed(
            f"cannot write to {directory}: {error.strerror}",
            next_step="free some space there, or set AGENTENV_STATE_DIR to a directory with room",
            permanent=True,
        )
    )


def sweep_left(directory: Path) -> None:
    """Remove the cgroups and the directory of a container that was killed; after an orderly end there is nothing to
    remove.

    Waits a few seconds for its lock, which its supervisor holds until the kernel has ended it.
    """
    until_s = time.monotonic() + _SWEEP_WITHIN_S
    while directory.exists() and time.monotonic() < until_s:
        if sweep_container(directory) is None:
            time.sleep(_SWEEP_PAUSE_S)
