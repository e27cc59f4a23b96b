"""Programs whose input and output are streams: the client of ``GET /v1/slots/{slot}/program``
(:mod:`agentenv.wire.programs`)."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextlib import nullcontext, suppress
from types import TracebackType
from typing import Any, Final, Self

import aiohttp
from pydantic import ValidationError

from agentenv.containers.byte_stream import ByteStream, Watched
from agentenv.containers.connection import ContainerConnection
from agentenv.containers.transfer import TransferLease
from agentenv.deadlines import scaled
from agentenv.errors import (
    AgentEnvError,
    ConnectionLostError,
    InvalidArgumentsError,
    ProtocolError,
    from_wire,
)
from agentenv.tools.catalog import unencodable
from agentenv.wire.base import MAX_MESSAGE_BYTES, MAX_PIECE_BYTES, WireModel
from agentenv.wire.programs import (
    NUMBERS,
    WINDOW_BYTES,
    EndOfInput,
    InputTaken,
    ProgramEnded,
    ProgramLost,
    ProgramOrder,
    ProgramRefused,
    ProgramReply,
    ProgramStarted,
    SendSignal,
    StreamName,
    StreamOver,
    StreamRoom,
    program_reply,
)
from agentenv.wire.sessions import Signal

_START_S: Final = scaled(60.0)
_MAX_MESSAGE_BYTES: Final = MAX_PIECE_BYTES + 16 * 1024
_NAMES: Final = {number: name for name, number in NUMBERS.items()}


def checked_order(**fields: Any) -> ProgramOrder:
    """The order with these fields, without those that are None, or a ``timeout_s`` that is infinite. Raises
    InvalidArgumentsError."""
    if fields.get("timeout_s") == math.inf:
        del fields["timeout_s"]
    if (problem := unencodable(fields)) is not None:
        raise InvalidArgumentsError(f"start: {problem}")
    try:
        return ProgramOrder(**{name: value for name, value in fields.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        raise InvalidArgumentsError(f"start: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error


async def start_program(lease: TransferLease, order: ProgramOrder, watched: Watched = nullcontext) -> StreamedProgram:
    """Start a program in the slot. Raises InvalidArgumentsError, TimeoutError, ConnectionLostError, and what the
    container named."""
    wanted = order.model_dump_json(exclude_defaults=True)
    if len(wanted.encode()) > MAX_MESSAGE_BYTES:
        raise InvalidArgumentsError(
            f"start: command, arguments and environment take {len(wanted)} bytes", next_step="put them into a file"
        )
    connection = ContainerConnection(lease.container)
    try:
        async with asyncio.timeout(_START_S):
            socket = await connection.socket(
                f"/v1/slots/{lease.key.slot}/program",
                lease=lease.key.model_dump_json(),
                max_message_bytes=_MAX_MESSAGE_BYTES,
            )
            with connection.failures("starting a program"):
                await socket.send_str(wanted)
            reply = _parsed(connection, await socket.receive())
        if isinstance(reply, ProgramRefused | ProgramLost):
            raise from_wire(reply.error, reply.message, reply.next_step)
        if not isinstance(reply, ProgramStarted):
            raise ProtocolError("the container did not report whether the program started")
    except BaseException:
        await connection.aclose()
        raise
    return StreamedProgram(lease, connection, socket, order.command, reply.pid, watched)


class StreamedProgram:
    """A program that runs in a slot, with its input and output as streams: nothing is lost, and a side that
    does not read makes the other one wait, as with pipes.

    It ends with this object's connection: with its slot, when that is sealed or recreated, and when this process ends.
    Then the streams and :meth:`wait` raise InfraError (ConnectionLostError, LeaseLostError), or SlotDestroyedError when
    a program in the slot has ended it, unless they had ended before. ``async with`` kills it on leaving.
    """

    def __init__(
        self,
        lease: TransferLease,
        connection: ContainerConnection,
        socket: aiohttp.ClientWebSocketResponse,
        command: str,
        pid: int,
        watched: Watched,
    ) -> None:
        self.pid: int = pid
        """Its first process, as the slot sees it; 0 when it could not be started (stderr has the reason)."""
        self.exit_code: int | None = None
        """Once it has ended; 128 + n when signal n ended it, 126 when it could not be started."""
        self.timed_out: bool = False
        """Whether it was killed at its ``timeout_s``."""
        self.oom_killed: bool = False
        """Whether the slot ran out of memory, and the kernel killed a process in it."""
        self.stdout = self._stream("stdout", watched)
        self.stderr = self._stream("stderr", watched)
        self._lease = lease
        self._command = command if len(command) <= 60 else f"{command[:60]}…"
        self._connection = connection
        self._socket = socket
        self._watched = watched
        self._writing = asyncio.Lock()
        self._room_bytes = WINDOW_BYTES
        self._input_closed = False
        self._lost: AgentEnvError | None = None
        self._changed = asyncio.Condition()
        self._closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._receiving = asyncio.create_task(self._receive_all(), name=f"program {pid}")

    def __repr__(self) -> str:
        state = "running" if self.exit_code is None else f"exited {self.exit_code}"
        return f"<StreamedProgram {self._command!r} {state if self._lost is None else 'lost'}>"

    async def write(self, data: bytes | str) -> None:
        """Write to its standard input, as fast as it reads. Returns when all of it is on its way, up to 1 MiB of it
        unread. Raises BrokenPipeError when the input is closed, or the program has ended."""
        rest = memoryview(data.encode() if isinstance(data, str) else data)
        async with self._watched(), self._writing:
            while rest:
                await self._until(lambda: self._room_bytes > 0 or self._input_closed or self.exit_code is not None)
                if self._input_closed or self.exit_code is not None:
                    raise BrokenPipeError(f"{self._command}: {len(rest)} bytes were not written: its input is closed")
                piece = rest[: min(self._room_bytes, MAX_PIECE_BYTES)]
                self._room_bytes -= len(piece)
                await self._send(bytes(piece))
                rest = rest[len(piece) :]

    async def close_stdin(self) -> None:
        """Close its standard input: it reads end of file after what was written. Repeatable."""
        async with self._watched(), self._writing:
            if not self._input_closed:
                self._input_closed = True
                await self._send(EndOfInput())

    async def wait(self, timeout_s: float | None = None) -> int:
        """Wait for its end; returns its exit code. Raises TimeoutError when it still runs after ``timeout_s``: it
        continues.

        Its output has to be read at the same time, or fit into the streams (1 MiB each), as for
        :meth:`asyncio.subprocess.Process.wait`.
        """
        async with self._watched():
            try:
                async with asyncio.timeout(timeout_s):
                    await self._until(lambda: self.exit_code is not None)
            except TimeoutError as error:
                raise TimeoutError(f"{self._command} still runs after {timeout_s:g} s") from error
        assert self.exit_code is not None
        return self.exit_code

    async def kill(self, signal: Signal = "KILL") -> None:
        """KILL ends it and everything it started; another signal goes to its process group, which may handle it. What
        it had printed can still be read. No effect when it has ended."""
        async with self._watched():
            if self.exit_code is None:
                await self._send(SendSignal(signal=signal))

    async def close(self) -> None:
        """Kill it if it runs, and drop what was not read. Repeatable."""
        self._lose(ConnectionLostError(f"{self._command} was closed"))
        if not self._closed.done():
            self._closed.set_result(None)
        await asyncio.wait({self._receiving})

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # ----------------------------------------------------------------------------------------------

    def _stream(self, name: StreamName, watched: Watched) -> ByteStream:
        async def make_room(count: int) -> None:
            with suppress(AgentEnvError):  # the stream itself ends with it
                await self._send(StreamRoom(stream=name, bytes=count))

        return ByteStream(make_room, watched)

    async def _until(self, reached: Callable[[], bool]) -> None:
        """Wait for the condition. Raises the error with which the program was lost."""
        async with self._changed:
            await self._changed.wait_for(lambda: reached() or self._lost is not None)
        if not reached() and self._lost is not None:
            raise self._lost.copy()

    async def _send(self, message: bytes | WireModel) -> None:
        try:
            if isinstance(message, bytes):
                await self._socket.send_bytes(message)
            else:
                await self._socket.send_str(message.model_dump_json())
        except (aiohttp.ClientError, OSError) as error:
            if self.exit_code is None:
                raise self._lost or self._cut() from error

    async def _receive_all(self) -> None:
        losing = asyncio.create_task(self._lease.wait_lost())
        receiving = asyncio.create_task(self._receive())
        error: AgentEnvError = self._cut()
        async with self._connection, self._socket:  # closing them ends the program, if it still runs
            try:
                ends: tuple[asyncio.Future[Any], ...] = (losing, receiving, self._closed)
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                if receiving.done() or losing.done():
                    error = (receiving if receiving.done() else losing).result()
            except AgentEnvError as raised:
                error = raised
            finally:
                for task in (losing, receiving):
                    task.cancel()
                self._lose(error)
                await asyncio.gather(losing, receiving, return_exceptions=True)
                async with self._changed:
                    self._changed.notify_all()

    async def _receive(self) -> AgentEnvError:
        """Receive until the connection ends; returns the error of its end."""
        while True:
            message = await self._socket.receive()
            if message.type is aiohttp.WSMsgType.BINARY:
                self._output(_NAMES.get(message.data[0]) if message.data else None).feed(message.data[1:])
                continue
            match _parsed(self._connection, message):
                case StreamOver(stream=name):
                    self._output(name).feed_end()
                case InputTaken(bytes=count, closed=closed):
                    self._room_bytes += count
                    self._input_closed = self._input_closed or closed
                case ProgramEnded() as ended:
                    self.timed_out, self.oom_killed = ended.timed_out, ended.oom_killed
                    self.exit_code = ended.exit_code
                case ProgramLost() as lost:
                    return from_wire(lost.error, lost.message, lost.next_step)
                case _:
                    return ProtocolError("the container sent something unexpected of a program")
            async with self._changed:
                self._changed.notify_all()

    def _output(self, name: StreamName | None) -> ByteStream:
        if name is None:
            raise ProtocolError("the container sent bytes of an unknown stream")
        return self.stdout if name == "stdout" else self.stderr

    def _cut(self) -> ConnectionLostError:
        return self._connection.lost(f"the connection to {self._command} was cut")

    def _lose(self, error: AgentEnvError) -> None:
        self._lost = self._lost or error
        for stream in (self.stdout, self.stderr):
            stream.lose(self._lost)


def _parsed(connection: ContainerConnection, message: aiohttp.WSMessage) -> ProgramReply:
    """Raises ConnectionLostError when it is the end of the connection, ProtocolError."""
    if message.type is not aiohttp.WSMsgType.TEXT:
        raise connection.lost("the connection to the program was cut")
    try:
        return program_reply.validate_json(message.data)
    except ValidationError as error:
        raise ProtocolError("the container sent something other than a program's state") from error
