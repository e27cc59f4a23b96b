"""The slot of one session: leased with its first call, given back when the session ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any

import anyio
from mcp import MCPError, types

from agentenv.errors import AgentEnvError, LeaseLostError, SlotDestroyedError, ToolCallError
from agentenv.executor.session import ToolSession
from agentenv.mcp.tools import MAX_IMAGE_BYTES, may_be_image, result_of, text_result
from agentenv.tools.catalog import ToolCatalog

_GONE = "Its files and processes are gone; the next call begins in a new slot."


class SessionSlot:
    """Calls tools in the slot of a session. ``open_session`` makes a session of the executor, which leases a slot when
    it is entered; ``catalog``: what may be called."""

    def __init__(self, open_session: Callable[[], ToolSession], catalog: ToolCatalog, timeout_s: float) -> None:
        self._open_session = open_session
        self._catalog = catalog
        self._timeout_s = timeout_s
        self._session: ToolSession | None = None
        self._opening = asyncio.Lock()

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> types.CallToolResult:
        """Call a tool. Raises MCPError when the slot failed, or none was to be had."""
        try:
            self._catalog.spec(tool)
            return await self._called(tool, arguments)
        except ToolCallError as error:
            return text_result(f"error: {error}", wrong=True)
        except SlotDestroyedError as error:
            await self.close()
            return text_result(f"error: {error}. {_GONE}", wrong=True)
        except LeaseLostError as error:
            await self.close()
            raise _failed(f"the slot was lost: {error}. {_GONE}") from error
        except AgentEnvError as error:
            raise _failed(str(error)) from error

    async def close(self) -> None:
        """Give the slot back. Repeatable."""
        session, self._session = self._session, None
        if session is not None:
            with anyio.CancelScope(shield=True):
                await session.aclose()

    async def _called(self, tool: str, arguments: Mapping[str, Any]) -> types.CallToolResult:
        async with self._opening:
            if self._session is None:
                opened = self._open_session()
                await opened.__aenter__()
                self._session = opened
            session = self._session
        # As JSON text: a model's call has no arguments that are for code only.
        result = await session.call(tool, json.dumps(arguments), timeout_s=self._timeout_s)
        if may_be_image(tool, result):
            asked = {"path": arguments.get("path"), "binary": True, "limit": MAX_IMAGE_BYTES}
            whole = result_of(tool, await session.call(tool, json.dumps(asked), timeout_s=self._timeout_s))
            if isinstance(whole.content[0], types.ImageContent):
                return whole
        return result_of(tool, result)


def _failed(message: str) -> MCPError:
    return MCPError(code=types.INTERNAL_ERROR, message=message)
