"""``/v1/slots/{slot}/connect``: a connection to a server in a slot, over a WebSocket; and ``listen``: a port
of the slot whose connections the client answers, as frames which the server does not read.

See :mod:`agentenv.wire.connections`. The server passes bytes between the WebSocket and slotdial or slotlisten, which
run in the slot. It holds a few pipe buffers for each WebSocket; whoever does not read holds up nothing but this one.
"""

from __future__ import annotations

import asyncio
import errno
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from typing import Final

from aiohttp import WSMsgType, web

from agentenv.errors import LeaseLostError, SandboxUnavailableError
from agentenv.sandbox.descriptors import KEPT_FOR_CALLS
from agentenv.sandbox.server.agent_link import TooManyRunsError
from agentenv.sandbox.server.bodies import number, slot_key
from agentenv.sandbox.server.container import Container, Requester, requester_of
from agentenv.sandbox.server.transfer_run import TransferRun
from agentenv.sandbox.slot_paths import SlotPaths
from agentenv.wire.base import MAX_PIECE_BYTES
from agentenv.wire.connections import LINGER_S, MAX_CONNECTIONS, OVER, ConnectionReply
from agentenv.wire.leases import LeaseKey

_CANNOT_DIAL: Final = errno.EMFILE


class ConnectRoute:
    """The route, over one container."""

    def __init__(self, container: Container) -> None:
        self._container = container
        self._open: Counter[int] = Counter()

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Register both."""
        router.add_get("/v1/slots/{slot}/connect", self._connect, allow_head=False)
        router.add_get("/v1/slots/{slot}/listen", self._listen, allow_head=False)

    async def _connect(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, lambda paths: paths.dial, least_port=1)

    async def _listen(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, lambda paths: paths.listen, least_port=0)

    async def _serve(
        self, request: web.Request, program: Callable[[SlotPaths], str], *, least_port: int
    ) -> web.StreamResponse:
        key = slot_key(request)
        port = number("port", request.query.get("port", ""), 2**16 - 1, least=least_port)
        run = self._started(requester_of(request, self._container), key, program, port)
        self._open[key.slot] += 1
        try:
            with closing(run):
                return await _relayed(request, run)
        finally:
            self._open[key.slot] -= 1

    def _started(
        self, requester: Requester, key: LeaseKey, program: Callable[[SlotPaths], str], port: int
    ) -> TransferRun:
        io, env = requester.io_and_env(key)
        if self._open[key.slot] >= MAX_CONNECTIONS:
            raise SandboxUnavailableError(
                f"slot {key.slot} has {MAX_CONNECTIONS} connections already", next_step="close one of them"
            )
        run = TransferRun(io)
        try:
            run.start([program(io.paths), str(port)], env, feeds=True, keep_free=KEPT_FOR_CALLS)
        except TooManyRunsError as error:
            raise SandboxUnavailableError(str(error)) from error
        return run


async def _relayed(request: web.Request, run: TransferRun) -> web.WebSocketResponse:
    first = await run.read()
    reply = ConnectionReply() if first else ConnectionReply(error=await run.ended() or _CANNOT_DIAL)
    # No heartbeat: the answer to a ping waits behind what a slow server has not read yet.
    socket = web.WebSocketResponse(max_msg_size=MAX_PIECE_BYTES + 1, compress=False)
    await socket.prepare(request)
    await socket.send_str(reply.model_dump_json())
    if first:
        receiving = asyncio.create_task(_receive(socket, run))
        sending = asyncio.create_task(_send(socket, run, first[1:]))
        try:
            await asyncio.wait({receiving, sending}, return_when=asyncio.FIRST_COMPLETED)
            if not sending.done():  # the client has gone: what it sent still goes to the server
                run.end_input()
                await asyncio.wait({sending}, timeout=LINGER_S)
        finally:
            for task in (receiving, sending):
                task.cancel()
            await asyncio.gather(receiving, sending, return_exceptions=True)
    await socket.close()
    return socket


async def _receive(socket: web.WebSocketResponse, run: TransferRun) -> None:
    """From the client to the slot, until the client has gone."""
    async for message in socket:
        if message.type is WSMsgType.BINARY:
            await run.write(message.data)
        elif message.type is WSMsgType.TEXT and message.data == OVER:
            run.end_input()


async def _send(socket: web.WebSocketResponse, run: TransferRun, piece: bytes) -> None:
    """From the slot to the client, until both directions are over."""
    try:
        while True:
            if piece:
                await socket.send_bytes(piece)
            if not (piece := await run.read()):
                break
        await socket.send_str(OVER)
        await run.ended()  # it goes on while the client may still send
    except LeaseLostError as error:
        with suppress(ConnectionError):
            await socket.send_str(ConnectionReply(lost=error.message).model_dump_json())
