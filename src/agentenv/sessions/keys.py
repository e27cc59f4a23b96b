"""Names of keys, as tmux has them, and the bytes a terminal sends for them. Pure."""

from __future__ import annotations

import difflib
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
_CONTROLLED = "@abcdefghijklmnopqrstuvwxyz[\\]^_"

SIGNAL_KEYS = {b"\x03": signal.SIGINT, b"\x1c": signal.SIGQUIT}
"""What can be had without a terminal: its interrupt and quit keys, as signals."""


def key_bytes(name: str) -> bytes:
    """What the key sends. Raises InvalidArgumentsError, naming the nearest key, when there is none."""
    if found := _CONTROL.fullmatch(name):
        key = found[1].lower()
        if key == "space":
            return b"\0"
        if key == "?":
            return b"\x7f"
        if key in _CONTROLLED:
            return bytes([_CONTROLLED.index(key)])
    elif found := _META.fullmatch(name):
        return b"\x1b" + (found[1].encode() if len(found[1]) == 1 else key_bytes(found[1]))
    elif (sent := _NAMED.get(name.casefold())) is not None:
        return sent.encode()
    raise InvalidArgumentsError(f"no key is named {name[:40]!r}{_hint(name)}", next_step=f"keys: {', '.join(_SHOWN)}")


def _hint(name: str) -> str:
    near = difflib.get_close_matches(name[:40].casefold(), _NAMED, n=1)
    return f"; did you mean {near[0].capitalize()!r}?" if near else ""
