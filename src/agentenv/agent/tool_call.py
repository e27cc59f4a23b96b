"""A tool call and its result as values, in the form that verifiers written for other harnesses use."""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass, field
from typing import Any, Self

from agentenv.tools.toolsets import TOOL_ALIASES
from agentenv.wire.calls import CallResult
from agentenv.wire.sessions import SLOT_TOOLS

_OWN_TIMEOUT = frozenset(tool.name for tool in SLOT_TOOLS if "timeout_s" in tool.arguments.model_fields)
"""Tools with such an argument, also as ``timeout``: how long to wait, not when to kill."""


@dataclass(frozen=True)
class ToolCall:
    """A call for ``exec_tool(ToolCall(name, arguments))``. ``arguments`` may contain ``timeout`` (seconds)."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    raw_text: str = ""
    uniq_id: str = field(default_factory=lambda: uuid.uuid4().hex)


@dataclass(frozen=True)
class ToolResult:
    """The outcome of a call. ``success``: the tool did its work, and a command ended with exit code 0 in time.
    ``error`` is the reason otherwise, and empty after a success. ``metadata`` has ``exit_code`` and ``timed_out``."""

    success: bool
    output: str = ""
    error: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)
    uniq_id: str | None = None

    @classmethod
    def of(cls, result: CallResult, uniq_id: str | None = None) -> Self:
        """The same outcome as a CallResult's."""
        reply = {"exit_code": result.exit_code, "timed_out": result.timed_out}
        return cls(result.success, result.output, failure_of(result), reply, uniq_id or result.id)

    def to_dict(self) -> dict[str, Any]:
        """Every field."""
        return dict(vars(self))

    def to_xml(self) -> str:
        """The result as Hermes-style models are shown it; empty fields are left out."""
        reply = {"success": self.success, "output": self.output}
        more = {"uniq_id": self.uniq_id, "error": self.error, "metadata": self.metadata}
        return (
            f"<tool_response>{json.dumps(reply | {key: value for key, value in more.items() if value})}</tool_response>"
        )


def failure_of(result: CallResult) -> str:
    """Why a call did not succeed, in one line; empty if it did."""
    if result.fault != "none":
        return result.message or result.error or result.fault
    if result.timed_out:
        return f"timed out after {result.duration_s:.0f} s"
    return "" if result.success else f"exit code {result.exit_code}"


def one_shot(call: ToolCall) -> tuple[str, dict[str, Any], float | None]:
    """The tool, arguments and time limit of a call as code here makes it: ``terminal`` with nothing but a command is
    ``bash``, and both are killed after ``timeout``. Names of other harnesses' tools are understood."""
    given = dict(call.arguments)
    plain = set(given) <= {"command", "timeout", "workdir", "cwd", "background"} and not given.get("background")
    if call.name in ("terminal", "bash") and plain:
        limit_s, cwd, _ = given.pop("timeout", None), given.pop("workdir", None), given.pop("background", None)
        return "bash", given | ({"cwd": cwd} if cwd else {}), limit_s
    name = TOOL_ALIASES.get(call.name, call.name)
    limit_s = None if name in _OWN_TIMEOUT else given.pop("timeout", None)
    return name, given, limit_s
