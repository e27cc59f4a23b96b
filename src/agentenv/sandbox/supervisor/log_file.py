"""Keeps the log file of a container short that outlives its starter."""

from __future__ import annotations

import os

TRIM_EVERY_S = 60.0
_ABOVE_BYTES = 1024 * 1024
_KEPT_BYTES = 256 * 1024


def trim(fd: int) -> None:
    """Cut a log of more than 1 MiB to its last lines. ``fd`` can read and appends, like those of all its writers.

    A line written meanwhile may be lost.
    """
    size = os.fstat(fd).st_size
    if size > _ABOVE_BYTES:
        _, _, tail = os.pread(fd, _KEPT_BYTES, size - _KEPT_BYTES).partition(b"\n")
        os.ftruncate(fd, 0)
        os.write(fd, tail)
