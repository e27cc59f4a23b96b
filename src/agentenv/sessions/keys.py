"""Key names as in tmux, and the bytes a terminal sends for them. Pure."""

from __future__ import annotations

import re
import signal

from agentenv.errors import InvalidArgumentsError

_NAMED = {
    "enter": "\r", "return": "\r", "tab": "\t", "btab": "\x1b[Z", "escape": "\x1b", "esc": "\x1b", "space": " ",
    "bspace": "\x7f", "backspace": "\x7f", "up": "\x1b[A", "down": "\x1b[B", "right": "\x1b[C", "left": "\x1b[D",
    "home": "\x1b[H", "end": "\x1b[F", "insert": "\x1b[2~", "ic": "\x1b[2~", "delete": "\x1b[3~", "dc": "\x1b[3~",
    "pageup": "\x1b[5~", "ppage": "\x1b[5~", "pagedown": "\x1b[6~", "npage": "\x1b[6~",
    "f1": "\x1bOP", "f2": "\x1bOQ", "f3": "\x1bOR", "f4": "\x1bOS", "f5": "\x1b[15~", "f6": "\x1b[17~",
    "f7": "\x1b[18~", "f8": "\x1b[19~", "f9": "\x1b[20~", "f10": "\x1b[21~", "f11": "\x1b[23~", "f12": "\x1b[24~",
}  # fmt: skip
_SHOWN = ("Enter", "Tab", "Escape", "Space", "Backspace", "Up", "Down", "Left", "Right", "Home", "End", "PageUp",
          "PageDown", "Insert", "Delete", "F1 to F12", "C-a to C-z", "M-x")  # fmt: skip
_CONTROL = re.compile(r"(?:C-|c-|\^|[Cc]trl[-+])(.|Space|space)")
_META = re.compile(r"(?:M-|m-|[Aa]lt[-+])(.+)", re.DOTALL)
_MODIFIED = re.compile(r"(?:[CMScms]-|[Cc]trl[-+]|[Aa]lt[-+]|[Ss]hift[-+])(.+)")
_FUNCTION = re.compile(r"[Ff]\d{1,2}")
_CONTROLLED = "@abcdefghijklmnopqrstuvwxyz[\\]^_"

SIGNAL_KEYS = {b"\x03": signal.SIGINT, b"\x1c": signal.SIGQUIT}
"""Keys that work without a terminal: interrupt and quit, as signals."""


def key_bytes(name: str) -> bytes:
    """The bytes a key sends. Text that is not a key name is sent literally, as in tmux: ``y``, ``:wq``, ``ls -l``.
    Raises InvalidArgumentsError for an unknown key (``F13``, ``C-Enter``), naming the known ones."""
    sent = named_key(name)
    return name.encode("utf-8", "surrogatepass") if sent is None else sent


def named_key(name: str) -> bytes | None:
    """The bytes the key of this name sends, None when the name is text. Raises InvalidArgumentsError as
    :func:`key_bytes` does."""
    if found := _CONTROL.fullmatch(name):
        key = found[1].lower()
        if key == "space":
            return b"\0"
        if key == "?":
            return b"\x7f"
        if key in _CONTROLLED:
            return bytes([_CONTROLLED.index(key)])
    elif (found := _META.fullmatch(name)) and (len(found[1]) == 1 or _means_a_key(found[1])):
        return b"\x1b" + key_bytes(found[1])
    elif (sent := _NAMED.get(name.casefold())) is not None:
        return sent.encode()
    if not _means_a_key(name):
        return None
    raise InvalidArgumentsError(f"unknown key {name[:40]!r}", next_step=f"keys: {', '.join(_SHOWN)}")


def _means_a_key(name: str) -> bool:
    """Whether the text is meant as a key, known or not."""
    if found := _MODIFIED.fullmatch(name):
        name = found[1]
        if len(name) == 1:
            return True
    return name.casefold() in _NAMED or _FUNCTION.fullmatch(name) is not None
