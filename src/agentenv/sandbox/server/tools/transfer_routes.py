"""``/v1/slots/{slot}/transfer``: files and directories of any size, concurrently with calls.

The server passes bytes between a connection and slotfiles. It holds a few pipe buffers per transfer, handles one
piece per iteration of its loop, and does not interpret the content (:mod:`agentenv.wire.transfers`).
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable
from contextlib import closing
from typing import TypeVar

from aiohttp import web
from pydantic import ValidationError

from agentenv.deadlines import scaled
from agentenv.errors import LeaseLostError, ProtocolError
from agentenv.file_names import readable_name
from agentenv.sandbox.server.container import Container
from agentenv.sandbox.server.holder import Holder, holder_of
from agentenv.sandbox.server.tools.file_records import RecordReader
from agentenv.sandbox.server.tools.slotfiles_exit_codes import CUT_SHORT, USAGE, as_data, check_verdict
from agentenv.sandbox.server.tools.transfer_run import TransferRun
from agentenv.wire.environment import MAX_PATH_CHARS
from agentenv.wire.leases import LeaseKey
from agentenv.wire.transfers import LEASE_HEADER, MAX_ENTRIES, Entry, TransferReply

_IDLE_S = scaled(60.0)
"""A transfer without progress for this long is ended."""
_LEAST_BYTES_PER_S = 64 * 1024
"""A run that is slower than this by more than :data:`_IDLE_S` counts as stopped."""
_AT_ONCE = 2
"""Concurrent transfers of one slot; more wait."""
_MAX_REPLY_BYTES = 16 * 1024

T = TypeVar("T")


class TransferRoutes:
    """The two routes, over one container."""

    def __init__(self, container: Container) -> None:
        self._container = container
        self._turns: dict[int, asyncio.Semaphore] = {}

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Register the routes."""
        router.add_put("/v1/slots/{slot}/transfer", self._put)
        router.add_get("/v1/slots/{slot}/transfer", self._get, allow_head=False)

    async def _put(self, request: web.Request) -> web.StreamResponse:
        key, path = key_and_path(request)
        async with self._turn(key):
            run = _started(holder_of(request, self._container), key, "receive", path)
            with closing(run):
                waited = Waited(run)
                await feed(request, waited)
                printed = await collect(waited)
                reply = _reply(await waited.ended(), printed)
        return web.json_response(text=reply.model_dump_json())

    async def _get(self, request: web.Request) -> web.StreamResponse:
        key, path = key_and_path(request)
        async with self._turn(key):
            run = _started(holder_of(request, self._container), key, "send", path)
            with closing(run):
                waited = Waited(run)
                first = await waited.read()
                if not first and 0 < (code := await waited.ended()) <= 128:
                    first = Entry("x", size=code).encode()  # it could not be started
                response = web.StreamResponse(headers={"Content-Type": "application/x-agentenv-transfer"})
                await response.prepare(request)
                await pass_on(request, response, waited, first)
        return response

    def _turn(self, key: LeaseKey) -> asyncio.Semaphore:
        return self._turns.setdefault(key.slot, asyncio.Semaphore(_AT_ONCE))


def _started(holder: Holder, key: LeaseKey, operation: str, path: str) -> TransferRun:
    io, env = holder.beside(key)
    run = TransferRun(io)
    rest = [str(MAX_ENTRIES)] if operation == "send" else []
    run.start(io.paths.slotfiles(operation, path, *rest), env, feeds=operation == "receive")
    return run


def lease_key(request: web.Request) -> LeaseKey:
    """The key in the header. Raises ProtocolError when it is missing."""
    try:
        return LeaseKey.model_validate_json(request.headers.get(LEASE_HEADER, ""))
    except ValidationError as error:
        raise ProtocolError(f"the header {LEASE_HEADER} holds no lease key") from error


def slot_key(request: web.Request) -> LeaseKey:
    """The key in the header, of the slot that the path names. Raises ProtocolError."""
    key = lease_key(request)
    if str(key.slot) != request.match_info["slot"]:
        raise ProtocolError("the lease key is for another slot")
    return key


