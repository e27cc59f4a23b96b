"""Terminals: their size, their number, and the environment of programs on them."""

from __future__ import annotations

import fcntl
import struct
import termios
from collections.abc import Mapping

TERM = "vt100"
"""Present in every terminfo database; programs can draw with it, but print no colours, titles or alternate screens,
which nobody would see."""
_NO_TERMINAL = "dumb"
_GET_NUMBER = 0x80045430
"""TIOCGPTN, which the termios module lacks."""


def set_size(fd: int, rows: int, columns: int) -> None:
    """Set the terminal's size; its programs are notified (SIGWINCH)."""
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def number_of(fd: int) -> int:
    """N, if the other side of ``fd`` is ``/dev/pts/N`` where it was created."""
    found: int = struct.unpack("i", fcntl.ioctl(fd, _GET_NUMBER, bytes(4)))[0]
    return found


def terminal_env(env: Mapping[str, str]) -> dict[str, str]:
    """The environment of a program on a terminal: TERM is set unless it is already."""
    return {**env, "TERM": TERM} if env.get("TERM", _NO_TERMINAL) == _NO_TERMINAL else dict(env)
