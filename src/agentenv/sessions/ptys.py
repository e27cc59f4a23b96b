"""Terminals' sizes."""

from __future__ import annotations

import fcntl
import struct
import termios


def set_size(fd: int, rows: int, columns: int) -> None:
    """Say how large the terminal is; programs on it are told (SIGWINCH)."""
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
