"""Output written to a terminal as it looks there: without what was overwritten, without escape sequences. Pure."""

from __future__ import annotations

import re
from typing import Final

_ESCAPES: Final = re.compile(
    r"\x1b\[[0-?]{0,64}[ -/]{0,8}[@-~]"  # CSI: colours, movements of the cursor
    r"|\x1b\][^\x07\x1b\n]{0,4096}(?:\x07|\x1b\\)"  # OSC: titles, links
    r"|\x1b[PX^_][^\x1b\n]{0,4096}\x1b\\"  # DCS, SOS, PM, APC
    r"|\x1b[ -/]{1,3}[0-~]"  # character sets
    r"|\x1b[0-OQ-WYZ\\`-~]"  # the other two-character sequences
    r"|[\x00\x05\x07\x0e\x0f]"  # bells and fillers
)
_ERASE_LINE: Final = re.compile(r"\x1b\[[02]?K")


def rendered(text: str) -> str:
    """``text`` as a terminal shows it line by line: a line is what stands in it after all its carriage returns and
    backspaces, without colours, titles and movements of the cursor. Takes time in proportion to ``text``.

    Programs that draw the whole screen are not emulated: the ``tmux`` tool does that.
    """
    if "\r" not in text and "\x1b" not in text and "\b" not in text and "\a" not in text:
        return text
    return "\n".join(_line(line) for line in text.split("\n"))


def without_overwritten(text: str) -> str:
    """``text`` with the progress bars of each line reduced to their last state. Lines that end in a carriage
    return (CRLF) and escape sequences stay as they are: this was not written to a terminal."""
    if "\r" not in text:
        return text
    return "\n".join(_last_state(line) for line in text.split("\n"))


def _last_state(line: str) -> str:
    body = line.rstrip("\r")
    if "\r" not in body:
        return line
    return _overwritten(body) + line[len(body) :]


def _line(line: str) -> str:
    line = line.rstrip("\r")
    if "\r" in line:
        # "erase to the end of the line" right after a return is how bars are redrawn: the text before it is gone
        line = _overwritten(_ESCAPES.sub("", _ERASE_LINE.sub("\x1a", line)))
    line = _ESCAPES.sub("", line).replace("\x1a", "")
    return _backspaced(line) if "\b" in line else line


def _overwritten(line: str) -> str:
    """What is left of ``line`` when each part after a carriage return is written over the one before."""
    shown: list[str] = []
    length = 0
    for part in reversed(line.split("\r")):  # from the last one: what it covers is known, so no part is copied twice
        text = part.replace("\x1a", "")
        shown.append(text[length:])
        length = max(length, len(text))
        if text != part:  # it erased what stood behind it
            break
    return "".join(shown)


def _backspaced(line: str) -> str:
    shown: list[str] = []
    at = 0
    for char in line:
        if char == "\b":
            at = max(0, at - 1)
        else:
            shown[at : at + 1] = [char]
            at += 1
    return "".join(shown)
