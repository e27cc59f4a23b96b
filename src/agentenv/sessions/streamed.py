"""One program whose input and output are streams: nothing is dropped, the program waits for its reader."""

from __future__ import annotations

import asyncio
import os

from agentenv.errors import LeaseLostError
from agentenv.sessions.background import Order
from agentenv.sessions.ends import ReadEnd, Watcher, WriteEnd
from agentenv.sessions.host import Host

STDOUT, STDERR = 0, 1


class Streamed:
    """From its start to :meth:`close`, which kills it. One coroutine may read each output, and one write."""

    def __init__(self, host: Host, order: Order, *, feeds: bool) -> None:
        """Start it; ``feeds``: it will be written to. Raises ValueError when argv and env are too large;
        UserUnsupportedError, OSError."""
        self.pid = 0
        """Its first process, as the slot sees it; 0 when it could not be started."""
        self._host = host
        self._order = order
        self._watcher = Watcher(host.loop, host.watch, host.unwatch)
        self._outputs: list[ReadEnd] = []
        self._input: WriteEnd | None = None
        self._begun = asyncio.Event()
        self._over = asyncio.Event()
        self._exit_code = 0
        self._failure = b""
        self._lost = False
        theirs = -1
        if feeds:
            ours, theirs = host.input()
            self._input = WriteEnd(host.loop, ours)
        try:
            self._started = host.start(order.program(host.env, None if theirs < 0 else theirs), self)
        except BaseException:
            self.end_input()
            raise
        finally:
            if theirs >= 0:
                os.close(theirs)

    async def begun(self) -> None:
        """Wait until it runs, or could not be started. Raises LeaseLostError."""
        await self._begun.wait()
        self._check()

    async def read(self, output: int, most_bytes: int) -> bytes:
        """The next bytes of this output; empty at its end. Why it could not be started is on its errors. Raises
        LeaseLostError."""
        await self.begun()
        if self._failure and output == STDERR:
            failure, self._failure = self._failure, b""
            return failure
        piece = await self._outputs[output].read(most_bytes) if self._outputs else b""
        if not piece:
            self._check()
        return piece

    async def write(self, data: bytes) -> bool:
        """Write all of ``data`` to its input. False when it takes no more."""
        return self._input is not None and await self._input.write(data)

    def end_input(self) -> None:
        """Close its input. Repeatable."""
        if self._input is not None:
            self._input.close()

    def kill(self) -> None:
        """Kill it and everything it started. No effect when it has ended."""
        self._started.kill()

    def signal(self, number: int) -> None:
        """Send a signal to its process group. No effect when it has ended."""
        self._started.signal(number)

    async def ended(self) -> int:
        """Wait for its end, and until what it printed has been read or is about to be; its exit code. Raises
        LeaseLostError."""
        await self._over.wait()
        self._check()
        return self._exit_code

    def close(self) -> None:
        """Kill it if it is running, and release it. Repeatable."""
        if not self._over.is_set():
            self.kill()
        self._over.set()
        self.end_input()
        for output in self._outputs:
            output.close()

    # -- ProgramEvents -----------------------------------------------------------------------------

    def on_started(self, fds: tuple[int, ...]) -> None:
        """ProgramEvents."""
        self._outputs = [ReadEnd(self._watcher, fd) for fd in fds]
        self.pid = self._started.pid
        if self._over.is_set():  # closed meanwhile
            self.kill()
            for output in self._outputs:
                output.close()
        self._begun.set()

    def on_failed(self, error: int, *, cwd: bool) -> None:
        """ProgramEvents: an ordinary end, as from a shell."""
        self._exit_code, self._failure = self._order.why_not_started(error, cwd=cwd)
        self._finish()

    def on_ended(self, exit_code: int) -> None:
        """ProgramEvents: its output can still be read."""
        self._exit_code = exit_code
        self._finish()

    def on_lost(self) -> None:
        """ProgramEvents."""
        self._lost = True
        self._finish()

    def _finish(self) -> None:
        self._over.set()
        self._begun.set()

    def _check(self) -> None:
        if self._lost:
            raise LeaseLostError("the slot was lost, and the program with it")
