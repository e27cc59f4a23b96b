"""Transfers of the fake backend: the real streams, read and written in plain Python."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from aiohttp import web
from pydantic import ValidationError

from agentenv.containers.local_files import ContentDigest, TreeWriter, stream_of
from agentenv.errors import PolicyRefusalError, ProtocolError, StaleLeaseError
from agentenv.slots.backends.fake_slot import FakeSlot
from agentenv.slots.backends.fake_tools import inside
from agentenv.wire.leases import LeaseKey
from agentenv.wire.transfers import LEASE_HEADER, OUTSIDE, Entry, TransferReply

_MAX_BYTES = 2**40


def lease_key(request: web.Request) -> LeaseKey:
    """The key a transfer was asked for with. Raises ProtocolError."""
    try:
        return LeaseKey.model_validate_json(request.headers.get(LEASE_HEADER, ""))
    except ValidationError as error:
        raise ProtocolError(f"the header {LEASE_HEADER} holds no lease key") from error


async def put(request: web.Request, slot: FakeSlot) -> web.Response:
    """Take a transfer into the slot."""
    target = _held(request, slot)
    reply = TransferReply()
    with TreeWriter(target, max_bytes=_MAX_BYTES, trust_links=True) as writer:
        try:
            async for piece in request.content.iter_any():
                if not reply.exit_code:
                    reply = await asyncio.to_thread(_fed, writer, piece)
            if not reply.exit_code and not await asyncio.to_thread(writer.finish):
                raise ProtocolError("the transfer ended too early")
        except OSError as error:
            reply = _failed(error)
        if not reply.exit_code:
            reply = TransferReply(entries=writer.entries, total_bytes=writer.tally.total_bytes)
    return web.json_response(text=reply.model_dump_json())


async def get(request: web.Request, slot: FakeSlot) -> web.StreamResponse:
    """Send a transfer from the slot."""
    try:
        pieces = _stream(_held(request, slot))
    except PolicyRefusalError:
        pieces = iter([Entry("x", size=OUTSIDE).encode()])
    response = web.StreamResponse()
    await response.prepare(request)
    while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
        await response.write(piece)
    await response.write_eof()
    return response


def _held(request: web.Request, slot: FakeSlot) -> Path:
    key = lease_key(request)
    if slot.held_by(key) is None:
        raise slot.why_lost(key) or StaleLeaseError(f"slot {slot.index} is not under this lease any more")
    path = request.query.get("path", "")
    if not path:
        raise ProtocolError("path: must be given")
    return inside(slot.workspace(), path)


def _fed(writer: TreeWriter, piece: bytes) -> TransferReply:
    try:
        writer.feed(piece)
    except OSError as error:
        return _failed(error)
    return TransferReply()


def _failed(error: OSError) -> TransferReply:
    code = error.errno or errno.EIO
    return TransferReply(exit_code=code, stderr=f"{error.filename or ''}: {os.strerror(code)}\n")


def _stream(source: Path) -> Iterator[bytes]:
    try:
        yield from stream_of(source, ContentDigest())
    except OSError as error:
        yield Entry("x", size=error.errno or errno.EIO).encode()
