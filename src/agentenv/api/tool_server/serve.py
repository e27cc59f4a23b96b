"""Serves a tool server over HTTP."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from agentenv.api import serving
from agentenv.api.tool_server.app import tool_app
from agentenv.api.tool_server.core import ToolServer


@contextlib.asynccontextmanager
async def served(server: ToolServer, token: str, *, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
    """Serve an open tool server; yields its URL. Port 0: any free one. Leaving stops serving, not the server.

    Raises: ConfigError when it cannot listen there.
    """
    # Its requests are sent away at the end: otherwise they would be cut off after a while with a 500.
    app = tool_app(server, token)
    async with serving.served(app, "tool server", host=host, port=port, ending=server.send_away) as url:
        yield url
