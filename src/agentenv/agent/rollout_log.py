"""Files of JSON lines, each written completely or not at all: ``rollouts.jsonl``, and the groups of ``process``."""

from __future__ import annotations

import asyncio
import json
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

from agentenv.agent.group import PLACE, outcome_of
from agentenv.agent.jsonable import item_id, item_record, jsonable
from agentenv.agent.transcript import GroupRecord, RunRecord, Transcript
from agentenv.locks import locked

_BLOCK_BYTES: Final = 64 * 1024


def append_record(path: Path, record: GroupRecord) -> None:
    """Append one line. Raises: as :func:`append_line`."""
    append_line(path, jsonable(record.model_dump()))


def append_line(path: Path, document: Any) -> None:
    """Append a JSON document as one line. Safe with other writers of the same file; a partly written line is removed
    again, also that of a writer who was killed. A last line that misses only its line feed gets one. Raises:
    OSError (disk full, no permission), TypeError, ValueError, RecursionError (the document is not JSON, or the file
    does not end with JSON); the file is then unchanged."""
    append_text(path, line_of(document))


def line_of(document: Any) -> bytes:
    """The document as one line. Raises: TypeError, ValueError, RecursionError: it is not JSON."""
    return json.dumps(document, ensure_ascii=False).encode() + b"\n"


def append_text(path: Path, line: bytes) -> None:
    """As :func:`append_line`, for a line that is one already."""
    with _locked_as_named(path) as file:
        missing = b""
        with suppress(OSError):  # it cannot be read
            missing = _missing_end(path, file)
        size_before = os.fstat(file).st_size
        try:
            _write_all(file, missing + line)
        except OSError:
            with suppress(OSError):  # not a regular file
                os.ftruncate(file, size_before)
            raise


@contextmanager
def _locked_as_named(path: Path) -> Iterator[int]:
    """The file that has this name once its lock is held: a resumed run replaces its files, under their lock."""
    while True:
        with locked(path, flags=os.O_WRONLY | os.O_APPEND) as file:
            if _is_named(path, file):
                yield file
                return


def _is_named(path: Path, file: int) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def _missing_end(path: Path, file: int) -> bytes:
    """What the last line misses: its line feed, or nothing. Its writer is dead, since the file is locked, so
    half a line is cut. Raises: ValueError when it is not part of a JSON document."""
    if not stat.S_ISREG(os.fstat(file).st_mode):
        return b""
    with path.open("rb") as written:
        kept = written.seek(0, os.SEEK_END)
        complete = 0
        while kept and not complete:
            begin = max(0, kept - _BLOCK_BYTES)
            written.seek(begin)
            complete = written.read(kept - begin).rfind(b"\n") + 1
            kept = begin + complete
        written.seek(kept)
        last = written.read()
    if _is_document(last):
        return b"\n"
    if last.startswith((b"{", b"[")):
        os.ftruncate(file, kept)
    elif last:
        raise ValueError(f"{path} does not end with a line of JSON")
    return b""


def _is_document(line: bytes) -> bool:
    """Whether it is a JSON object or array, of which no beginning is one."""
    try:
        return isinstance(json.loads(line), (dict, list))
    except (ValueError, RecursionError):
        return False


def _write_all(file: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(file, left) :]


def unwritten(write: Callable[[], None]) -> str:
    """Why a line could not be written; empty if it was. Neither a full disk nor an odd value in a member's record may
    cost the rollouts themselves."""
    try:
        write()
    except OSError as error:
        return error.strerror or str(error)
    except (TypeError, ValueError, RecursionError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


class RolloutLog:
    """The ``rollouts.jsonl`` of one run; with ``path`` None nothing is written."""

    def __init__(self, path: str | None, run: RunRecord | None = None) -> None:
        self._path = Path(path) if path else None
        self._run = run
        self._writing = asyncio.Lock()

    @property
    def has_content(self) -> bool:
        """Whether there is something in the file."""
        try:
            return self._path is not None and self._path.stat().st_size > 0
        except OSError:
            return False

    async def add(
        self, group: str, item: Any, size: int, transcripts: Sequence[Transcript], position: int | None = None
    ) -> str:
        """Write one group. Returns why it could not be written; empty if it was."""
        if self._path is None:
            return ""
        record = GroupRecord(
            run=self._run,
            group=group,
            position=position,
            item_id=item_id(item),
            item=item_record(item),
            group_size=size,
            outcome=outcome_of(transcripts),
            trajectories=list(transcripts),
        )
        write = partial(append_record, self._path, record)
        async with self._writing:
            return await asyncio.to_thread(unwritten, write)


class GroupsFile:
    """The file of groups, with the methods of the writer that atropos opens for it. ``lost`` is called with the reason
    when a group cannot be written."""

    def __init__(self, path: str, lost: Callable[[str], None]) -> None:
        self._path = Path(path)
        self._lost = lost

    def write(self, group: Any) -> None:
        """Append a group; one of `process` with the name that it has in the records (``group``)."""
        place = PLACE.get()
        named = {"group": place.group, **group} if place is not None and place.group else group
        if why := unwritten(partial(append_line, self._path, named)):
            self._lost(why)

    def close(self) -> None:
        """Remove the file if it is empty: atropos creates it before anything runs. Repeatable."""
        with suppress(OSError):
            if self._path.stat().st_size == 0:
                self._path.unlink()
