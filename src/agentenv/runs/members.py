"""``members.jsonl``: the rollouts that have ended of groups that have not, so that a killed process loses none of them.

A line per rollout, with its tokens where a trainer needs them; and a line ``{"group": ..., "ended": true}`` when a
group is in the other files, from which on the lines of its members mean nothing. They are removed when they are the
larger part of the file. A group with members that infrastructure has failed keeps the others here: they are what a
resumed run completes it with.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentenv.agent.jsonable import jsonable
from agentenv.agent.rollout_log import append_text, line_of
from agentenv.agent.token_sequences import TokenSequence
from agentenv.agent.transcript import Transcript
from agentenv.runs.directory import replace

LEAST_REMOVED_BYTES: Final = 32 * 2**20
"""The file is rewritten when so many of its bytes mean nothing, and these are more than half of it."""


class MemberRecord(BaseModel):
    """A rollout that has ended."""

    model_config = ConfigDict(extra="ignore")

    group: str
    position: int | None
    member: int
    """Its number in the group."""
    transcript: Transcript
    token_sequences: list[TokenSequence] = Field(default_factory=list)

    def whole(self) -> Transcript:
        """The transcript with its tokens."""
        return self.transcript.model_copy(update={"token_sequences": self.token_sequences})


class MembersFile:
    """The file as the one process that plays the run writes it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._live: dict[str, list[bytes]] = {}
        self._live_bytes = 0
        self._bytes = 0

    def add(self, group: str, position: int | None, member: int, transcript: Transcript) -> None:
        """Append a rollout. Raises: as :func:`append_line`."""
        record = MemberRecord(
            group=group,
            position=position,
            member=member,
            transcript=transcript,
            token_sequences=transcript.token_sequences,
        )
        self._append(group, jsonable(record.model_dump()))

    def ended(self, group: str) -> None:
        """The group is in the other files. Raises: as :func:`append_line`."""
        if group not in self._live:
            return
        self._append(group, {"group": group, "ended": True})
        self._live_bytes -= sum(map(len, self._live.pop(group)))
        if self._bytes - self._live_bytes > max(LEAST_REMOVED_BYTES, self._live_bytes):
            self._rewrite()

    def _append(self, group: str, document: Any) -> None:
        line = line_of(document)
        append_text(self._path, line)
        self._live.setdefault(group, []).append(line)
        self._live_bytes += len(line)
        self._bytes += len(line)

    def _rewrite(self) -> None:
        replace(self._path, b"".join(line for lines in self._live.values() for line in lines))
        self._bytes = self._live_bytes

    def take_over(self, records: Iterable[MemberRecord]) -> None:
        """Begin with these rollouts, of an earlier process, and no others. Raises: OSError."""
        for record in records:
            line = line_of(jsonable(record.model_dump()))
            self._live.setdefault(record.group, []).append(line)
            self._live_bytes += len(line)
        if self._live or self._path.exists():
            self._rewrite()

    def close(self) -> None:
        """Remove the file if nothing in it means anything. Raises: OSError."""
        if not self._live:
            self._path.unlink(missing_ok=True)


def read_members(path: Path) -> Iterator[MemberRecord]:
    """The rollouts of groups that have not ended, in order; half a last line, of a writer that was killed, is left out.

    Raises: OSError; ValueError for a line that is not of this file."""
    open_groups: dict[str, list[MemberRecord]] = {}
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return
    for number, line in enumerate(lines, 1):
        try:
            document = json.loads(line)
            if document.get("ended"):
                open_groups.pop(document["group"], None)
                continue
            record = MemberRecord.model_validate(document)
        except (ValidationError, ValueError, AttributeError, KeyError) as error:
            if number == len(lines) and not line.endswith(b"\n"):
                break
            raise ValueError(f"{path}:{number} is not the record of a rollout") from error
        open_groups.setdefault(record.group, []).append(record)
    for records in open_groups.values():
        yield from records
