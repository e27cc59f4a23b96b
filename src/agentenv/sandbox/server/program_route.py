"""``/v1/slots/{slot}/program``: a program whose input and output are streams, over a WebSocket.

See :mod:`agentenv.wire.programs`. The server holds one piece of each stream; a client that does not read blocks
only its own program.
"""

from __future__ import annotations

import asyncio
import math
import signal
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any, Final

from aiohttp import WSCloseCode, WSMsgType, web
from pydantic import ValidationError

from agentenv.deadlines import scaled
from agentenv.errors import (
    AgentEnvError,
    InfraError,
    InvalidArgumentsError,
    LeaseLostError,
    ProtocolError,
    SandboxUnavailableError,
)
from agentenv.sandbox.server.agent_link import TooManyRunsError
from agentenv.sandbox.server.bodies import slot_key
from agentenv.sandbox.server.container import Container, Requester, requester_of
from agentenv.sandbox.server.metrics import Statistics
from agentenv.sandbox.server.slot_sessions import SlotHost
from agentenv.sessions.background import Order
from agentenv.sessions.streamed import Streamed
from agentenv.wire.base import MAX_MESSAGE_BYTES, MAX_PIECE_BYTES, WireModel
from agentenv.wire.leases import LeaseKey
from agentenv.wire.programs import (
    MAX_PROGRAMS,
    NUMBERS,
    WINDOW_BYTES,
    EndOfInput,
    InputTaken,
    ProgramEnded,
    ProgramLost,
    ProgramOrder,
    ProgramRefused,
    ProgramStarted,
    SendSignal,
    StreamName,
    StreamOver,
    StreamRoom,
    program_request,
)

_ORDER_S: Final = scaled(60.0)
"""Time for the order to arrive."""


