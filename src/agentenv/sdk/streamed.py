"""A program with its input and output as streams, for plain functions: blocking, as :class:`subprocess.Popen`."""

from __future__ import annotations

import io
from types import TracebackType
from typing import Final, Self

from agentenv.containers.byte_stream import ByteStream
from agentenv.containers.programs import StreamedProgram
from agentenv.sdk.loop_thread import LoopThread
from agentenv.wire.sessions import Signal

_BUFFER_BYTES: Final = 64 * 1024


class StreamedProcess:
    """:class:`agentenv.containers.programs.StreamedProgram`, driven from the sandbox's thread. ``stdout`` and
    ``stderr`` are binary files, as those of :class:`subprocess.Popen`: whoever needs both reads them in two threads."""

    def __init__(self, program: StreamedProgram, loop: LoopThread) -> None:
        self._program = program
        self._loop = loop
        self.stdout = io.BufferedReader(_Output(program.stdout, loop), _BUFFER_BYTES)
        self.stderr = io.BufferedReader(_Output(program.stderr, loop), _BUFFER_BYTES)

    def __repr__(self) -> str:
        return repr(self._program)

    @property
    def pid(self) -> int:
        """Its first process, as the slot sees it; 0 when it could not be started (its errors say why)."""
        return self._program.pid

    @property
    def exit_code(self) -> int | None:
        """Once it has ended; 128 + n when signal n ended it, 126 when it could not be started."""
        return self._program.exit_code

    @property
    def timed_out(self) -> bool:
        """Whether it was killed at its ``timeout_s``."""
        return self._program.timed_out

    @property
    def oom_killed(self) -> bool:
        """Whether the slot ran out of memory, and the kernel killed a process in it."""
        return self._program.oom_killed

    def write(self, data: bytes | str) -> None:
        """Write to its standard input; see :meth:`agentenv.containers.programs.StreamedProgram.write`."""
        self._loop.run(self._program.write(data))

    def close_stdin(self) -> None:
        """Close its standard input: it reads end of file after what was written. Repeatable."""
        self._loop.run(self._program.close_stdin())

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait for its end; its exit code. Raises TimeoutError when it still runs after ``timeout_s``; it goes on. What
        it printed has to be read meanwhile, or fit into the streams."""
        return self._loop.run(self._program.wait(timeout_s))

    def kill(self, signal: Signal = "KILL") -> None:
        """KILL ends it and everything it started; another signal goes to its process group, which may handle it. What
        it had printed can still be read. No effect when it has ended."""
        self._loop.run(self._program.kill(signal))

    def close(self) -> None:
        """Kill it if it runs, and drop what was not read. Repeatable."""
        self._loop.run(self._program.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


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
