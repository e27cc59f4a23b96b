"""Messages for programs that could not be started in a slot."""

from __future__ import annotations

import errno
import os
from typing import Final

_LIMITS: Final = {
    errno.EAGAIN: "the process limit of the slot is reached",
    errno.ENOMEM: "the memory limit of the slot is reached",
    errno.EMFILE: "the slot's limit of running programs is reached: end some of them",
    errno.ENOSPC: "the terminal limit of the slot is reached",
}


def cannot_start(error: int) -> str:
    """Message for the errno with which creating its process, its streams or its terminal failed."""
    return f"cannot start: {_LIMITS.get(error) or os.strerror(error)}"


def not_started(error: int, *, cwd: str | None) -> str:
    """``cwd``: the directory that could not be entered, if that is what failed."""
    return cannot_start(error) if cwd is None else f"cd: {cwd}: {os.strerror(error)}"
