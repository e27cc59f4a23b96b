"""``rollouts.jsonl``: one finished group a line, whole or not at all."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

from agentenv.agent.jsonable import jsonable
from agentenv.agent.transcript import GroupRecord


def append_record(path: Path, record: GroupRecord) -> None:
    """Append one line. Safe with other writers of the same file; what could not be written whole is
    taken back. Raises: OSError (disk full, no permission); the file is as it was."""
    line = json.dumps(jsonable(record.model_dump()), ensure_ascii=False).encode() + b"\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        size_before = os.fstat(file).st_size
        try:
            _write_all(file, line)
        except OSError:
            os.ftruncate(file, size_before)
            raise
    finally:
        os.close(file)


def _write_all(file: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(file, left) :]
