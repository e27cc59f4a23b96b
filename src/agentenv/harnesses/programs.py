"""A program of a harness: it runs beside the others of its slot, since calls of a slot wait for each other, and
harnesses run agents in sandboxes that they work in meanwhile."""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Literal

from agentenv import AsyncSandbox
from agentenv.containers.byte_stream import ByteStream
from agentenv.containers.programs import StreamedProgram
from agentenv.errors import ConnectionLostError

_PIECE_BYTES: Final = 256 * 1024
_LONGEST_ARGUMENT_BYTES: Final = 120 * 1024
"""Linux takes 128 KiB."""
_FROM_STDIN: Final = 'IFS= read -r -d "" command; eval "$command"'
_CONTINUED: Final = bytes(range(0x80, 0xC0))
"""Bytes of a character of UTF-8 that are not its first."""

OnText = Callable[[str, Literal["stdout", "stderr"]], Awaitable[None]]


@dataclass(frozen=True)
class Ended:
    """A program that has ended, by itself or at its time limit."""

    exit_code: int
    stdout: Kept
    stderr: Kept
    timed_out: bool


class Kept:
    """An output, which is read to its end: what prints too much goes on as it would elsewhere. Of more than ``first``
    and ``last`` bytes its beginning and its end are kept."""

    def __init__(self, *, first_bytes: int = 0, last_bytes: int) -> None:
        self.dropped_bytes = 0
        """Between beginning and end."""
        self._first_bytes, self._last_bytes = first_bytes, last_bytes
        self._first, self._last = bytearray(), bytearray()

    @property
    def text(self) -> str:
        """UTF-8; invalid bytes are U+FFFD. A line in between says how much was left out."""
        if not self.dropped_bytes:
            return (self._first + self._last).decode("utf-8", "replace")
        first = codecs.getincrementaldecoder("utf-8")("replace").decode(self._first)
        last = (self._last[:4].lstrip(_CONTINUED) + self._last[4:]).decode("utf-8", "replace")
        return f"{first}{first and chr(10)}[... {self.dropped_bytes} bytes left out ...]\n{last}"

    def add(self, data: bytes) -> None:
        """The next piece."""
        room = self._first_bytes - len(self._first)
        self._first += data[:room]
        self._last += data[room:]
        if (more := len(self._last) - self._last_bytes) > 0:
            self.dropped_bytes += more
            del self._last[:more]


async def run(
    box: AsyncSandbox,
    command: str | Sequence[str],
    *,
    stdin: str | bytes | None = None,
    cwd: str | None = None,
    env: Mapping[str, str] | None = None,
    user: str | None = None,
    timeout_s: float | None = None,
    first_bytes: int = 0,
    last_bytes: int,
    on_text: OnText | None = None,
) -> Ended:
    """Run bash text of any length, or a program and its arguments, until it ends; what it leaves in the background goes
    on. ``timeout_s`` None: no limit of time. ``first_bytes`` and ``last_bytes`` of each output are kept; ``on_text``
    gets all of it as it comes. Raises InvalidArgumentsError, UserUnsupportedError, InfraError, SlotDestroyedError, and
    what ``on_text`` raises, which ends the program."""
    if isinstance(command, str) and stdin is None and len(_bytes(command)) > _LONGEST_ARGUMENT_BYTES:
        command, stdin = _FROM_STDIN, _bytes(command)
    stdout = Kept(first_bytes=first_bytes, last_bytes=last_bytes)
    stderr = Kept(first_bytes=first_bytes, last_bytes=last_bytes)
    try:
        program = await box.start(command, cwd=cwd, env=env, user=user, output="stream", timeout_s=timeout_s)
    except TimeoutError as error:  # not the program's
        raise ConnectionLostError("a program was not started in time") from error
    async with program:
        ending = asyncio.ensure_future(program.wait())
        tasks: list[asyncio.Future[Any]] = [
            ending,
            asyncio.ensure_future(_feed(program, stdin)),
            asyncio.ensure_future(_take(program.stdout, "stdout", stdout, on_text)),
            asyncio.ensure_future(_take(program.stderr, "stderr", stderr, on_text)),
        ]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return Ended(ending.result(), stdout, stderr, program.timed_out)


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogateescape")


async def _feed(program: StreamedProgram, data: str | bytes | None) -> None:
    """What a program reads; one that reads less of it than there is has ended, or will."""
    with suppress(BrokenPipeError):
        if data:
            await program.write(data)
        await program.close_stdin()


async def _take(stream: ByteStream, name: Literal["stdout", "stderr"], kept: Kept, on_text: OnText | None) -> None:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    data = b"-"
    while data:
        data = await stream.read(_PIECE_BYTES)
        kept.add(data)
        if on_text is not None and (text := decoder.decode(data, final=not data)):
            await on_text(text, name)
