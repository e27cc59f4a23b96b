"""Audit log of a tool server: one JSON line per call. Secrets are removed before."""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path
from typing import Any, Final

from agentenv.errors import ConfigError
from agentenv.wire.calls import CallResult
from agentenv.wire.toolserver import ToolCallRequest

logger = logging.getLogger(__name__)

_MOST_ARGUMENT_CHARS: Final = 4_096
_MOST_MESSAGE_CHARS: Final = 1_024


class AuditLog:
    """Appends to a file that only its owner can read; ``path`` None writes nothing.

    A line that cannot be written (a full disk) is logged as an error and counted in ``lost``; the call itself
    succeeds.

    Raises: ConfigError when the file cannot be opened.
    """

    def __init__(self, path: Path | None) -> None:
        self.lost = 0
        self._file: int | None = None
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError("audit_log", f"{path} cannot be written: {error}") from error

    def add(self, request: ToolCallRequest, arguments: Any, result: CallResult, source: str) -> None:
        """Write one finished call. ``source``: live, cassette, or refused (nothing was run)."""
        if self._file is None:
            return
        line = json.dumps(_entry(request, arguments, result, source), ensure_ascii=False)
        raw = line.encode("utf-8", "replace") + b"\n"
        try:
            if os.write(self._file, raw) != len(raw):
                raise OSError("only a part of the line was written")
        except OSError:
            self.lost += 1
            logger.exception("the audit log lost a line (%d so far)", self.lost)

    def close(self) -> None:
        """Close the file. Repeatable."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _entry(request: ToolCallRequest, arguments: Any, result: CallResult, source: str) -> dict[str, Any]:
    told = json.dumps(arguments, ensure_ascii=False)
    content_bytes = 0 if result.content is None else len(json.dumps(result.content, ensure_ascii=False).encode())
    return {
        "at_unix_s": round(time.time(), 3),
        "id": request.id,
        "trajectory": request.scope.trajectory,
        "group": request.scope.group,
        "item": request.scope.item,
        "tool": request.tool,
        "arguments": arguments if len(told) <= _MOST_ARGUMENT_CHARS else told[:_MOST_ARGUMENT_CHARS] + "…",
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
