"""HTTP interface of the tool server: a FastAPI application. Types are in :mod:`agentenv.wire.toolserver`."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

from agentenv._version import __version__
from agentenv.api import serving
from agentenv.api.tool_server.auth import authorized
from agentenv.api.tool_server.core import ToolServer
from agentenv.errors import AgentEnvError, CallLostError, PoolClosedError
from agentenv.wire.server import ErrorReply, Health
from agentenv.wire.toolserver import MAX_REQUEST_BYTES, CancelCalls, Done, EndTrajectory, ToolCallRequest

T = TypeVar("T", bound=BaseModel)

_HOW_TO_ASK = "send the header Authorization: Bearer TOKEN, with the token of the server's token file"


def tool_app(server: ToolServer, token: str) -> FastAPI:
    """The application over an open server. Its schema pages are disabled, because they would be public."""
    app = FastAPI(title="agentenv tool server", openapi_url=None, docs_url=None, redoc_url=None)
    app.middleware("http")(_guard(token))
    app.add_exception_handler(HTTPException, _not_here)

    @app.get("/health")
    async def health() -> Response:
        return _json_response(Health(status="ok", version=__version__))

    @app.get("/v1/tools")
    async def tools() -> Response:
        return _json_response(server.describe())

    @app.post("/v1/calls")
    async def call(request: Request) -> Response:
        return await _answered(request, ToolCallRequest, server.call)

    @app.post("/v1/cancel")
    async def cancel(request: Request) -> Response:
        return await _answered(request, CancelCalls, lambda parsed: server.cancel(parsed.trajectory, parsed.ids))

    @app.post("/v1/trajectories/end")
    async def end(request: Request) -> Response:
        return await _answered(request, EndTrajectory, lambda parsed: server.ended(parsed.trajectory))

    return app


def _guard(token: str) -> Callable[[Request, Callable[[Request], Awaitable[Response]]], Awaitable[Response]]:
    async def guard(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        # The path used for routing: Starlette before 1.10 builds url.path from the Host header.
        if request.scope["path"] != "/health" and not authorized(request.headers.get("authorization"), token):
            return _refused(401, "unauthorized", "the token is missing or wrong", _HOW_TO_ASK)
        return await call_next(request)

    return guard


async def _answered(request: Request, kind: type[T], act: Callable[[T], Awaitable[Any]]) -> Response:
    """Read a ``kind``, act on it, send the result (an empty object for None)."""
    raw = bytearray()
    async for chunk in request.stream():
        raw += chunk
        if len(raw) > MAX_REQUEST_BYTES:
            return _refused(413, "protocol", f"the request is larger than {MAX_REQUEST_BYTES} bytes", "send less")
    try:
        parsed = kind.model_validate_json(bytes(raw))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the body"
        return _refused(400, "protocol", f"{where}: {first['msg']}", "see agentenv.wire.toolserver")
    try:
        return _json_response(await act(parsed))
    except CallLostError as error:
        return _error(409, error)
    except PoolClosedError as error:
        return _error(503, error)


def _json_response(model: BaseModel | None) -> Response:
    body = (model or Done()).model_dump_json().encode()
    return Response(body, media_type="application/json")


def _error(status: int, error: AgentEnvError) -> Response:
    return _refused(status, error.code, error.message, error.next_step)


def _refused(status: int, code: str, message: str, next_step: str) -> Response:
    reply = ErrorReply(error=code, message=message, next_step=next_step)
    return Response(reply.model_dump_json().encode(), status_code=status, media_type="application/json")


async def _not_here(_: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    return _refused(status, "protocol", str(getattr(error, "detail", error)), "see docs/tool-server.md")


@contextlib.asynccontextmanager
async def served(server: ToolServer, token: str, *, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
    """Serve an open tool server; yields its URL. Port 0: any free one. Leaving stops serving, not the server.

    Raises: ConfigError when it cannot listen there.
    """
    # Its requests are sent away at the end: otherwise they would be cut off after a while with a 500.
    app = tool_app(server, token)
    async with serving.served(app, "tool server", host=host, port=port, ending=server.send_away) as url:
        yield url
