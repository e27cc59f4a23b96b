"""A file that gets one JSON line per event, for audits."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentenv.errors import ConfigError

logger = logging.getLogger(__name__)


class AuditFile:
    """Appends to a file that only its owner can read; ``path`` None writes nothing.

    A line that cannot be written (a full disk) is logged as an error and counted in ``lost``; what it reports
    succeeds. A file that was renamed or removed (as by logrotate) is left, and the next line begins a new one.

    Raises: ConfigError when the file cannot be opened.
    """

    def __init__(self, path: Path | None) -> None:
        self.lost = 0
        self._path = path
        self._file: int | None = None
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = _opened(path)
        except OSError as error:
            raise ConfigError("audit_log", f"{path} cannot be written: {error}") from error

    @property
    def writes(self) -> bool:
        """Whether there is a file, and it is open."""
        return self._file is not None

    def write(self, entry: Mapping[str, Any]) -> None:
        """Append one line, in one write: several processes may append to the same file."""
        if self._file is None or self._path is None:
            return
        raw = json.dumps(entry, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
        try:
            if not _is_at(self._file, self._path):
                new = _opened(self._path)
                os.close(self._file)
                self._file = new
            if os.write(self._file, raw) != len(raw):
                raise OSError("only a part of the line was written")
        except OSError:
            self.lost += 1
            logger.exception("the audit log lost a line (%d so far)", self.lost)

    def close(self) -> None:
        """Close the file. Repeatable."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _opened(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _is_at(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False
