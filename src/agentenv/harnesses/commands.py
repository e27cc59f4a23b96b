"""A command of a harness: it runs beside the others of its slot, and its output is shown as it comes and returned."""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from agentenv import AsyncSandbox

MAX_OUTPUT_BYTES: Final = 64 * 2**20
"""Of each output, about so much is returned: of more, its beginning and its end."""
_READ_BYTES: Final = 64 * 1024
_LONGEST_ARGUMENT_BYTES: Final = 120 * 1024
"""Linux takes 128 KiB."""
_FROM_STDIN: Final = 'IFS= read -r -d "" command; eval "$command"'

OnText = Callable[[str, Literal["stdout", "stderr"]], Awaitable[None]]


class _Readable(Protocol):
    async def read(self, n: int = -1, /) -> bytes: ...


@dataclass(frozen=True)
class Ran:
    """How a command ended."""

    exit_code: int
    stdout: str
    stderr: str
    timed_out: bool


class Kept:
    """The text of one output: all of it, or of more than ``most`` characters the beginning and the end, with a line in
    between."""

    def __init__(self, most: int = MAX_OUTPUT_BYTES) -> None:
        self._most = most // 2
        self._first: list[str] = []
        self._first_chars = 0
        self._last: list[str] = []
        self._last_chars = 0
        self._dropped_chars = 0

    def add(self, text: str) -> None:
        """The next piece."""
        room = self._most - self._first_chars
        if room > 0:
            self._first.append(text[:room])
            self._first_chars += len(self._first[-1])
            text = text[room:]
        self._last.append(text)
        self._last_chars += len(text)
        if self._last_chars > 2 * self._most:  # not for each piece
            self._shorten()

    def text(self) -> str:
        """All of it."""
        self._shorten()
        gap = f"\n[... {self._dropped_chars} characters left out ...]\n" if self._dropped_chars else ""
        return "".join((*self._first, gap, *self._last))

    def _shorten(self) -> None:
        kept = "".join(self._last)
        over = max(0, len(kept) - self._most)
        self._last, self._last_chars = [kept[over:]], len(kept) - over
        self._dropped_chars += over


async def run_command(
    slot: AsyncSandbox,
    command: str,
    *,
    cwd: str | None = None,
    env: Mapping[str, str] | None = None,
    user: str | None = None,
    timeout_s: float | None = None,
    on_text: OnText | None = None,
) -> Ran:
    """Run bash text with nothing to read, until it ends or for ``timeout_s``; what it leaves in the background goes on.
    Raises InvalidArgumentsError, InfraError, and what ``on_text`` raises, which ends the command."""
    long = len(command.encode(errors="surrogateescape")) > _LONGEST_ARGUMENT_BYTES
    started = await slot.start(
        _FROM_STDIN if long else command, cwd=cwd, env=env, user=user, output="stream", timeout_s=timeout_s
    )
    async with started as program:
        reading = [
            asyncio.create_task(_text_of(program.stdout, "stdout", on_text)),
            asyncio.create_task(_text_of(program.stderr, "stderr", on_text)),
        ]
        try:
            with suppress(BrokenPipeError):  # it has ended already: with 126, for instance
                if long:
                    await program.write(command)
                await program.close_stdin()
            stdout, stderr = await asyncio.gather(*reading)
            return Ran(await program.wait(), stdout, stderr, program.timed_out)
        finally:
            for task in reading:
                task.cancel()
            await asyncio.gather(*reading, return_exceptions=True)


async def _text_of(stream: _Readable, name: Literal["stdout", "stderr"], on_text: OnText | None) -> str:
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    kept = Kept()
    data = b"-"
    while data:
        data = await stream.read(_READ_BYTES)
        text = decoder.decode(data, final=not data)
        kept.add(text)
        if on_text is not None and text:
            await on_text(text, name)
    return kept.text()
