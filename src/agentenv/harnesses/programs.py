"""A program of a harness: it runs beside the others of its slot, since calls of a slot wait for each other, and
harnesses run agents in sandboxes that they work in meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from agentenv import AsyncSandbox
from agentenv.containers.byte_stream import ByteStream
from agentenv.containers.programs import StreamedProgram
from agentenv.errors import ConnectionLostError

_PIECE_BYTES: Final = 1024 * 1024


@dataclass(frozen=True)
class Ended:
    """A program that has ended, by itself or at its time limit."""

    exit_code: int
    stdout: Tail
    stderr: Tail
    timed_out: bool


class Tail:
    """The last bytes of an output, which is read to its end: what prints too much goes on as it would elsewhere."""

    def __init__(self, limit_bytes: int) -> None:
        self.cut: bool = False
        """Whether there was more."""
        self._limit_bytes = limit_bytes
        self._kept = bytearray()

    @property
    def text(self) -> str:
        """UTF-8; invalid bytes are U+FFFD."""
        return self._kept.decode("utf-8", "replace")

    async def take(self, stream: ByteStream) -> None:
        """Read the stream to its end. Raises InfraError, SlotDestroyedError."""
        while piece := await stream.read(_PIECE_BYTES):
            self._kept += piece
            if (more := len(self._kept) - self._limit_bytes) > 0:
                self.cut = True
                del self._kept[:more]


async def run(
    box: AsyncSandbox,
    command: str | Sequence[str],
    *,
    stdin: str | bytes | None = None,
    cwd: str | None = None,
    env: Mapping[str, str] | None = None,
    user: str | None = None,
    timeout_s: float | None = None,
    limit_bytes: int,
) -> Ended:
    """Run bash text, or a program and its arguments; ``limit_bytes`` of each output are kept, the last ones.
    ``timeout_s`` None: no limit of time. Raises InvalidArgumentsError, UserUnsupportedError, InfraError,
    SlotDestroyedError."""
    stdout, stderr = Tail(limit_bytes), Tail(limit_bytes)
    try:
        program = await box.start(command, cwd=cwd, env=env, user=user, output="stream", timeout_s=timeout_s)
    except TimeoutError as error:  # not the program's
        raise ConnectionLostError("a program was not started in time") from error
    async with program:
        work = [_feed(program, stdin), stdout.take(program.stdout), stderr.take(program.stderr)]
        ending = asyncio.ensure_future(program.wait())
        tasks: list[asyncio.Future[Any]] = [ending, *(asyncio.ensure_future(each) for each in work)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return Ended(ending.result(), stdout, stderr, program.timed_out)


async def _feed(program: StreamedProgram, data: str | bytes | None) -> None:
    """What a program reads; one that reads less of it than there is has ended, or will."""
    with contextlib.suppress(BrokenPipeError):
        if data:
            await program.write(data)
        await program.close_stdin()