class ProgramRoute:
    """The route, over one container."""

    def __init__(self, container: Container) -> None:
        self._container = container
        self._open: Counter[int] = Counter()

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Register it."""
        router.add_get("/v1/slots/{slot}/program", self._get, allow_head=False)

    async def _get(self, request: web.Request) -> web.StreamResponse:
        key = slot_key(request)
        requester = requester_of(request, self._container)
        socket = web.WebSocketResponse(max_msg_size=MAX_MESSAGE_BYTES, compress=False)
        await socket.prepare(request)
        self._open[key.slot] += 1
        try:
            with suppress(ConnectionError):  # the client has disconnected, which ends the program
                await self._serve(socket, requester, key)
            await socket.close()
        finally:
            self._open[key.slot] -= 1
        return socket

    async def _serve(self, socket: web.WebSocketResponse, requester: Requester, key: LeaseKey) -> None:
        try:
            order = await _order(socket)
            host = requester.host(key)
            if self._open[key.slot] > MAX_PROGRAMS:
                raise SandboxUnavailableError(
                    f"slot {key.slot} has {MAX_PROGRAMS} streamed programs already", next_step="end one of them"
                )
            program = _started(host, order)
        except AgentEnvError as error:
            await _refuse(socket, error)
            return
        with self._counted(host) as counted, closing(program):
            try:
                await _Connection(socket, program, host, counted).run(order.timeout_s)
            except LeaseLostError as error:
                lost = await requester.wait_why_lost(key) or error
                counted.calls_faulted += 1
                await _send(socket, ProgramLost(error=lost.code, message=lost.message, next_step=lost.next_step))
            except _AboveError as error:
                counted.calls_faulted += 1
                await _refuse(socket, InfraError(str(error)))
            except ProtocolError as error:
                await socket.close(code=WSCloseCode.PROTOCOL_ERROR, message=error.message[:100].encode())

    @contextmanager
    def _counted(self, host: SlotHost) -> Iterator[Statistics]:
        """A program that was started counts as a call, and how long it ran with it."""
        began_s = host.loop.time()
        try:
            yield self._container.counted
        finally:
            self._container.counted.calls += 1
            self._container.counted.ran(host.loop.time() - began_s)


async def _order(socket: web.WebSocketResponse) -> ProgramOrder:
    try:
        async with asyncio.timeout(_ORDER_S):
            return ProgramOrder.model_validate_json(await socket.receive_str())
    except (TypeError, TimeoutError, ValidationError) as error:
        raise ProtocolError(f"the client sent no order: {error}") from error


def _started(host: SlotHost, order: ProgramOrder) -> Streamed:
    try:
        wanted = Order(order.command, host.directory(order.workdir), order.env or {}, argv=order.argv, user=order.user)
        return Streamed(host, wanted, feeds=order.input)
    except TooManyRunsError as error:
        raise SandboxUnavailableError(str(error)) from error
    except ValueError as error:
        raise InvalidArgumentsError(f"start: {error}") from error


class _AboveError(Exception):
    """The program could not be started because of a limit above the slot."""


class _Connection:
    """One program and its client, until both streams and the end were sent, or the client has disconnected."""

    def __init__(self, socket: web.WebSocketResponse, program: Streamed, host: SlotHost, counted: Statistics) -> None:
        self._socket = socket
        self._program = program
        self._host = host
        self._counted = counted
        self._room: dict[StreamName, float] = {"stdout": WINDOW_BYTES, "stderr": WINDOW_BYTES}
        self._more_room = {name: asyncio.Event() for name in self._room}
        self._input: deque[bytes] = deque()
        """Input that the client sent and the program has not read; an empty piece is the end."""
        self._untaken_bytes = 0
        self._more_input = asyncio.Event()
        self._timed_out = False

    async def run(self, timeout_s: float | None) -> None:
        """Raises LeaseLostError, ConnectionError when the client has disconnected, ProtocolError when it breaks
        the rules, _AboveError."""
        await self._program.begun()
        if not self._program.pid and (above := self._host.take_above()):
            raise _AboveError(above)
        await _send(self._socket, ProgramStarted(pid=self._program.pid))
        timer = None if timeout_s is None else self._host.loop.call_later(timeout_s, self._time_out)
        receiving, feeding = asyncio.create_task(self._receive()), asyncio.create_task(self._feed())
        sending = [asyncio.create_task(self._send_stream(name)) for name in NUMBERS]
        sending.append(asyncio.create_task(self._send_end()))
        ends: tuple[asyncio.Future[Any], ...] = (asyncio.gather(*sending), receiving)
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for end in ends:
                if end.done():
                    end.result()
        finally:
            if timer is not None:
                timer.cancel()
            for task in (receiving, feeding, *sending):
                task.cancel()
            await asyncio.gather(*ends, feeding, return_exceptions=True)

    async def _send_stream(self, name: StreamName) -> None:
        number = NUMBERS[name]
        mark = bytes((number,))
        while True:
            while self._room[name] <= 0:
                self._more_room[name].clear()
                await self._more_room[name].wait()
            piece = await self._program.read(number - 1, int(min(self._room[name], MAX_PIECE_BYTES)))
            if not piece:
                break
            self._room[name] -= len(piece)
            await self._socket.send_bytes(mark + piece)
        await _send(self._socket, StreamOver(stream=name))

    async def _send_end(self) -> None:
        code = await self._program.ended()
        oom_killed = code != 0 and self._host.killed_by_own_limit()
        self._counted.calls_timed_out += self._timed_out
        self._counted.calls_oom_killed += oom_killed
        await _send(self._socket, ProgramEnded(exit_code=code, timed_out=self._timed_out, oom_killed=oom_killed))

    async def _receive(self) -> None:
        async for message in self._socket:
            if message.type is WSMsgType.BINARY:
                self._put(message.data)
            elif message.type is WSMsgType.TEXT:
                self._take(message.data)

    def _put(self, data: bytes) -> None:
        self._untaken_bytes += len(data)
        if self._untaken_bytes > WINDOW_BYTES:
            raise ProtocolError("the client sent more than the window of the program's input")
        if data:
            self._input.append(data)
            self._more_input.set()

    def _take(self, text: str) -> None:
        try:
            request = program_request.validate_json(text)
        except ValidationError as error:
            raise ProtocolError(f"the client sent something else than a request: {error}") from error
        match request:
            case StreamRoom(stream=name, bytes=count):
                self._add_room(name, count)
            case EndOfInput():
                self._input.append(b"")
                self._more_input.set()
            case SendSignal(signal="KILL"):
                self._kill()
            case SendSignal(signal=name):
                self._program.signal(signal.Signals[f"SIG{name}"])

    async def _feed(self) -> None:
        while True:
            while not self._input:
                self._more_input.clear()
                await self._more_input.wait()
            if not (data := self._input.popleft()):
                self._program.end_input()
                return
            if not await self._program.write(data):
                await _send(self._socket, InputTaken(closed=True))
                return
            self._untaken_bytes -= len(data)
            await _send(self._socket, InputTaken(bytes=len(data)))

    def _add_room(self, name: StreamName, count: float) -> None:
        self._room[name] += count
        self._more_room[name].set()

    def _time_out(self) -> None:
        self._timed_out = True
        self._kill()

    def _kill(self) -> None:
        """The program's end is reported once its output was read, which is then no more than its pipes hold."""
        self._program.kill()
        for name in self._room:
            self._add_room(name, math.inf)


async def _refuse(socket: web.WebSocketResponse, error: AgentEnvError) -> None:
    await _send(socket, ProgramRefused(error=error.code, message=error.message, next_step=error.next_step))


async def _send(socket: web.WebSocketResponse, message: WireModel) -> None:
    await socket.send_str(message.model_dump_json())
