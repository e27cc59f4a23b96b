"""The logs of a farm of this machine, read and followed by ``agentenv logs``: that of ``agentenv up``, and those of
containers that outlive it."""

from __future__ import annotations

import asyncio
import io
import logging
import os
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from logging.handlers import RotatingFileHandler
from pathlib import Path

from agentenv.errors import ConfigError

_MAX_BYTES = 10 * 1024 * 1024
_POLL_S = 0.2


class _PrivateFile(RotatingFileHandler):
    def _open(self) -> io.TextIOWrapper:
        descriptor = os.open(self.baseFilename, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        return io.TextIOWrapper(io.FileIO(descriptor, "a"), encoding="utf-8", errors="replace")


@contextmanager
def logging_to(path: Path) -> Iterator[None]:
    """Write the logs of agentenv to ``path`` (mode 0600): at most 10 MiB, and one older file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = _PrivateFile(path, maxBytes=_MAX_BYTES, backupCount=1)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    ours = logging.getLogger("agentenv")
    before = ours.level
    ours.setLevel(min(before or logging.INFO, logging.INFO))
    ours.addHandler(handler)
    try:
        yield
    finally:
        ours.removeHandler(handler)
        ours.setLevel(before)
        handler.close()


async def lines_of(
    path: Path, *, more: Callable[[], Sequence[Path]] = tuple, containing: str = "", tail: int, follow: bool
) -> AsyncIterator[tuple[Path, str]]:
    """The last ``tail`` lines that contain a text, then, on request, new ones as they come; rotation is followed. With
    ``more``, which is asked again and again, the same for other files, one after the other, whole.

    Raises ConfigError when there is no log.
    """
    if not path.exists():  # noqa: ASYNC240 - one of a command's few
        raise ConfigError("logs", f"no log at {path}", next_step="`agentenv up` starts a farm that writes one")
    files: dict[Path, _LogFile] = {}
    try:
        for one in (path, *more()):
            files[one] = _LogFile(one)
            last = deque((line for line in files[one].read() if one != path or containing in line), maxlen=tail)
            for line in last:
                yield one, line
        while follow:
            await asyncio.sleep(_POLL_S)
            for one in (path, *more()):
                for line in files.setdefault(one, _LogFile(one)).read():
                    if one != path or containing in line:
                        yield one, line
    finally:
        for file in files.values():
            file.close()


class _LogFile:
    """A log that is read again and again, each time what is new."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: io.TextIOWrapper | None = None

    def read(self) -> Iterator[str]:
        """New lines."""
        while True:
            if self._file is None:
                try:
                    self._file = self._path.open(encoding="utf-8", errors="replace")
                except OSError:
                    return  # between the rename and the creation of the new file, or removed
            if os.fstat(self._file.fileno()).st_size < self._file.tell():
                self._file.seek(0, io.SEEK_END)  # it was cut to its last lines, which were read before
            yield from (line.rstrip("\n") for line in iter(self._file.readline, ""))
            if not self._rotated():
                return
            self.close()

    def close(self) -> None:
        """Close the file. May be repeated."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _rotated(self) -> bool:
        assert self._file is not None
        try:
            return not os.path.samestat(os.fstat(self._file.fileno()), self._path.stat())
        except OSError:
            return False
