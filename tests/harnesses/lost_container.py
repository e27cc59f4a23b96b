"""A container that is lost while a program runs in it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path


def kill_container_of(*argv: str, timeout_s: float = 120.0) -> None:
    """Wait until this program runs in a slot of this machine, and kill the container that has it."""
    until_s = time.monotonic() + timeout_s
    while (inside := _running("\0".join(argv) + "\0")) is None:
        assert time.monotonic() < until_s, f"no slot runs {argv}"
        time.sleep(0.1)
    os.kill(_container(inside), signal.SIGKILL)


def _running(command: str) -> int | None:
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cmdline").read_bytes() == command.encode() and _is_inside(int(process.name)):
                return int(process.name)
        except OSError:
            continue  # it has ended
    return None


def _container(process: int) -> int:
    """The first process of the outermost namespace of processes that is not ours: all others end with it."""
    while _is_inside(parent := int(_status(process, "PPid")[0])):
        process = parent
    return process


def _is_inside(process: int) -> bool:
    return len(_status(process, "NSpid")) > len(_status(os.getpid(), "NSpid"))


def _status(process: int, name: str) -> list[str]:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    (words,) = (line.split()[1:] for line in lines if line.startswith(f"{name}:"))
    return words
