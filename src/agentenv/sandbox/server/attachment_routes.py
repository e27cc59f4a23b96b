"""``/v1/attachments/{call}/{field}``: upload of large arguments, download of large results.

Raw bytes, piece by piece, over separate connections: no message waits behind them, and the loop handles one piece
at a time. The lease's key is checked before anything is read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from aiohttp import web
from pydantic import ValidationError

from agentenv.errors import AgentEnvError, ProtocolError, StaleLeaseError
from agentenv.sandbox.server.container import Container
from agentenv.sandbox.server.holder import holder_of
from agentenv.sandbox.server.replies import Raw, size_of
from agentenv.sandbox.server.tools.transfer_routes import body_piece, in_time, lease_key
from agentenv.wire.base import MAX_FILE_BYTES
from agentenv.wire.calls import Attachment

_PIECE_BYTES = 256 * 1024
_MAX_CALL_ID = 128


class AttachmentRoutes:
    """The two routes, over one container."""

    def __init__(self, container: Container) -> None:
        self._container = container

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Register the routes."""
        router.add_put("/v1/attachments/{call}/{field}", self._put)
        router.add_get("/v1/attachments/{call}/{field}", self._get, allow_head=False)

    async def _put(self, request: web.Request) -> web.StreamResponse:
        call_id, field = _named(request)
        inbox = holder_of(request, self._container).inbox(lease_key(request), call_id)
        at = _skipped(request, MAX_FILE_BYTES)
        attached = inbox.receive(call_id, field, at)
        turn = 0 if attached is None else attached.begin(at)
        refused: AgentEnvError | None = None
        seen_bytes = 0
        while piece := await _piece_of(request):
            seen_bytes += len(piece)
            if seen_bytes > 2 * MAX_FILE_BYTES:
                raise web.HTTPRequestEntityTooLarge(MAX_FILE_BYTES, seen_bytes)
            if attached is None or refused is not None:
                continue  # read to its end: the client gets the answer when it has sent everything
            try:
                attached.feed(piece, turn)
            except AgentEnvError as error:
                refused = error
        if refused is not None:
            if not isinstance(refused, StaleLeaseError):
                inbox.drop(call_id)
            raise refused
        reply = Attachment(field=field, size_bytes=inbox.size_of(call_id, field))
        return web.json_response(text=reply.model_dump_json())

    async def _get(self, request: web.Request) -> web.StreamResponse:
        call_id, field = _named(request)
        key = lease_key(request)
        holder = holder_of(request, self._container)
        raw = holder.fetched(key, call_id, field)
        skip = _skipped(request, size_of(raw))
        response = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
        response.content_length = size_of(raw) - skip
        await response.prepare(request)
        for piece in _pieces(raw, skip):
            try:
                await in_time(response.write(piece))
                await asyncio.sleep(0)  # a client that reads as fast as we write would monopolise the loop
                holder.fetched(key, call_id, field)  # the lease may have ended
            except (TimeoutError, AgentEnvError):
                if request.transport is not None:
                    request.transport.abort()
                return response
        await response.write_eof()
        return response


async def _piece_of(request: web.Request) -> bytes:
    try:
        return await body_piece(request)
    except ConnectionResetError as error:
        raise ProtocolError("the connection was cut") from error


def _named(request: web.Request) -> tuple[str, str]:
    call_id = request.match_info["call"]
    if len(call_id) > _MAX_CALL_ID:
        raise ProtocolError(f"a call's id has at most {_MAX_CALL_ID} characters")
    try:
        return call_id, Attachment(field=request.match_info["field"], size_bytes=0).field
    except ValidationError as error:
        raise ProtocolError("an attachment has no such name") from error


def _skipped(request: web.Request, size_bytes: int) -> int:
    """The offset requested by the client."""
    try:
        skip = int(request.query.get("from", "0"))
    except ValueError:
        skip = -1
    if not 0 <= skip <= size_bytes:
        raise ProtocolError(f"from: must be 0 to {size_bytes}")
    return skip


def _pieces(raw: Raw, skip: int) -> Iterator[memoryview]:
    for part in raw:
        view = memoryview(part)[skip:]
        skip = max(0, skip - len(part))
        while view:
            yield view[:_PIECE_BYTES]
            view = view[_PIECE_BYTES:]
