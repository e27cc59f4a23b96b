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
from agentenv.sandbox.server.bodies import in_time, lease_key, number, pieces, streamed
from agentenv.sandbox.server.calls import Raw, size_of
from agentenv.sandbox.server.container import Container, requester_of
from agentenv.wire.base import MAX_FILE_BYTES, MAX_PIECE_BYTES
from agentenv.wire.calls import Attachment

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
        buffer = requester_of(request, self._container).uploads(lease_key(request), call_id)
        at = _begin(request, MAX_FILE_BYTES)
        upload = buffer.receive(call_id, field, at)
        writer = 0 if upload is None else upload.begin(at)
        refused: AgentEnvError | None = None
        async for piece in pieces(request, 2 * MAX_FILE_BYTES):
            if upload is None or refused is not None:
                continue  # read to its end: the client gets the answer when it has sent everything
            try:
                upload.feed(piece, writer)
            except AgentEnvError as error:
                refused = error
        if refused is not None:
            if not isinstance(refused, StaleLeaseError):
                buffer.drop(call_id)
            raise refused
        reply = Attachment(field=field, size_bytes=buffer.size_of(call_id, field))
        return web.json_response(text=reply.model_dump_json())

    async def _get(self, request: web.Request) -> web.StreamResponse:
        call_id, field = _named(request)
        key = lease_key(request)
        requester = requester_of(request, self._container)
        raw = requester.attachment(key, call_id, field)
        begin = _begin(request, size_of(raw))
        async with streamed(request, "application/octet-stream", size_bytes=size_of(raw) - begin) as response:
            for piece in _pieces(raw, begin):
                await in_time(response.write(piece))
                await asyncio.sleep(0)  # a client that reads as fast as we write would monopolise the loop
                requester.attachment(key, call_id, field)  # the lease may have ended
        return response


def _named(request: web.Request) -> tuple[str, str]:
    call_id = request.match_info["call"]
    if len(call_id) > _MAX_CALL_ID:
        raise ProtocolError(f"a call's id has at most {_MAX_CALL_ID} characters")
    try:
        return call_id, Attachment(field=request.match_info["field"], size_bytes=0).field
    except ValidationError as error:
        raise ProtocolError("no attachment can have this name") from error


def _begin(request: web.Request, size_bytes: int) -> int:
    """The offset from which the client sends or wants the content."""
    return number("from", request.query.get("from", "0"), size_bytes)


def _pieces(raw: Raw, begin: int) -> Iterator[memoryview]:
    for part in raw:
        view = memoryview(part)[begin:]
        begin = max(0, begin - len(part))
        while view:
            yield view[:MAX_PIECE_BYTES]
            view = view[MAX_PIECE_BYTES:]
