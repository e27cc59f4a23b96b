"""``/v1/slots/{slot}/transfer``: files and directories of any size. ``/v1/slots/{slot}/tar``: tars with owners, modes
and times, of image slots. Both run concurrently with calls.

The server passes bytes between a connection and a program in the slot: slotfiles, or slottar as the slot's root. It
holds a few pipe buffers per transfer, handles one piece per iteration of its loop, and does not interpret the content
(:mod:`agentenv.wire.transfers`). ``user=NAME`` in the query: as that user of an image slot.

``PUT …/tar?path=/DIRECTORY&uid=0&gid=0&mode=493`` unpacks the body below a directory, which is made with its missing
parents, of that owner and mode. ``GET …/tar?path=/PATH`` is the tar of a directory's content, or of one file.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Mapping
from contextlib import closing
from dataclasses import replace
from typing import Final, TypeVar

from aiohttp import web

from agentenv.errors import ProtocolError, SandboxUnavailableError
from agentenv.file_names import readable_name
from agentenv.sandbox.server import bodies
from agentenv.sandbox.server.bodies import in_time, number, path_in_slot, pieces, slot_key, streamed, user_in_slot
from agentenv.sandbox.server.container import Container, requester_of
from agentenv.sandbox.server.process import SlotIo
from agentenv.sandbox.server.tools.file_records import RecordReader
from agentenv.sandbox.server.tools.slotfiles_exit_codes import CUT_SHORT, USAGE, as_data, check_verdict
from agentenv.sandbox.server.transfer_run import TransferRun
from agentenv.sandbox.slot_env import env_of
from agentenv.wire.transfers import MAX_ENTRIES, Entry, TransferReply

_LEAST_BYTES_PER_S = 64 * 1024
"""A run that is slower than this by more than :data:`bodies.IDLE_S` counts as stopped."""
_AT_ONCE: Final = 2
"""Concurrent transfers of one slot; more wait."""
_MAX_REPLY_BYTES: Final = 16 * 1024
_MOST: Final[Mapping[str, int]] = {"uid": 65_535, "gid": 65_535, "mode": 0o7777}

T = TypeVar("T")


class TransferRoutes:
    """The four routes, over one container."""

    def __init__(self, container: Container) -> None:
        self._container = container
        self._turns: dict[int, asyncio.Semaphore] = {}

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Register the routes."""
        router.add_put("/v1/slots/{slot}/transfer", self._put)
        router.add_get("/v1/slots/{slot}/transfer", self._get, allow_head=False)
        router.add_put("/v1/slots/{slot}/tar", self._put_tar)
        router.add_get("/v1/slots/{slot}/tar", self._get_tar, allow_head=False)

    async def _put(self, request: web.Request) -> web.StreamResponse:
        path = path_in_slot(request)
        return await self._receive(request, lambda io: io.paths.slotfiles("receive", path), _reply)

    async def _get(self, request: web.Request) -> web.StreamResponse:
        path = path_in_slot(request)

        def failed(code: int) -> bytes:
            return Entry("x", size=code).encode() if 0 < code <= 128 else b""  # an errno: it could not be started

        return await self._send(
            request,
            lambda io: io.paths.slotfiles("send", path, str(MAX_ENTRIES)),
            "application/x-agentenv-transfer",
            failed,
        )

    async def _put_tar(self, request: web.Request) -> web.StreamResponse:
        path = path_in_slot(request)
        numbers = [str(number(name, request.query.get(name, "0"), most)) for name, most in _MOST.items()]

        def reply(code: int, printed: bytes) -> TransferReply:
            where = readable_name(printed) if printed else path
            why = "" if not code else f"{os.strerror(code)}\n" if code < 128 else "it was ended\n"
            return TransferReply(exit_code=code, stderr=why, path=where)

        return await self._receive(request, lambda io: _tar(io, "unpack", path, *numbers), reply)

    async def _get_tar(self, request: web.Request) -> web.StreamResponse:
        path = path_in_slot(request)

        def failed(code: int) -> bytes:
            raise ProtocolError(f"{path}: cannot be read (slottar ended with {code})")

        return await self._send(request, lambda io: _tar(io, "pack", path), "application/x-tar", failed)

    async def _receive(
        self,
        request: web.Request,
        argv: Callable[[SlotIo], list[str]],
        reply: Callable[[int, bytes], TransferReply],
    ) -> web.StreamResponse:
        """Give the request's body to a program; the reply is made of its exit code and what it printed."""
        async with self._turn(request):
            with closing(self._started(request, argv, feeds=True)) as run:
                waited, takes = Waited(run), True
                async for piece in pieces(request):
                    # A failed run reads nothing more. The client still sends everything before it reads the response.
                    takes = takes and await waited.write(piece)
                run.end_input()
                printed = bytearray()
                while piece := await waited.read():
                    printed += piece
                    if len(printed) > _MAX_REPLY_BYTES:
                        raise ProtocolError("the program printed more than requested")
                replied = reply(await waited.ended(), bytes(printed))
        return web.json_response(text=replied.model_dump_json())

    async def _send(
        self,
        request: web.Request,
        argv: Callable[[SlotIo], list[str]],
        content_type: str,
        failed: Callable[[int], bytes],
    ) -> web.StreamResponse:
        """Send what a program prints, or ``failed(exit code)`` when it printed nothing. A body that ends normally, but
        without the end of its format, means that something in the slot ended or stopped the run."""
        async with self._turn(request):
            with closing(self._started(request, argv, feeds=False)) as run:
                waited = Waited(run)
                piece = await waited.read() or failed(await waited.ended())
                async with streamed(request, content_type) as response:
                    while piece:
                        await in_time(response.write(piece))
                        piece = await waited.read()
                    await waited.ended()
        return response

    def _started(self, request: web.Request, argv: Callable[[SlotIo], list[str]], *, feeds: bool) -> TransferRun:
        io, env = requester_of(request, self._container).io_and_env(slot_key(request))
        user = user_in_slot(request)
        io = replace(io, paths=io.paths.of_user(user))
        if user is not None:  # whose home is the user's, not that of plain slots
            env = env_of(user, {name: value for name, value in env.items() if name not in ("HOME", "USER", "LOGNAME")})
        run = TransferRun(io)
        run.start(argv(io), env, feeds=feeds)
        return run

    def _turn(self, request: web.Request) -> asyncio.Semaphore:
        return self._turns.setdefault(slot_key(request).slot, asyncio.Semaphore(_AT_ONCE))


def _tar(io: SlotIo, operation: str, path: str, *numbers: str) -> list[str]:
    if not io.paths.own_root:
        raise SandboxUnavailableError("plain slots take no tars with owners", next_step="lease one with an image")
    if not path.startswith("/"):
        raise ProtocolError("path: must be absolute")
    return [io.paths.tar, operation, path, *numbers]


class Waited:
    """A run that may keep its transfer waiting for 60 s in total; progress earns that time back. After that it is
    killed: something in its slot stops it, perhaps repeatedly, and the client should neither wait for ever nor see
    a lost connection. All methods raise LeaseLostError."""

    def __init__(self, run: TransferRun) -> None:
        self._run = run
        self._loop = asyncio.get_running_loop()
        self._left_s = bodies.IDLE_S

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
        self._left_s = min(bodies.IDLE_S, self._left_s + moved_bytes / _LEAST_BYTES_PER_S)


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
