"""One connection that a program of a slot made to a port which is answered here: an asyncio transport over frames."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Final, NoReturn

from agentenv.containers.frames import Frame, broken, packed, packed_head
from agentenv.wire.connections import MAX_DATA_BYTES, ROOM_BYTES, WINDOW_BYTES, FrameKind

_HIGH_WATER_BYTES: Final = 64 * 1024


class SlotTransport(asyncio.Transport):
    """As a socket's transport; there is no socket, and it never holds more than WINDOW_BYTES that were received.

    Whoever owns it feeds :meth:`obey` with the slot's frames, and sends :meth:`next_frames` when ``due`` was called,
    until it has ``ended``. After :meth:`close`, what the slot still sends is dropped; a program that sends a whole
    window of it is reset, as a TCP connection would be.
    """

    def __init__(self, number: int, due: Callable[[SlotTransport], None]) -> None:
        super().__init__()
        self.number = number
        self.ended = False
        """Nothing more is sent or received."""
        self.queued = False
        """For the owner: whether it is in its queue of those that are due."""
        self._due = due
        self._loop = asyncio.get_running_loop()
        self._protocol: asyncio.Protocol = asyncio.Protocol()
        self._made = False
        self._lost = False
        self._closing = False
        # to the slot
        self._out = bytearray()
        self._room = WINDOW_BYTES
        self._eof = False
        self._over_sent = False
        self._broken_off = False
        self._high, self._low = _HIGH_WATER_BYTES, _HIGH_WATER_BYTES // 4
        self._writing_paused = False
        # from the slot
        self._in: deque[bytes] = deque()
        self._window = WINDOW_BYTES
        self._taken = 0
        self._dropped = 0
        self._over_received = False
        self._eof_told = False
        self._reading_paused = False

    # -- the owner's side --------------------------------------------------------------------------

    def serve_by(self, factory: Callable[[], asyncio.BaseProtocol]) -> None:
        """Begin, with a protocol of this factory."""

        def begin() -> None:
            self.set_protocol(factory())
            self._made = True
            self._protocol.connection_made(self)

        self._tell(begin)

    def obey(self, frame: Frame) -> None:
        """Do what a frame of the slot says. Raises ServingEndedError when it may not say that."""
        match frame.kind:
            case FrameKind.DATA:
                self._receive(frame.data)
            case FrameKind.OVER:
                if self._over_received:
                    raise broken("a connection was over twice")
                self._over_received = True
                self._deliver_eof()
                self._settle()
            case FrameKind.ROOM:
                if self._room + frame.count > WINDOW_BYTES:
                    raise broken("it took more than it was sent")
                self._room += frame.count
                self._have_due()
            case FrameKind.RESET:
                self.lose(ConnectionResetError("the connection was reset by a program of the slot"))
            case _:
                raise broken(f"a frame {frame.kind.name} for a connection")

    @property
    def sendable(self) -> bool:
        """Whether there are frames to send now."""
        return not self.ended and bool(
            self._broken_off or self._gives_room or (self._out and self._room) or self._over_is_next
        )

    @property
    def unsent(self) -> bool:
        """Whether something written, or its end, is still to be sent, now or when there is room."""
        return not self.ended and bool(self._broken_off or self._out or (self._eof and not self._over_sent))

    def next_frames(self) -> list[bytes | bytearray]:
        """The frames to send now, one of each kind at most, in pieces."""
        if self.ended:
            return []
        if self._broken_off:
            self.ended = True
            return [packed(self.number, FrameKind.RESET)]
        frames: list[bytes | bytearray] = []
        if self._gives_room:
            frames.append(packed(self.number, FrameKind.ROOM, room=self._taken))
            self._window += self._taken
            self._taken = 0
        if size := min(len(self._out), self._room, MAX_DATA_BYTES):
            frames += packed_head(self.number, FrameKind.DATA, size), self._out[:size]
            del self._out[:size]
            self._room -= size
            self._resume_writing()
        if self._over_is_next:
            frames.append(packed(self.number, FrameKind.OVER))
            self._over_sent = True
        if self._closing and not self._out:
            self._lose_soon()
        self._settle()
        return frames

    def lose(self, error: Exception | None) -> None:
        """It has ended, without another frame. Repeatable."""
        self.ended = True
        self._closing = True
        self._out.clear()
        self._in.clear()
        self._tell_lost(error)

    # -- asyncio.Transport -------------------------------------------------------------------------

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """See :meth:`asyncio.BaseTransport.set_protocol`; a streaming protocol."""
        if not isinstance(protocol, asyncio.Protocol):
            raise TypeError(f"{protocol!r} is no asyncio.Protocol")
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        """See :meth:`asyncio.BaseTransport.get_protocol`."""
        return self._protocol

    def is_reading(self) -> bool:
        """See :meth:`asyncio.ReadTransport.is_reading`."""
        return not self._reading_paused and not self._closing

    def pause_reading(self) -> None:
        """See :meth:`asyncio.ReadTransport.pause_reading`."""
        self._reading_paused = True

    def resume_reading(self) -> None:
        """See :meth:`asyncio.ReadTransport.resume_reading`."""
        if self._reading_paused:
            self._reading_paused = False
            self._loop.call_soon(self._deliver)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """See :meth:`asyncio.WriteTransport.write`."""
        if self._eof and not self._closing:
            raise RuntimeError("cannot write after write_eof")
        if self._closing or not data:
            return
        self._out += data
        if len(self._out) > self._high and not self._writing_paused:
            self._writing_paused = True
            self._tell(self._protocol.pause_writing)
        self._have_due()

    def write_eof(self) -> None:
        """See :meth:`asyncio.WriteTransport.write_eof`."""
        self._eof = True
        self._have_due()

    def can_write_eof(self) -> bool:
        """It can."""
        return True

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """See :meth:`asyncio.WriteTransport.set_write_buffer_limits`."""
        high = (_HIGH_WATER_BYTES if low is None else 4 * low) if high is None else high
        low = high // 4 if low is None else low
        if not high >= low >= 0:
            raise ValueError(f"high ({high}) must be >= low ({low}) must be >= 0")
        self._high, self._low = high, low

    def get_write_buffer_limits(self) -> tuple[int, int]:
        """See :meth:`asyncio.WriteTransport.get_write_buffer_limits`."""
        return self._low, self._high

    def get_write_buffer_size(self) -> int:
        """See :meth:`asyncio.WriteTransport.get_write_buffer_size`."""
        return len(self._out)

    def is_closing(self) -> bool:
        """See :meth:`asyncio.BaseTransport.is_closing`."""
        return self._closing

    def close(self) -> None:
        """See :meth:`asyncio.BaseTransport.close`: what was written is still sent."""
        if self._closing:
            return
        self._closing = True
        self._drop(sum(map(len, self._in)))
        self._in.clear()
        self._eof = True
        if not self._out:
            self._lose_soon()
        self._have_due()

    def abort(self) -> None:
        """See :meth:`asyncio.WriteTransport.abort`: the program of the slot sees a reset."""
        self._closing = True
        self._broken_off = True
        self._out.clear()
        self._in.clear()
        self._lose_soon()
        self._have_due()

    @property
    def _sendfile_compatible(self) -> NoReturn:
        """What :meth:`loop.sendfile` looks at. With this error aiohttp reads a file and writes it; by default it would
        fail."""
        raise NotImplementedError("there is no socket to send a file to")

    # ----------------------------------------------------------------------------------------------

    @property
    def _gives_room(self) -> bool:
        return self._taken >= ROOM_BYTES

    @property
    def _over_is_next(self) -> bool:
        """Not before what came was taken: the slot counts it as ended then, and may open another one."""
        return self._eof and not self._over_sent and not self._out and not (self._over_received and self._in)

    def _have_due(self) -> None:
        if self.sendable:
            self._due(self)

    def _receive(self, data: bytes) -> None:
        if self._over_received:
            raise broken("a connection went on after it was over")
        if len(data) > self._window:
            raise broken("it sent more than there was room for")
        self._window -= len(data)
        if self._closing:
            self._drop(len(data))
        else:
            self._in.append(data)
            self._deliver()

    def _drop(self, size: int) -> None:
        self._dropped += size
        self._taken += size
        self._broken_off |= self._dropped > WINDOW_BYTES
        self._have_due()

    def _deliver(self) -> None:
        """Hand on what came, until reading is paused."""
        while self._in and not self._reading_paused:
            data = self._in.popleft()
            self._taken += len(data)
            self._tell(self._protocol.data_received, data)
        self._deliver_eof()
        self._have_due()

    def _deliver_eof(self) -> None:
        if not self._over_received or self._in or self._reading_paused or self._closing or self._eof_told:
            return
        self._eof_told = True

        def tell() -> None:
            if not self._protocol.eof_received():
                self.close()

        self._tell(tell)

    def _resume_writing(self) -> None:
        if self._writing_paused and len(self._out) <= self._low:
            self._writing_paused = False
            self._tell(self._protocol.resume_writing)

    def _settle(self) -> None:
        self.ended |= self._over_sent and self._over_received

    def _lose_soon(self) -> None:
        self._loop.call_soon(self._tell_lost, None)

    def _tell_lost(self, error: Exception | None) -> None:
        if self._made and not self._lost:
            self._lost = True
            self._tell(self._protocol.connection_lost, error)

    def _tell(self, callback: Callable[..., Any], *given: Any) -> None:
        """Call the protocol. Its errors are its own: they end this connection only."""
        try:
            callback(*given)
        except Exception as error:
            self._loop.call_exception_handler(
                {"message": "a protocol failed", "exception": error, "transport": self, "protocol": self._protocol}
            )
            if not self._closing:
                self.abort()
