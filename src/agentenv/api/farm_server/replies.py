"""Refusals of the farm service: every one is an ErrorReply, with the status of its error."""

from __future__ import annotations

import math
from typing import Final

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from agentenv.api.farm_server.bodies import MalformedError
from agentenv.errors import (
    AcquireTimeoutError,
    AgentEnvError,
    ConfigError,
    ConnectionLostError,
    ForbiddenError,
    InfraError,
    PoolClosedError,
    ProtocolError,
    SandboxUnavailableError,
    TooManyRequestsError,
    UnauthorizedError,
)
from agentenv.wire.server import ErrorReply

_STATUS: Final[dict[type[AgentEnvError], int]] = {
    UnauthorizedError: 401,
    ForbiddenError: 403,
    ConfigError: 400,
    ProtocolError: 409,
    TooManyRequestsError: 429,
    AcquireTimeoutError: 503,
    MalformedError: 400,
    PoolClosedError: 503,
    SandboxUnavailableError: 503,
    ConnectionLostError: 504,
    InfraError: 502,
}
_UNAVAILABLE_S: Final = 1
"""When to ask again a service that is starting or ending, or stands by."""


def reply(status: int, error: AgentEnvError) -> Response:
    """The response for an error."""
    headers = {}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, TooManyRequestsError):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    elif status == 503:
        headers["Retry-After"] = str(_UNAVAILABLE_S)
    body = ErrorReply.of(error).model_dump_json()
    return Response(body, status_code=status, media_type="application/json", headers=headers)


def status_of(error: AgentEnvError) -> int:
    """HTTP status of an error."""
    return next((_STATUS[kind] for kind in type(error).__mro__ if kind in _STATUS), 409)


def handle_errors(app: FastAPI) -> None:
    """Answer every error of the application in this way."""
    app.add_exception_handler(AgentEnvError, _refused)
    app.add_exception_handler(RequestValidationError, _malformed)
    app.add_exception_handler(HTTPException, _http_refused)


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, AgentEnvError)
    return reply(status_of(error), error)


async def _malformed(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"] if part != "body") or "the body"
    return reply(400, ProtocolError(f"{where}: {first['msg']}", next_step="see /openapi.json"))


async def _http_refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return not_here(error)


def not_here(error: HTTPException) -> Response:
    """The response for what HTTP itself refuses."""
    response = reply(error.status_code, ProtocolError(str(error.detail), next_step="see /openapi.json"))
    response.headers.update(error.headers or {})
    return response
