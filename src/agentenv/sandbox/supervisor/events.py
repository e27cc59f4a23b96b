"""Events of a container process on standard output: one JSON object per line."""

from __future__ import annotations

import contextlib
import json
import os

from agentenv.errors import AgentEnvError

EXIT_FAILED = 2
"""Exit code after a ``failed`` event."""


def emit(event: str, **fields: object) -> None:
    """Print one event. A reader that has ended is ignored: the lifeline handles that."""
    line = json.dumps({"event": event, **fields}) + "\n"
    with contextlib.suppress(OSError):
        os.write(1, line.encode())


def emit_failure(error: AgentEnvError) -> int:
    """Print the ``failed`` event of ``error``; returns the matching exit code."""
    emit("failed", code=error.code, message=error.message, next_step=error.next_step)
    return EXIT_FAILED
