"""Renders terminal output as it looks on screen: without overwritten text and escape sequences. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

_ESCAPES: Final = re.compile(
    r"\x1b\[[0-?]{0,64}[ -/]{0,8}[@-~]"  # CSI: colours, movements of the cursor
    r"|\x1b\][^\x07\x1b\n]{0,4096}(?:\x07|\x1b\\)"  # OSC: titles, links
    r"|\x1b[PX^_][^\x1b\n]{0,4096}\x1b\\"  # DCS, SOS, PM, APC
    r"|\x1b[ -/]{1,3}[0-~]"  # character sets
    r"|\x1b[0-OQ-WYZ\\`-~]"  # the other two-character sequences
    r"|[\x00\x05\x07\x0e\x0f]"  # bells and fillers
)
_CONTROLS: Final = re.compile(rf"[\r\b]|{_ESCAPES.pattern}")
_MOVE: Final = re.compile(r"\x1b\[([0-9]{0,9})([CDGK])")
"""Cursor movements (right, left, to a column) and erasures, with which programs redraw a line."""
_REDRAWN: Final = re.compile(r"[\r\b]|\x1b\[(?:[0-9]{0,9}[CDG]|[12]K)")
_WIDEST: Final = 1000
"""Largest column a movement can reach; text may extend further."""
_BLANKS: Final = 10_000
"""Number of empty cells that movements may create in all lines together, in addition to the text's length."""
_BLANK: Final = "\0"
"""An empty cell: a space, unless nothing follows it. It cannot occur in text."""


def rendered(text: str) -> str:
    """``text`` as a terminal shows it, line by line: each line after all its carriage returns, backspaces, erasures
    and cursor movements, without colours and titles. Takes time linear in ``text``.

    Programs that draw the whole screen are not emulated: the ``tmux`` tool does that.
    """
    if "\r" not in text and "\x1b" not in text and "\b" not in text and "\a" not in text:
        return text
    blanks = _Blanks(len(text) + _BLANKS)
    return "\n".join(_line(line.rstrip("\r"), blanks) for line in text.split("\n"))


def without_overwritten(text: str) -> str:
    """``text`` with the progress bars of each line reduced to their last state. Lines that end in a carriage return
    (CRLF) and escape sequences are unchanged, because this was not written to a terminal."""
    if "\r" not in text:
        return text
    return "\n".join(_last_state(line) for line in text.split("\n"))


def _last_state(line: str) -> str:
    body = line.rstrip("\r")
    if "\r" not in body:
        return line
    cells: list[str] = []
    for part in body.split("\r"):
        cells[: len(part)] = part
    return "".join(cells) + line[len(body) :]


def _line(line: str, blanks: _Blanks) -> str:
    if not _REDRAWN.search(line):
        return _ESCAPES.sub("", line)
    row, at = _Row(blanks), 0
    for control in _CONTROLS.finditer(line):
        row.write(line[at : control.start()])
        row.obey(control[0])
        at = control.end()
    row.write(line[at:])
    return row.shown()


@dataclass
class _Blanks:
    """Counts the empty cells that movements may still create; after that, text following one is placed at the end
    of its line."""

    left: int


class _Row:
    """One line of a terminal, with its cursor. ``_blank`` cells at its beginning are known to be empty, so that no
    cell is erased twice."""

    def __init__(self, blanks: _Blanks) -> None:
        self._blanks = blanks
        self._cells: list[str] = []
        self._column = 0
        self._blank = 0

    def shown(self) -> str:
        return "".join(self._cells).rstrip(_BLANK).replace(_BLANK, " ")

    def write(self, text: str) -> None:
        if not text:
            return
        cells = self._cells
        missing = max(0, self._column - len(cells))
        if missing > self._blanks.left:
            self._column, missing = len(cells), 0
        self._blanks.left -= missing
        column = self._column
        cells.extend(_BLANK * missing)
        cells[column : column + len(text)] = text
        self._blank = min(self._blank, column)
        self._column += len(text)

    def obey(self, control: str) -> None:
        """Execute a line's control; others have no effect."""
        if control == "\r":
            self._column = 0
        elif control == "\b":
            self._column = max(0, self._column - 1)
        elif found := _MOVE.fullmatch(control):
            number, kind = int(found[1] or 0), found[2]
            if kind == "K":
                self._erase(number)
            elif kind == "G":
                self._column = min(max(1, number), _WIDEST) - 1
            elif kind == "D":
                self._column = max(0, self._column - max(1, number))
            else:
                self._column = max(self._column, min(self._column + max(1, number), _WIDEST))

    def _erase(self, what: int) -> None:
        """0: from the cursor on, 1: up to the cursor, 2: all."""
        cells = self._cells
        if what in (0, 2):
            del cells[self._column :]
        if what in (1, 2):
            end = min(self._column + 1, len(cells))
            cells[self._blank : end] = _BLANK * (end - self._blank)
            self._blank = max(self._blank, end)
        self._blank = min(self._blank, len(cells))
