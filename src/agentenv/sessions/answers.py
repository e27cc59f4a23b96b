"""The final answer of a session call."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from agentenv.sessions.terminal import Taken
from agentenv.wire.base import WireModel


@dataclass(frozen=True)
class SessionAnswer:
    """``fields`` of the call's :class:`agentenv.wire.calls.CallResult` that are not at their default, and its
    content."""

    content: WireModel
    fields: dict[str, Any] = field(default_factory=dict)


def output_fields(taken: Taken) -> dict[str, Any]:
    """The output as fields of a result."""
    fields: dict[str, Any] = {}
    for name, text, dropped in (
        ("stdout", taken.stdout, taken.stdout_dropped_bytes),
        ("stderr", taken.stderr, taken.stderr_dropped_bytes),
    ):
        if text:
            fields[name] = text
        if dropped:
            fields |= {f"{name}_dropped_bytes": dropped, "truncated": True}
    return fields
