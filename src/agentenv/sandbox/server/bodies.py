"""Reads and writes requests and responses: credentials, numbers, bodies. Every route uses this module, so that each
limit is stated once. Errors raised here become responses in :mod:`agentenv.sandbox.server.app`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Final, TypeVar

from aiohttp import web
from pydantic import ValidationError

from agentenv.deadlines import scaled
from agentenv.errors import AgentEnvError, ProtocolError
from agentenv.wire.base import MAX_MESSAGE_BYTES, WireModel
from agentenv.wire.environment import MAX_PATH_CHARS, MAX_USER_CHARS
from agentenv.wire.leases import LeaseKey
from agentenv.wire.transfers import LEASE_HEADER

IDLE_S: Final = scaled(60.0)
"""A body that makes no progress for this long is aborted."""
UNREAD_S: Final = scaled(10.0)
"""The same for lines that are written as events occur: a client that follows them reads at once."""

T = TypeVar("T")


def lease_key(request: web.Request) -> LeaseKey:
    """The key in the header. Raises ProtocolError when it is missing."""
    try:
        return LeaseKey.model_validate_json(request.headers.get(LEASE_HEADER, ""))
    except ValidationError as error:
        raise ProtocolError(f"the header {LEASE_HEADER} must be a lease key") from error


def slot_key(request: web.Request) -> LeaseKey:
    """The key in the header, of the slot that the path names. Raises ProtocolError."""
    key = lease_key(request)
    if str(key.slot) != request.match_info["slot"]:
        raise ProtocolError("the lease key is for another slot")
    return key


def path_in_slot(request: web.Request) -> str:
    """The path in the query, valid as an argument of a program in the slot. Raises ProtocolError."""
    path = request.query.get("path", "")
    if not path or len(path) > MAX_PATH_CHARS or "\0" in path:
        raise ProtocolError(f"path: 1 to {MAX_PATH_CHARS} characters, none of them NUL")
    return path


def user_in_slot(request: web.Request) -> str | None:
    """The user in the query, as whom a transfer is made; None: the slot's own. Raises ProtocolError."""
    user = request.query.get("user")
    if user is not None and (not 0 < len(user) <= MAX_USER_CHARS or "\0" in user):
        raise ProtocolError(f"user: 1 to {MAX_USER_CHARS} characters, none of them NUL")
    return user


def number(name: str, text: str, most: int, *, least: int = 0) -> int:
    """A number in a query or a path. Raises ProtocolError."""
    if not (text.isascii() and text.isdigit() and len(text) < 19 and least <= int(text) <= most):
        raise ProtocolError(f"{name}: must be a number from {least} to {most}")
    return int(text)


async def in_time(step: Awaitable[T]) -> T:
    """Await ``step``. Raises TimeoutError when it takes longer than IDLE_S."""
    async with asyncio.timeout(IDLE_S):
        return await step


async def pieces(request: web.Request, max_bytes: int | None = None) -> AsyncIterator[bytes]:
    """The request's body as it arrives. Raises ProtocolError when it is cut or nothing arrives for too long, and
    HTTPRequestEntityTooLarge."""
    seen_bytes = request.content_length or 0
    if max_bytes is not None and seen_bytes > max_bytes:
        raise web.HTTPRequestEntityTooLarge(max_bytes, seen_bytes)
    seen_bytes = 0
    try:
        while piece := await in_time(request.content.readany()):
            seen_bytes += len(piece)
            if max_bytes is not None and seen_bytes > max_bytes:
                raise web.HTTPRequestEntityTooLarge(max_bytes, seen_bytes)
            yield piece
    except TimeoutError as error:
        raise ProtocolError(f"nothing of the body arrived for {IDLE_S:g} s") from error
    except ConnectionResetError as error:
        raise ProtocolError("the connection was cut") from error


async def message_body(request: web.Request) -> bytes:
    """The request's body, which is a message. Raises as :func:`pieces`."""
    return b"".join([piece async for piece in pieces(request, MAX_MESSAGE_BYTES)])


@asynccontextmanager
async def streamed(
    request: web.Request, content_type: str, *, size_bytes: int | None = None, headers: Mapping[str, str] | None = None
) -> AsyncIterator[web.StreamResponse]:
    """A response whose body is written in the block. When the client reads nothing for too long (TimeoutError), or the
    lease ends, the connection is cut, so that the body does not look complete."""
    response = web.StreamResponse(headers={"Content-Type": content_type, **(headers or {})})
    response.content_length = size_bytes
    await response.prepare(request)
    try:
        yield response
        await response.write_eof()
    except (TimeoutError, AgentEnvError):
        if request.transport is not None:
            request.transport.abort()
    except ConnectionError:  # the client has disconnected
        pass


async def write_lines(response: web.StreamResponse, lines: Iterable[WireModel]) -> None:
    """Write a JSON line for each. Raises TimeoutError when the client does not read, ConnectionError."""
    async with asyncio.timeout(UNREAD_S):
        await response.write(b"".join(line.model_dump_json().encode() + b"\n" for line in lines))
