"""Common parts of every request to a container: headers, handshake, interpretation of refusals."""

from __future__ import annotations

import json
from typing import Final

import aiohttp
from pydantic import ValidationError

from agentenv.containers.handle import ContainerHandle
from agentenv.errors import AgentEnvError, ConnectionLostError, ProtocolError, from_wire
from agentenv.wire.base import PROTOCOL_VERSION
from agentenv.wire.server import ErrorReply, ServerInfo
from agentenv.wire.watch import GENERATION_HEADER, GUEST_HEADER

_GATEWAY: Final = frozenset({502, 503, 504})


def open_session() -> aiohttp.ClientSession:
    """A session for any number of containers; the opener closes it. Each request has its own deadline."""
    # limit=0: a pool of 1,000 containers sends heartbeats in parallel.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=30.0)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None), trust_env=False)


def headers_for(handle: ContainerHandle, **more: str) -> dict[str, str]:
    """The headers of a request to the container: its bearer token, and ``more``."""
    return {"Authorization": f"Bearer {handle.token}", **more}


def fence_headers(generation: int | None, *, guest: bool = False) -> dict[str, str]:
    """The headers by which a container knows the farm of this generation, or a guest beside it."""
    named = {} if generation is None else {GENERATION_HEADER: str(generation)}
    return {**named, GUEST_HEADER: "1"} if guest else named


def checked_info(handle: ContainerHandle, body: bytes) -> ServerInfo:
    """The answer to ``GET /v1/info``. Raises ProtocolError: another version, or not a sandbox server."""
    try:
        raw = json.loads(body)
        # Checked before the model is built: another version may have other fields.
        version = raw.get("protocol") if isinstance(raw, dict) else None
        if version != PROTOCOL_VERSION:
            raise ProtocolError(
                f"container {handle.id} speaks protocol {version!r}, this client {PROTOCOL_VERSION}",
                next_step="use the same agentenv release on both sides",
            )
        return ServerInfo.model_validate(raw)
    except ValueError as error:
        raise ProtocolError(f"container {handle.id} is not a sandbox server: {error}") from error


def error_reply(body: bytes) -> ErrorReply | None:
    """The body of a refusal; None when a proxy, or something else, answered for the container."""
    try:
        return ErrorReply.model_validate_json(body)
    except ValidationError:
        return None


def refusal(handle: ContainerHandle, status: int, body: bytes, *expected: type[AgentEnvError]) -> AgentEnvError:
    """The exception for a response that is not 2xx: the error its body names if that is one of ``expected`` (any,
    if not given), else ProtocolError; ConnectionLostError when a proxy says that it did not reach the container."""
    reply = error_reply(body)
    if reply is None:
        if status in _GATEWAY:
            return ConnectionLostError(f"container {handle.id} cannot be reached: HTTP {status} from a proxy")
        return ProtocolError(f"container {handle.id} answered HTTP {status}: {body[:200]!r}")
    return from_wire(reply.error, f"container {handle.id}: {reply.message}", reply.next_step, *expected)
