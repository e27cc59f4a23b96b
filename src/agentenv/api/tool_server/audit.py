"""Audit log of a tool server: one JSON line per call. Secrets are removed before."""

from __future__ import annotations

import json
import time
from typing import Any, Final

from agentenv.api.audit_file import AuditFile
from agentenv.wire.calls import CallResult
from agentenv.wire.toolserver import ToolCallRequest

_MOST_ARGUMENT_CHARS: Final = 4_096
_MOST_MESSAGE_CHARS: Final = 1_024


class AuditLog(AuditFile):
    """The file of a tool server."""

    def add(self, request: ToolCallRequest, arguments: Any, result: CallResult, source: str) -> None:
        """Write one finished call. ``source``: live, cassette, or refused (nothing was run)."""
        if self.writes:
            self.write(_entry(request, arguments, result, source))


def _entry(request: ToolCallRequest, arguments: Any, result: CallResult, source: str) -> dict[str, Any]:
    encoded = json.dumps(arguments, ensure_ascii=False)
    content_bytes = 0 if result.content is None else len(json.dumps(result.content, ensure_ascii=False).encode())
    return {
        "at_unix_s": round(time.time(), 3),
        "id": request.id,
        "trajectory": request.scope.trajectory,
        "group": request.scope.group,
        "item": request.scope.item,
        "tool": request.tool,
        "arguments": arguments if len(encoded) <= _MOST_ARGUMENT_CHARS else encoded[:_MOST_ARGUMENT_CHARS] + "…",
        "source": source,
        "fault": result.fault,
        "error": result.error,
        "message": (result.message or result.stderr)[:_MOST_MESSAGE_CHARS],
        "exit_code": result.exit_code,
        "timed_out": result.timed_out,
        "cancelled": result.cancelled,
        "result_bytes": content_bytes + len(result.stdout.encode("utf-8", "replace")),
        "queue_s": round(result.queue_s, 6),
        "duration_s": round(result.duration_s, 6),
    }
