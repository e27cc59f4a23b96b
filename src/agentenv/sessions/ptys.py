"""Terminals: their size, their number, and what programs on them are told of them."""

from __future__ import annotations

import fcntl
import struct
import termios
from collections.abc import Mapping

TERM = "vt100"
"""Every system's terminfo has it; programs that draw have all they need, and print no colours, titles or other
screens, which nobody here would see."""
_NO_TERMINAL = "dumb"
_GET_NUMBER = 0x80045430
"""TIOCGPTN, which the termios module lacks."""


def set_size(fd: int, rows: int, columns: int) -> None:
    """Say how large the terminal is; programs on it are told (SIGWINCH)."""
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def number_of(fd: int) -> int:
    """N, when the other side of ``fd`` is ``/dev/pts/N`` of the place it was made in."""
    found: int = struct.unpack("i", fcntl.ioctl(fd, _GET_NUMBER, bytes(4)))[0]
    return found


def terminal_env(env: Mapping[str, str]) -> dict[str, str]:
    """The environment of a program on a terminal: TERM names one, unless somebody has chosen another."""
    return {**env, "TERM": TERM} if env.get("TERM", _NO_TERMINAL) == _NO_TERMINAL else dict(env)
