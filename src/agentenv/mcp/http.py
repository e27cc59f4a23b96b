"""The transport over HTTP (streamable HTTP): sessions, each with a run of the server, and who may have one.

The SDK's own session manager has one lifespan for all sessions, and tells nobody when one of them ends. Here each runs
the server for itself, so that its slot is given back when the client deletes it, when nothing of it has been asked for
long, and when this process ends.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Final
from uuid import uuid4

import anyio
from mcp.server.lowlevel import Server
from mcp.server.streamable_http import MCP_SESSION_ID_HEADER, StreamableHTTPServerTransport
from mcp.server.transport_security import RequestBodyLimitMiddleware, TransportSecuritySettings
from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from agentenv.api.serving import served
from agentenv.api.tool_server.auth import authorized, token_from
from agentenv.errors import ConfigError
from agentenv.mcp.slots import SessionSlot

PATH: Final = "/mcp"
_MAX_SESSIONS: Final = 1000
_MAX_BODY_BYTES: Final = 16 * 1024 * 1024
_HERE: Final = ("127.0.0.1", "localhost", "[::1]")
_INVALID_REQUEST: Final = -32600
_INTERNAL_ERROR: Final = -32603
_OF_THIS_MACHINE: Final = TransportSecuritySettings(
    allowed_hosts=[text for host in _HERE for text in (host, f"{host}:*")],
    allowed_origins=[f"http://{host}{port}" for host in _HERE for port in ("", ":*")],
)
"""Without a token: whatever page a browser of this machine shows must not reach it under a name of its own."""


def address(text: str) -> tuple[str, int]:
    """Host and port of ``--http``: ``HOST:PORT``, ``:PORT`` or ``PORT`` (127.0.0.1). Raises ConfigError."""
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise ConfigError("--http", f"got {text!r}", next_step="allowed: HOST:PORT, 127.0.0.1:8791 for instance")
    return host.strip("[]") or "127.0.0.1", int(port)


def needed_token(host: str, token_file: Path | None) -> str | None:
    """The token that requests need; None where only this machine can connect and no file was named. Raises
    ConfigError."""
    if token_file is not None:
        return token_from(token_file)
    if host == "localhost":
        return None
    try:
        if ipaddress.ip_address(host).is_loopback:
            return None
    except ValueError:
        pass
    raise ConfigError(
        "--http",
        f"{host} can be reached from other machines",
        next_step="give --token-file FILE (it may not exist yet)",
    )


@asynccontextmanager
async def serving(
    server: Server[SessionSlot], host: str, port: int, *, token: str | None, idle_timeout_s: float
) -> AsyncIterator[str]:
    """Serve; yields the URL for clients. Raises ConfigError when it cannot listen there."""
    sessions = Sessions(server, token, idle_timeout_s)
    async with served(
        RequestBodyLimitMiddleware(sessions, _MAX_BODY_BYTES), "MCP server", host=host, port=port, ending=sessions.end
    ) as url:
        try:
            yield url + PATH
        finally:
            await sessions.aclose()


class Sessions:
    """The ASGI application."""

    def __init__(self, server: Server[SessionSlot], token: str | None, idle_timeout_s: float) -> None:
        self._server = server
        self._token = token
        self._idle_timeout_s = idle_timeout_s
        self._security = _OF_THIS_MACHINE if token is None else None
        self._transports: dict[str, StreamableHTTPServerTransport] = {}
        self._runs: set[asyncio.Task[None]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            return
        headers = Headers(scope=scope)
        session_id = headers.get(MCP_SESSION_ID_HEADER)
        if self._token is not None and not authorized(headers.get("authorization"), self._token):
            await Response(status_code=401, headers={"WWW-Authenticate": "Bearer"})(scope, receive, send)
        elif scope["path"].rstrip("/") != PATH:
            await Response(f"MCP is at {PATH}\n", 404)(scope, receive, send)
        elif session_id is None:
            await self._open(scope, receive, send)
        elif (transport := self._transports.get(session_id)) is None:
            await _refusal("there is no such session (any more)", 404)(scope, receive, send)
        else:
            await transport.handle_request(scope, receive, send)

    def end(self) -> None:
        """End every session. Repeatable."""
        for run in self._runs:
            run.cancel()

    async def aclose(self) -> None:
        """End every session, and wait until their slots are given back."""
        while runs := [*self._runs]:
            self.end()
            await asyncio.gather(*runs, return_exceptions=True)

    async def _open(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A request without a session: `initialize` begins one. All else is refused by the transport, and nothing of it
        stays."""
        if len(self._transports) >= _MAX_SESSIONS:
            await _refusal(f"{_MAX_SESSIONS} sessions are open", 503, _INTERNAL_ERROR)(scope, receive, send)
            return
        transport = StreamableHTTPServerTransport(
            uuid4().hex, security_settings=self._security, idle_timeout=self._idle_timeout_s
        )
        status = 500

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        begun = asyncio.Event()
        run = asyncio.create_task(self._run(transport, begun), name="mcp session")
        self._runs.add(run)
        run.add_done_callback(self._runs.discard)
        try:
            await begun.wait()
            await transport.handle_request(scope, receive, watched)
        finally:
            if status >= 400:
                run.cancel()

    async def _run(self, transport: StreamableHTTPServerTransport, begun: asyncio.Event) -> None:
        session_id = transport.mcp_session_id
        assert session_id is not None
        try:
            async with transport.connect() as (reader, writer):
                self._transports[session_id] = transport
                begun.set()
                with transport.idle_scope or nullcontext():
                    await self._server.run(reader, writer, self._server.create_initialization_options())
        finally:
            begun.set()
            self._transports.pop(session_id, None)
            with anyio.CancelScope(shield=True):
                await transport.terminate()


def _refusal(message: str, status: int, code: int = _INVALID_REQUEST) -> JSONResponse:
    return JSONResponse({"jsonrpc": "2.0", "id": None, "error": {"code": code, "message": message}}, status)
