"""Recordings of a group's external calls and their answers: one JSON-lines file per item.

Every rollout of a group, and of later runs, gets the same answer to the same request. Concurrent equal requests are
made once. Stateful tools (a browser) are keyed by the whole chain of the trajectory's stateful calls: a snapshot
after A, B differs from a snapshot after A. Secrets are removed before anything is recorded.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, ValidationError

from agentenv.errors import InfraError
from agentenv.locks import locked

_UNGROUPED: Final = "ungrouped"
_NAME_CHARS: Final = 80


class Recording(BaseModel):
    """One recorded answer: the part of a result that is independent of the run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: str
    tool: str
    arguments: dict[str, Any]
    after: str = ""
    """For stateful tools, the key of the stateful call before."""
    exit_code: int = 0
    stderr: str = ""
    content: Any = None
    truncated: bool = False
    error: str = ""
    """Error code of a call that the tool refused. Used in replays only."""
    message: str = ""
    """Message of the refusal."""
    recorded_unix_s: float = 0.0


def key_of(tool: str, arguments: Mapping[str, Any], after: str = "") -> str:
    """The key of a request: equal for the same tool, arguments (in any order) and history."""
    identity = json.dumps([tool, arguments, after], sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(identity.encode("utf-8", "surrogatepass")).hexdigest()


def file_name(item: str) -> str:
    """A file name for any item id: readable, and unique to the item."""
    if not item:
        return f"{_UNGROUPED}.jsonl"
    digest = hashlib.sha256(item.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    return f"{re.sub(r'[^A-Za-z0-9_.-]', '_', item)[:_NAME_CHARS].lstrip('.')}-{digest}.jsonl"


class Cassette:
    """One item's recordings. Not thread-safe; other processes may append to the same file.

    Raises (on creation): InfraError: the file cannot be read, or a complete line of it is not a recording.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        read = _read(path)
        self._known = {recording.key: recording for recording in reversed(read) if not recording.error}
        self._refused = {recording.key: recording for recording in reversed(read) if recording.error}
        self._requests: dict[str, asyncio.Future[None]] = {}
        self._writing = asyncio.Lock()

    def __len__(self) -> int:
        return len(self._known)

    @property
    def is_requesting(self) -> bool:
        """Whether a request is being made now."""
        return bool(self._requests)

    def known(self, key: str) -> Recording | None:
        """The recorded answer; None if there is none."""
        return self._known.get(key)

    def refusal(self, key: str) -> Recording | None:
        """The recorded refusal; None if there is none."""
        return self._refused.get(key)

    async def keep_refusal(self, recording: Recording) -> None:
        """Record the first refusal of a request. It is not an answer, so in recording mode the request is made
        again.

        Raises: InfraError when the file cannot be written.
        """
        if recording.key not in self._refused:
            await self._keep(recording)

    async def answer(self, key: str, ask: Callable[[], Awaitable[Recording | None]]) -> Recording | None:
        """The recorded answer, or that of ``ask``, which is then recorded. Concurrent callers wait for the one that
        asks; if it ends without an answer to keep (None), the next one asks.

        Raises: whatever ``ask`` raises, to its own caller only; InfraError when the file cannot be written.
        """
        while True:
            if (found := self._known.get(key)) is not None:
                return found
            if (asked := self._requests.get(key)) is None:
                break
            await asyncio.wait({asked})
        turn = self._requests[key] = asyncio.get_running_loop().create_future()
        try:
            recording = await ask()
            if recording is not None:
                await self._keep(recording)
            return recording
        finally:
            del self._requests[key]
            turn.set_result(None)

    async def _keep(self, recording: Recording) -> None:
        stamped = recording.model_copy(update={"recorded_unix_s": round(time.time(), 3)})
        async with self._writing:
            try:
                await asyncio.to_thread(_append, self.path, stamped.model_dump_json().encode() + b"\n")
            except OSError as error:
                raise InfraError(f"the cassette {self.path} cannot be written: {error}") from error
        (self._refused if stamped.error else self._known)[stamped.key] = stamped


def _read(path: Path) -> list[Recording]:
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise InfraError(f"the cassette {path} cannot be read: {error}") from error
    found = []
    for number, line in enumerate(lines[:-1], 1):  # anything after the last newline was being written at a crash
        if not line:
            continue
        try:
            found.append(Recording.model_validate_json(line))
        except ValidationError as error:
            cure = "fix or remove that line"
            raise InfraError(
                f"{path}:{number} is not a valid recording: {error.errors()[0]['msg']}", next_step=cure
            ) from error
    return found


def _append(path: Path, line: bytes) -> None:
    """Append one line, completely or not at all, safe with other writers; half a line left by a crash is cut off."""
    with locked(path) as file:
        end = _whole_bytes(file)
        os.ftruncate(file, end)
        try:
            written = 0
            while written < len(line):
                written += os.pwrite(file, line[written:], end + written)
        except OSError:
            os.ftruncate(file, end)
            raise


def _whole_bytes(file: int) -> int:
    """Number of bytes of the file that are complete lines."""
    end = os.fstat(file).st_size
    while end > 0:
        begin = max(0, end - 65_536)
        newline = os.pread(file, end - begin, begin).rfind(b"\n")
        if newline >= 0:
            return begin + newline + 1
        end = begin
    return 0
