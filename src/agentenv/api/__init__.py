"""The tool server, a separate service that runs external tools outside the sandbox."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from agentenv.exports import exported

if TYPE_CHECKING:
    from agentenv.api.tool_server.app import tool_app
    from agentenv.api.tool_server.core import ToolServer
    from agentenv.api.tool_server.secrets import Secrets
    from agentenv.api.tool_server.settings import ToolServerSettings
    from agentenv.api.tool_server.tool import ExternalTool, ToolFailure, ToolRun, tool

_HOMES: Final = {
    "ExternalTool": "agentenv.api.tool_server.tool",
    "Secrets": "agentenv.api.tool_server.secrets",
    "ToolFailure": "agentenv.api.tool_server.tool",
    "ToolRun": "agentenv.api.tool_server.tool",
    "ToolServer": "agentenv.api.tool_server.core",
    "ToolServerSettings": "agentenv.api.tool_server.settings",
    "tool": "agentenv.api.tool_server.tool",
    "tool_app": "agentenv.api.tool_server.app",
}

__all__ = [
    "ExternalTool",
    "Secrets",
    "ToolFailure",
    "ToolRun",
    "ToolServer",
    "ToolServerSettings",
    "tool",
    "tool_app",
]

if not TYPE_CHECKING:  # a type checker would take any name for one of the package's
    __getattr__, __dir__ = exported(__name__, _HOMES)
