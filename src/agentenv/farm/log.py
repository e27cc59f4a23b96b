"""The log of a farm run by ``agentenv up``: written there, read and followed by ``agentenv logs``."""

from __future__ import annotations

import asyncio
import io
import logging
import os
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from logging.handlers import RotatingFileHandler
from pathlib import Path

from agentenv.errors import ConfigError

_MAX_BYTES = 10 * 1024 * 1024
_POLL_S = 0.2
_CONTAINERS_LOGGER = "agentenv.slots.backends.local_process"
"""Logger that repeats the containers' logs as debug messages."""


class _PrivateFile(RotatingFileHandler):
    def _open(self) -> io.TextIOWrapper:
        descriptor = os.open(self.baseFilename, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        return io.TextIOWrapper(io.FileIO(descriptor, "a"), encoding="utf-8", errors="replace")


@contextmanager
def logging_to(path: Path) -> Iterator[None]:
    """Write the logs of agentenv and its containers to ``path`` (mode 0600): at most 10 MiB, and one older file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = _PrivateFile(path, maxBytes=_MAX_BYTES, backupCount=1)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    ours, containers = logging.getLogger("agentenv"), logging.getLogger(_CONTAINERS_LOGGER)
    before = ours.level, containers.level
    ours.setLevel(min(ours.level or logging.INFO, logging.INFO))
    containers.setLevel(logging.DEBUG)
    ours.addHandler(handler)
    try:
        yield
    finally:
        ours.removeHandler(handler)
        ours.setLevel(before[0])
        containers.setLevel(before[1])
        handler.close()


async def lines_of(path: Path, *, containing: str = "", tail: int, follow: bool) -> AsyncIterator[str]:
    """The last ``tail`` lines that contain a text, then, on request, new ones as they come; rotation is followed.

    Raises ConfigError when there is no log.
    """
    try:
        file = path.open(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(
            "logs", f"no log at {path}", next_step="`agentenv up` starts a farm that writes one"
        ) from error
    try:
        for line in deque((line for line in file if containing in line), maxlen=tail):
            yield line.rstrip("\n")
        while follow:
            for line in file:
                if containing in line:
                    yield line.rstrip("\n")
            if _rotated(file, path):
                file.close()
                file = path.open(encoding="utf-8", errors="replace")
            await asyncio.sleep(_POLL_S)
    finally:
        file.close()


def _rotated(file: io.TextIOWrapper, path: Path) -> bool:
    try:
        return not os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError:
        return False  # between the rename and the creation of the new file