def key_and_path(request: web.Request) -> tuple[LeaseKey, str]:
    """Raises ProtocolError when the request cannot be passed to slotfiles."""
    key = slot_key(request)
    path = request.query.get("path", "")
    if not path or len(path) > MAX_PATH_CHARS or "\0" in path:
        raise ProtocolError(f"path: 1 to {MAX_PATH_CHARS} characters, none of them NUL")
    return key, path


async def in_time(step: Awaitable[T]) -> T:
    """Await ``step``. Raises LeaseLostError and whatever it raises; TimeoutError when it takes too long."""
    async with asyncio.timeout(_IDLE_S):
        return await step


class Waited:
    """A run that may keep its transfer waiting for 60 s in total; progress earns that time back. After that it is
    killed: something in its slot stops it, perhaps repeatedly, and the client should neither wait for ever nor see
    a lost connection. All methods raise LeaseLostError."""

    def __init__(self, run: TransferRun) -> None:
        self._run = run
        self._loop = asyncio.get_running_loop()
        self._left_s = _IDLE_S

    async def read(self) -> bytes:
        """Its next output; empty at the end."""
        printed = await self._within(self._run.read(), b"")
        self._earn(len(printed))
        return printed

    async def write(self, data: bytes) -> bool:
        """Write all of ``data``. False when it takes no more."""
        takes = await self._within(self._run.write(data), False)
        self._earn(len(data))
        return takes

    def end_input(self) -> None:
        """Close its input."""
        self._run.end_input()

    async def ended(self) -> int:
        """Wait for its exit code."""
        return await self._within(self._run.ended(), 128 + signal.SIGKILL)

    async def _within(self, step: Awaitable[T], killed: T) -> T:
        began_s = self._loop.time()
        try:
            async with asyncio.timeout(self._left_s):
                return await step
        except TimeoutError:
            self._run.kill()
            return killed
        finally:
            self._left_s -= self._loop.time() - began_s

    def _earn(self, moved_bytes: int) -> None:
        self._left_s = min(_IDLE_S, self._left_s + moved_bytes / _LEAST_BYTES_PER_S)


async def feed(request: web.Request, run: Waited) -> None:
    """Send the request's body to the run's input. If the run has failed, the rest is read and dropped: the client
    gets the answer when it has sent everything."""
    takes = True
    while data := await body_piece(request):
        takes = takes and await run.write(data)
    run.end_input()


async def body_piece(request: web.Request) -> bytes:
    """The next piece of the request's body; empty at its end. Raises ProtocolError when nothing came in time."""
    try:
        return await in_time(request.content.readany())
    except TimeoutError as error:
        raise ProtocolError(f"nothing of the transfer arrived for {_IDLE_S:g} s") from error


async def collect(run: Waited) -> bytes:
    """The final report of a run that received data."""
    printed = bytearray()
    while piece := await run.read():
        printed += piece
        if len(printed) > _MAX_REPLY_BYTES:
            raise ProtocolError("slotfiles printed more than requested")
    return bytes(printed)


async def pass_on(request: web.Request, response: web.StreamResponse, run: Waited, piece: bytes) -> None:
    """Send the run's output as the response's body. The connection is cut only when the slot is lost or the client
    takes nothing. A body that ends normally, but without its end record, means that something in the slot ended or
    stopped the run."""
    try:
        while piece:
            await in_time(response.write(piece))
            piece = await run.read()
        await run.ended()
    except (TimeoutError, LeaseLostError):
        if request.transport is not None:
            request.transport.abort()
        return
    await response.write_eof()


def _reply(exit_code: int, printed: bytes) -> TransferReply:
    """The reply for the end of ``receive``. Raises PolicyRefusalError, ProtocolError."""
    if exit_code in (CUT_SHORT, USAGE):
        raise ProtocolError("the transfer is incomplete or malformed")
    record = RecordReader(printed).record() if printed else None
    path = readable_name(record.path) if record else ""
    if not exit_code:
        if record is None or record.kind != "e":
            raise ProtocolError("slotfiles printed no result")
        return TransferReply(entries=record.modified_ns, total_bytes=record.size_bytes)
    check_verdict(exit_code, path)
    code, text = as_data(exit_code, path)
    return TransferReply(exit_code=code, stderr=text, path=path)
