"""``tool_server_url = "inprocess"``: the tool server without HTTP, as an ``ExternalTools``."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from typing import Any

from agentenv.api.tool_server.core import ToolServer
from agentenv.executor.toolserver_client import settled, too_large
from agentenv.tools.remote import remote_spec
from agentenv.tools.spec import ToolSpec
from agentenv.wire.calls import CallResult
from agentenv.wire.toolserver import CallScope, ToolCallRequest, ToolDescription


class InProcessTools:
    """Calls an open :class:`ToolServer` directly: the same requests, budgets, cassettes and redaction."""

    def __init__(self, server: ToolServer) -> None:
        self._server = server
        self._numbers = itertools.count(1)
        self.tools: tuple[ToolDescription, ...] = server.describe().tools

    @property
    def specs(self) -> tuple[ToolSpec, ...]:
        """The server's tools for a catalog, including those that are not available."""
        return tuple(remote_spec(tool) for tool in self.tools)

    async def call(self, scope: CallScope, tool: str, arguments: Mapping[str, Any], timeout_s: float) -> CallResult:
        """Run one call; cancelling this cancels it. Raises: InfraError when the tool or the server failed."""
        call_id = f"inprocess-{next(self._numbers)}"
        request = ToolCallRequest(
            id=call_id, scope=scope, tool=tool, arguments=dict(arguments), timeout_s=timeout_s, boot=self._server.boot
        )
        if (refused := too_large(request)) is not None:
            return refused
        try:
            while (reply := await self._server.call(request)).result is None:
                pass
        except asyncio.CancelledError:
            await asyncio.shield(self._server.cancel(scope.trajectory, (call_id,)))
            raise
        return settled(reply.result)

    async def ended(self, trajectory: str) -> None:
        """Close the tools' state for this trajectory."""
        await self._server.ended(trajectory)
