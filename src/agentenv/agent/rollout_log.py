"""``rollouts.jsonl``: one finished group per line, written completely or not at all."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from agentenv.agent.group import outcome_of
from agentenv.agent.jsonable import item_id, item_record, jsonable
from agentenv.agent.transcript import GroupRecord, Transcript
from agentenv.locks import locked

logger = logging.getLogger(__name__)

_BLOCK_BYTES: Final = 64 * 1024


def append_record(path: Path, record: GroupRecord) -> None:
    """Append one line. Safe with other writers of the same file; a partly written line is removed again, also that of
    a writer who was killed. Raises: OSError (disk full, no permission); the file is then unchanged."""
    line = json.dumps(jsonable(record.model_dump()), ensure_ascii=False).encode() + b"\n"
    with locked(path, flags=os.O_WRONLY | os.O_APPEND) as file:
        with suppress(OSError):  # it cannot be read
            _cut_unfinished_line(path, file)
        size_before = os.fstat(file).st_size
        try:
            _write_all(file, line)
        except OSError:
            with suppress(OSError):  # not a regular file
                os.ftruncate(file, size_before)
            raise


def _cut_unfinished_line(path: Path, file: int) -> None:
    """Whoever was writing the last line is dead, since the file is locked."""
    if not stat.S_ISREG(os.fstat(file).st_mode):
        return
    with path.open("rb") as written:
        end = kept = written.seek(0, os.SEEK_END)
        complete = 0
        while kept and not complete:
            begin = max(0, kept - _BLOCK_BYTES)
            written.seek(begin)
            complete = written.read(kept - begin).rfind(b"\n") + 1
            kept = begin + complete
    if kept < end:
        os.ftruncate(file, kept)


def _write_all(file: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(file, left) :]


class RolloutLog:
    """The ``rollouts.jsonl`` of one environment; with ``path`` None nothing is written."""

    def __init__(self, path: str | None) -> None:
        self._path = Path(path) if path else None
        self._writing = asyncio.Lock()

    async def add(self, group: str, item: Any, size: int, transcripts: Sequence[Transcript]) -> bool:
        """Write one group. Returns False, and logs an error, when it could not be written: neither a full disk nor
        an odd value in a member's record may cost the rollouts themselves."""
        if self._path is None:
            return True
        record = GroupRecord(
            group=group,
            item_id=item_id(item),
            item=item_record(item),
            group_size=size,
            outcome=outcome_of(transcripts),
            trajectories=list(transcripts),
        )
        try:
            async with self._writing:
                await asyncio.to_thread(append_record, self._path, record)
        except (OSError, ValueError, RecursionError):
            logger.exception("the record of group %s could not be written", group)
            return False
        return True
