"""What the blocking classes of :mod:`agentenv.sdk.sandbox` inherit: all that cannot be generated from the async ones.

A blocking object holds an object of the async SDK and the thread whose event loop runs that one's coroutines.
"""

from __future__ import annotations

import io
import socket
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Final, Generic, Self, TypeVar

from agentenv.containers.byte_stream import ByteStream
from agentenv.containers.programs import StreamedProgram
from agentenv.sdk.async_sandbox import AsyncFarm, AsyncSandbox
from agentenv.sdk.forwards import as_socket
from agentenv.sdk.loop_thread import LoopThread
from agentenv.sdk.python import SlotPython

T = TypeVar("T")
O = TypeVar("O", bound=AsyncFarm | AsyncSandbox)  # noqa: E741 - opened
H = TypeVar("H", bound=StreamedProgram | SlotPython)

_BUFFER_BYTES: Final = 64 * 1024


class Blocking(Generic[T]):
    """An object of the async SDK, driven from a background thread."""

    def __init__(self, driven: T, loop: LoopThread) -> None:
        self._driven = driven
        self._loop = loop

    @classmethod
    def _of(cls, driven: T, maker: Blocking[Any]) -> Self:
        """``driven`` was made by what ``maker`` drives; the same thread drives it."""
        return cls(driven, maker._loop)

    def __repr__(self) -> str:
        return repr(self._driven).replace("<Async", "<", 1)


class Opened(Blocking[O]):
    """Opening and closing. Without a maker it has a thread of its own, which ends with it."""

    def _drive(self, driven: O, maker: Blocking[Any] | None) -> None:
        """Called once by the constructor."""
        super().__init__(driven, LoopThread() if maker is None else maker._loop)
        self._maker = maker  # if nothing else referenced that, it would be closed, and the thread with it
        # One that a notebook did not close: ended with the object, or at the latest with the interpreter.
        self._end = weakref.finalize(self, _close, driven, self._loop, maker is None)

    @classmethod
    def _of(cls, driven: O, maker: Blocking[Any]) -> Self:
        made = cls.__new__(cls)
        made._drive(driven, maker)
        return made

    @property
    def is_open(self) -> bool:
        """Whether it can be used."""
        return self._driven.is_open

    def open(self) -> Self:
        """Start it. Raises SandboxUnavailableError with cause and cure; then nothing is left running. Raises
        PoolClosedError if it was opened before: an open one stays as it is."""
        try:
            self._loop.run(self._driven.open())
        except BaseException:
            if not self.is_open:
                self.close()
            raise
        return self

    def close(self) -> None:
        """Wipe the slots, stop whatever :meth:`open` started. Repeatable."""
        self._loop.check_caller()
        self._end()

    def __enter__(self) -> Self:
        """Opens it, unless it is open."""
        return self if self.is_open and self._loop.running else self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class OpenedSandbox(Opened[AsyncSandbox]):
    """What only a sandbox has."""

    @contextmanager
    def connect(self, port: int, *, timeout_s: float = 30.0) -> Iterator[socket.socket]:
        """A connection to a server that listens at this port of the sandbox's own 127.0.0.1 (or ::1): a blocking
        socket, for ``with``; up to 64 at once. ``makefile()`` makes a file of it.

        It ends with the block, and when the sandbox is sealed, restored or closed: that reads as its end, and leaving
        the block raises InfraError. Raises ConnectionRefusedError when nothing listens there, TimeoutError, InfraError.
        """
        with self._loop.held(as_socket(self._driven.connect(port, timeout_s=timeout_s))) as connected:
            yield connected


class BlockingHandle(Blocking[H]):
    """What runs in a sandbox until it is closed."""

    def close(self) -> None:
        """End it if it runs, and drop what was not read. Repeatable."""
        self._loop.run(self._driven.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class BlockingProgram(BlockingHandle[StreamedProgram]):
    """A program's input and output as streams, blocking as those of :class:`subprocess.Popen`."""

    def __init__(self, driven: StreamedProgram, loop: LoopThread) -> None:
        super().__init__(driven, loop)
        self.stdout = io.BufferedReader(_Output(driven.stdout, loop), _BUFFER_BYTES)
        """A binary file. Whoever needs both this and ``stderr`` reads them in two threads."""
        self.stderr = io.BufferedReader(_Output(driven.stderr, loop), _BUFFER_BYTES)
        """A binary file, as ``stdout`` is."""


class _Output(io.RawIOBase):
    def __init__(self, stream: ByteStream, loop: LoopThread) -> None:
        self._stream = stream
        self._loop = loop

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        room = memoryview(buffer).cast("B")
        data = self._loop.run(self._stream.read(len(room)))
        room[: len(data)] = data
        return len(data)


def _close(driven: AsyncSandbox | AsyncFarm, loop: LoopThread, owned: bool) -> None:
    if loop.inside:  # the garbage collector may find a forgotten sandbox in any thread
        loop.begin(driven.close(), then_end=owned)
        return
    try:
        if loop.running:
            loop.run(driven.close())
    finally:
        if owned:
            loop.close()
