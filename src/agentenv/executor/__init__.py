"""From a tool call to its result: batching, sessions, the container's stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from agentenv.exports import exported

if TYPE_CHECKING:
    from agentenv.executor.session import ToolSession
    from agentenv.executor.tool_executor import ExecutorStatistics, ToolExecutor
    from agentenv.executor.toolserver_client import ToolServerClient

_HOMES: Final = {
    "ExecutorStatistics": "agentenv.executor.tool_executor",
    "ToolExecutor": "agentenv.executor.tool_executor",
    "ToolServerClient": "agentenv.executor.toolserver_client",
    "ToolSession": "agentenv.executor.session",
}

__all__ = [
    "ExecutorStatistics",
    "ToolExecutor",
    "ToolServerClient",
    "ToolSession",
]

if not TYPE_CHECKING:  # a type checker would take any name for one of the package's
    __getattr__, __dir__ = exported(__name__, _HOMES)
