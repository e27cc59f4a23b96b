"""The latest calls of one slot that have ended, with the end of what they printed: for ``tail_routes``."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from agentenv.sandbox.server.calls import Fields, Raw, SlotCall
from agentenv.sandbox.server.process import OutputReader
from agentenv.wire.base import WireModel
from agentenv.wire.tails import TAIL_BYTES
from agentenv.wire.tools import BashArguments

MAX_CALLS: Final = 50
_OF_ONE_BYTES: Final = TAIL_BYTES // 8
"""Of each stream of one call."""
_ABOUT_CHARS: Final = 200
_DESCRIPTIVE: Final = ("command", "path", "text", "pattern", "action")
"""Arguments that describe a call best, in order of preference."""


class Printed(NamedTuple):
    """One stream of a call: how long it was, and its last bytes."""

    total_bytes: int
    last: bytes


_NOTHING: Final = Printed(0, b"")


@dataclass(slots=True)
class LoggedCall:
    """One call that has ended. ``ended_at_s`` is of the loop's clock."""

    call_id: str
    tool: str
    about: str
    ended_at_s: float
    duration_s: float | None
    exit_code: int | None
    note: str
    stdout: Printed
    stderr: Printed

    @property
    def size_bytes(self) -> int:
        """Size of its kept output."""
        return len(self.stdout.last) + len(self.stderr.last)


class CallLog:
    """At most MAX_CALLS calls and TAIL_BYTES of output; adding one costs two microseconds."""

    __slots__ = ("_bytes", "_calls", "added")

    def __init__(self) -> None:
        self._calls: deque[LoggedCall] = deque()
        self._bytes = 0
        self.added = 0
        """Calls added so far: the number of the last one."""

    def add(self, call: SlotCall, fields: Fields, now: float) -> None:
        """This call has ended with this result."""
        process = call.process if isinstance(call.arguments, BashArguments) else None
        if process is not None:
            stdout, stderr = _captured(process.stdout), _captured(process.stderr)
        else:
            stdout, stderr = _returned(fields.get("stdout", "")), _returned(fields.get("stderr", ""))
        note = "timed out" if "timed_out" in fields else "out of memory" if "oom_killed" in fields else ""
        entry = LoggedCall(
            call.call_id,
            call.tool,
            about(call.arguments),
            now,
            fields.get("duration_s"),
            fields.get("exit_code"),
            note or str(fields.get("error", "")),
            stdout,
            stderr,
        )
        self._calls.append(entry)
        self._bytes += entry.size_bytes
        self.added += 1
        while self._bytes > TAIL_BYTES or len(self._calls) > MAX_CALLS:
            self._bytes -= self._calls.popleft().size_bytes

    def after(self, number: int) -> Iterator[LoggedCall]:
        """The calls added after the one of this number, as far as they are kept."""
        known = max(0, len(self._calls) - (self.added - number))
        return (self._calls[at] for at in range(known, len(self._calls)))

    def clear(self) -> None:
        """The lease has ended: the next one must not see its calls."""
        self._calls.clear()
        self._bytes = 0


def about(arguments: WireModel) -> str:
    """The first line of the command, or what else describes the call best."""
    for name in _DESCRIPTIVE:
        if text := getattr(arguments, name, None):
            break
    if not isinstance(text, str):
        return ""
    line = text[: _ABOUT_CHARS + 1].strip().partition("\n")[0]
    return line if len(line) <= _ABOUT_CHARS else f"{line[:_ABOUT_CHARS]}…"


def _captured(reader: OutputReader | None) -> Printed:
    if reader is None or not reader.kept.total_bytes:
        return _NOTHING
    total = reader.kept.total_bytes
    return Printed(total, reader.kept.read(max(0, total - _OF_ONE_BYTES), _OF_ONE_BYTES)[1])


def _returned(value: str | Raw) -> Printed:
    if not value:
        return _NOTHING
    if isinstance(value, tuple):
        return Printed(sum(map(len, value)), bytes(value[-1][-_OF_ONE_BYTES:]))
    last = value[-_OF_ONE_BYTES:].encode("utf-8", "replace")
    return Printed(max(len(value), len(last)), last[-_OF_ONE_BYTES:])
