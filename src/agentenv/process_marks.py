"""Marks that tell a process from any other that has had its pid. Standard library only."""

from __future__ import annotations

import os
from pathlib import Path

_PROC = Path("/proc")


def process_mark(pid: int) -> str:
    """Boot, pid namespace, pid and start time of a process: nobody else's, on any machine.

    Empty when there is no such process, when it has ended and only waits to be reaped, and without /proc.
    """
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        namespace = (_PROC / "self/ns/pid").readlink()
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in ("Z", "X") else f"{boot}:{namespace}:{pid}:{fields[19]}"


def own_mark() -> str:
    """The mark of this process."""
    return process_mark(os.getpid())
