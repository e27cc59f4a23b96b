"""The server of the protocol, and its transport over standard input and output."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from mcp import types
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server

from agentenv._version import __version__
from agentenv.executor.session import ToolSession
from agentenv.mcp.slots import SessionSlot
from agentenv.mcp.tools import described
from agentenv.tools.catalog import ToolCatalog

Context = ServerRequestContext[SessionSlot, Any]
_INSTRUCTIONS = (
    "The tools of one sandbox. Its files and processes stay until this session ends; then they are gone. "
    "A relative path is below its working directory."
)


def made(open_session: Callable[[], ToolSession], catalog: ToolCatalog, *, timeout_s: float) -> Server[SessionSlot]:
    """The server. Each of its runs (:meth:`Server.run`) is a session with a slot of its own, which is given back when
    the run ends, however it ends."""
    tools = described(catalog)

    @asynccontextmanager
    async def lifespan(_: Server[SessionSlot]) -> AsyncIterator[SessionSlot]:
        slot = SessionSlot(open_session, catalog, timeout_s)
        try:
            yield slot
        finally:
            await slot.close()

    async def list_tools(_: Context, __: types.PaginatedRequestParams | None) -> types.ListToolsResult:
        return types.ListToolsResult(tools=tools)

    async def call_tool(context: Context, asked: types.CallToolRequestParams) -> types.CallToolResult:
        return await context.lifespan_context.call(asked.name, asked.arguments or {})

    return Server(
        "agentenv",
        version=__version__,
        instructions=_INSTRUCTIONS,
        lifespan=lifespan,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
    )


async def serve_stdio(server: Server[SessionSlot]) -> None:
    """Serve one session over standard input and output, until the input ends."""
    async with stdio_server() as (reader, writer):
        await server.run(reader, writer, server.create_initialization_options())
