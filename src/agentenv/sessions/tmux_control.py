"""Parser for the output of tmux's control mode (``tmux -C``). Pure.

Each command is answered by a block, ``%begin`` to ``%end`` or ``%error``; between blocks come notifications, one
line each. Output of programs arrives escaped in ``%output`` lines, so it cannot be mistaken for either.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from agentenv.sessions.keys import named_key

MAX_LINE_BYTES = 4 * 1024 * 1024
MAX_BLOCK_BYTES = 8 * 1024 * 1024
MAX_BLOCK_LINES = 51_000
"""Of a longer answer (a long scrollback of wide lines) the last lines are kept, and the rest is counted. A whole
history with a screen fits."""

_LINE_OVERHEAD_BYTES = 48
"""Memory for a line in addition to its bytes."""
_LONG_LINE_BYTES = 64 * 1024
_MAX_NUMBER_BYTES = 100
"""Maximum length of the text after ``%begin``: a time, a number and flags."""
_NOTICES = (b"%pause", b"%session-changed", b"%exit")

_OCTAL = re.compile(rb"\\([0-7]{3})")


@dataclass(frozen=True)
class Answer:
    """A command's answer. ``ours``: the command came over this connection."""

    ok: bool
    ours: bool
    lines: tuple[str, ...]
    dropped_bytes: int = 0
    """Number of bytes dropped before these lines."""


@dataclass(frozen=True)
class Printed:
    """Output of a pane. ``escaped`` is its form on the line: decoding it is the expensive part."""

    pane: str
    escaped: bytes

    @property
    def data(self) -> bytes:
        """The bytes it printed."""
        return unescaped(self.escaped)


@dataclass(frozen=True)
class Noticed:
    """``exit``, ``pause`` or ``session-changed``, with the rest of its line. Other notifications are ignored."""

    name: str
    rest: str


Event = Answer | Printed | Noticed


class ControlParser:
    """Turns bytes into events. Overlong parts are dropped. Any program of the slot may have written the bytes: none
    costs more time than one of tmux's own."""

    def __init__(self) -> None:
        self._part = bytearray()
        self._skipping = False
        self._block: deque[bytes] | None = None
        self._block_bytes = 0
        self._dropped_bytes = 0
        self._ends = (b"", b"")

    @property
    def held_bytes(self) -> int:
        """Memory taken by incomplete parts."""
        return len(self._part) + (self._block_bytes if self._block is not None else 0)

    def shed(self) -> None:
        """Drop the lines of the current answer, and a long incomplete line."""
        if len(self._part) > _LONG_LINE_BYTES:
            self._part, self._skipping = bytearray(), True
        self._keep(0)

    def feed(self, data: bytes) -> list[Event]:
        """The events completed by these bytes."""
        events: list[Event] = []
        head, ended, rest = data.partition(b"\n")
        self._part += head  # in place: a long line may come byte by byte
        if ended:
            *more, part = rest.split(b"\n")
            whole = (bytes(self._part), *more)
            self._part = bytearray(part)
            for line in whole:
                if self._skipping:
                    self._skipping = False
                elif (event := self._line(line.removesuffix(b"\r"))) is not None:
                    events.append(event)
        if len(self._part) > MAX_LINE_BYTES:
            self._part, self._skipping = bytearray(), True
        return events

    def _line(self, line: bytes) -> Event | None:
        if self._block is not None:
            return self._in_block(line)
        name, _, rest = line.partition(b" ")
        if name == b"%begin" and len(rest) <= _MAX_NUMBER_BYTES:
            self._block, self._block_bytes, self._dropped_bytes = deque(), 0, 0
            self._ends = (b"%end " + rest, b"%error " + rest)
            return None
        if name == b"%output":
            pane, _, data = rest.partition(b" ")
            return Printed(pane.decode("ascii", "replace"), data)
        if name == b"%extended-output":
            head, _, data = rest.partition(b" : ")
            return Printed(head.split(b" ")[0].decode("ascii", "replace"), data)
        if name in _NOTICES:
            return Noticed(name[1:].decode("ascii", "replace"), rest.decode("utf-8", "replace"))
        return None

    def _in_block(self, line: bytes) -> Answer | None:
        assert self._block is not None
        if line in self._ends:
            text, self._block = b"\n".join(self._block).decode("utf-8", "replace"), None
            lines = tuple(text.split("\n")) if self._block_bytes else ()
            return Answer(line == self._ends[0], line.endswith(b" 1"), lines, self._dropped_bytes)
        self._block_bytes += len(line) + _LINE_OVERHEAD_BYTES
        self._block.append(line)
        self._keep(MAX_BLOCK_BYTES)
        return None

    def _keep(self, most_bytes: int) -> None:
        while self._block and (self._block_bytes > most_bytes or len(self._block) > MAX_BLOCK_LINES):
            dropped = self._block.popleft()
            self._block_bytes -= len(dropped) + _LINE_OVERHEAD_BYTES
            self._dropped_bytes += len(dropped) + 1


