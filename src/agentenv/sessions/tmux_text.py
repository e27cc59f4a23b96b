"""Texts sent to tmux, and its screens. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

from agentenv.sessions.keys import named_key

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
