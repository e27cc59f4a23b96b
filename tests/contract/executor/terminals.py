"""Calls of the terminal tool, for the modules that test it."""

from __future__ import annotations

from typing import Any

from agentenv.executor.session import ToolSession
from agentenv.wire.calls import CallResult

LONG_S = 60
"""Longer than anything takes that is tested here: who waits so long waits in vain."""


async def terminal(slot: ToolSession, command: str | None = None, /, **arguments: Any) -> CallResult:
    given = arguments if command is None else {"command": command, **arguments}
    return await slot.call("terminal", given, timeout_s=LONG_S)


def state(result: CallResult) -> dict[str, Any]:
    assert isinstance(result.content, dict), result
    return result.content


async def finished(session: ToolSession, **arguments: Any) -> CallResult:
    """Ask for more until the command has ended; all of its output."""
    out = ""
    while True:
        result = await terminal(session, "", timeout_s=20, **arguments)
        out += result.stdout
        if state(result)["state"] != "running":
            return result.model_copy(update={"stdout": out})