def unescaped(data: bytes) -> bytes:
    """Decode a pane's output from its form in an ``%output`` line."""
    return _OCTAL.sub(lambda found: bytes([int(found[1], 8) & 0xFF]), data)


CHUNK_CHARS = 1_000
"""Characters typed by one command; the next waits for its answer."""
_RUNS = re.compile(rf"[\x00-\x1f\x7f]{{1,300}}|[^\x00-\x1f\x7f]{{1,{CHUNK_CHARS}}}")
_OTHER_NAMES = {
    "return": "Enter", "esc": "Escape", "backspace": "BSpace", "insert": "IC", "delete": "DC", "pageup": "PPage",
    "pagedown": "NPage",
}  # fmt: skip
_CONTROL = re.compile(r"(?:c-|\^|[Cc]trl[-+])(.+)")
_META = re.compile(r"(?:m-|[Aa]lt[-+])(.+)", re.DOTALL)


def quoted(text: str) -> str:
    """``text`` as one word of a tmux command."""
    return "'" + text.replace("'", "'\\''") + "'"


def typing(pane: str, text: str) -> Iterator[str]:
    """The commands that type ``text``; a line feed is Enter, as when pasting."""
    for found in _RUNS.finditer(text.replace("\r\n", "\r").replace("\n", "\r")):
        run = found[0]
        if run[0] < " " or run[0] == "\x7f":
            yield f"send-keys -t {pane} -H {' '.join(f'{ord(char):02x}' for char in run)}"
        else:
            yield f"send-keys -t {pane} -l -- {quoted(run)}"


def pressing(pane: str, name: str) -> Iterator[str]:
    """The commands that press a key, or type text that is not a key name. Raises InvalidArgumentsError for an
    unknown key."""
    if named_key(name) is None:
        yield from typing(pane, name)
        return
    if found := _CONTROL.fullmatch(name):
        name = f"C-{found[1]}"
    elif found := _META.fullmatch(name):
        name = f"M-{found[1]}"
    yield f"send-keys -t {pane} -- {quoted(_OTHER_NAMES.get(name.casefold(), name))}"


def difference(before: list[str], now: list[str]) -> list[str]:
    """The new lines of ``now``: those after the longest end of ``before`` that ``now`` contains. All of ``now``
    when they have nothing in common, for example after a redraw."""
    end = len(before)
    while end and not before[end - 1]:
        end -= 1
    before = before[:end]
    if not before:
        return now
    # The last line may have grown since (a prompt that was typed at): it counts as changed, not as gone.
    for known in (before, before[:-1]):
        at = _end_of(known, now) if known else None
        if at is not None:
            return now[at:]
    return now


def _end_of(known: list[str], now: list[str]) -> int | None:
    """Where ``known`` ends in ``now``, at the last such place: after its last line, with equal lines before it as
    far as both go. In one pass (Knuth, Morris and Pratt's search) from the ends: lines may all be equal."""
    wanted = known[::-1]
    borders, matched = [0], 0
    for line in wanted[1:]:
        matched = _followed(wanted, borders, matched, line)
        borders.append(matched)
    matched = 0
    for left in range(len(now) - 1, -1, -1):
        matched = _followed(wanted, borders, matched, now[left])
        if matched == len(wanted):
            return left + matched
    return matched or None


def _followed(wanted: list[str], borders: list[int], matched: int, line: str) -> int:
    """Length of the beginning of ``wanted`` that the lines up to ``line`` end in, given that up to the previous
    line it was ``matched``."""
    while matched and wanted[matched] != line:
        matched = borders[matched - 1]
    return matched + (wanted[matched] == line)


def trimmed(lines: list[str]) -> str:
    """The lines as text, without empty lines at the end of the screen."""
    end = len(lines)
    while end and not lines[end - 1].strip():
        end -= 1
    return "".join(f"{line}\n" for line in lines[:end])
