"""Programs in a slot: the result of one that has ended, and a handle for one that runs."""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Protocol

from agentenv.containers.live_output import kept_of
from agentenv.deadlines import CALL_TIMEOUT_S
from agentenv.errors import SessionBusyError
from agentenv.wire.base import MAX_MESSAGE_BYTES
from agentenv.wire.calls import CallResult
from agentenv.wire.sessions import ProcessReply, ProcessState, Signal

_READ_BYTES: Final = 200_000
_WAIT_S: Final = 240.0
"""The longest wait of one call; a longer one is made of several."""
_POLL_S: Final = 0.05
_SHOWN_CHARS: Final = 1000
_MAX_SENT_BYTES: Final = MAX_MESSAGE_BYTES - 512 * 1024
"""Of arguments and variables as JSON; the rest of a message is for what goes with them."""
_MOST_UNASKED_CHARS: Final = _MAX_SENT_BYTES // 8
"""So many are below that limit whatever JSON makes of them, with the quotes around each."""
_TOO_LONG: Final = {"_": " " * (128 * 1024)}
"""A variable that Linux gives no program (MAX_ARG_STRLEN of its binfmts.h)."""


def sendable(argv: Sequence[str], env: Mapping[str, str] | None) -> tuple[Sequence[str], Mapping[str, str] | None]:
    """The arguments and variables to be sent for these. What is more than a message holds is more than Linux takes, so
    that less of it fails alike in the slot: with 126, or 127 when there is no such program."""
    words = [*argv, *(f"{name}={text}" for name, text in (env or {}).items())]
    if sum(map(len, words)) + 6 * len(words) <= _MOST_UNASKED_CHARS:
        return argv, env
    sent = json.dumps(words, ensure_ascii=False)  # whatever it is: what is no text is refused where it is sent
    return (argv, env) if len(sent.encode("utf-8", "surrogatepass")) <= _MAX_SENT_BYTES else (argv[:1], _TOO_LONG)


def shown(argv: Sequence[str]) -> str:
    """What is shown of a program and its arguments where a command is: bash text, cut where it is long."""
    text = shlex.join(argv[:_SHOWN_CHARS])
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"


@dataclass(frozen=True)
class ExecResult:
    """A program that ended, or was killed at its timeout. ``exit_code`` is 128 + n when signal n ended it, 126 when it
    could not be executed, 127 when it is not there. ``*_dropped_bytes`` are missing from the middle."""

    exit_code: int
    stdout_bytes: bytes
    stderr_bytes: bytes
    timed_out: bool = False
    oom_killed: bool = False
    stdout_dropped_bytes: int = 0
    stderr_dropped_bytes: int = 0
    duration_s: float = 0.0

    @cached_property
    def stdout(self) -> str:
        """Its text: UTF-8; invalid bytes are U+FFFD."""
        return self.stdout_bytes.decode("utf-8", "replace")

    @cached_property
    def stderr(self) -> str:
        """Its errors as text, as ``stdout`` is."""
        return self.stderr_bytes.decode("utf-8", "replace")

    @property
    def truncated(self) -> bool:
        """Whether bytes are missing from the middle of its output or its errors."""
        return bool(self.stdout_dropped_bytes or self.stderr_dropped_bytes)

    @property
    def success(self) -> bool:
        """Whether it ended in time with exit code 0."""
        return not (self.exit_code or self.timed_out)


async def exec_result(result: CallResult) -> ExecResult:
    """The result of a call of ``bash`` with ``binary``."""
    stdout, stderr = await kept_of(result)
    return ExecResult(
        exit_code=-1 if result.exit_code is None else result.exit_code,
        stdout_bytes=stdout.head + stdout.tail,
        stderr_bytes=stderr.head + stderr.tail,
        timed_out=result.timed_out,
        oom_killed=result.oom_killed,
        stdout_dropped_bytes=result.stdout_dropped_bytes,
        stderr_dropped_bytes=result.stderr_dropped_bytes,
        duration_s=result.duration_s,
    )


class Caller(Protocol):
    """Calls tools of a slot; a wrong call raises."""

    async def call_tool(self, tool: str, arguments: dict[str, Any], *, timeout_s: float | None = None) -> CallResult:
        """See :class:`agentenv.sdk.slot_tools.SlotTools`."""


class SlotProcess:
    """A program that runs in the background of a slot, until it ends, is killed, or the slot is wiped or sealed.

    Its two outputs are one stream here, of which the slot keeps the last 200 kB: read it as it comes, or what is older
    is discarded (``dropped_bytes`` counts it). Every method raises UnknownSessionError when the slot forgot it."""

    def __init__(self, caller: Caller, name: str) -> None:
        self.name: str = name
        """Its id in the slot, as the ``process`` tool has it."""
        self.exit_code: int | None = None
        """Once it is known to have ended; 128 + n when signal n ended it."""
        self.dropped_bytes: int = 0
        """Bytes of its output that were discarded before they were read."""
        self._caller = caller
        self._offset = 0

    def __repr__(self) -> str:
        return f"<SlotProcess {self.name} {'running' if self.exit_code is None else f'exited {self.exit_code}'}>"

    async def read(self) -> bytes:
        """The output since the last read; empty if there is none now."""
        reply = await self._call("log", offset=self._offset, limit=_READ_BYTES, binary=True)
        self.dropped_bytes += max(0, reply.offset - self._offset)
        self._offset = reply.next_offset
        return reply.data or b""

    async def output(self) -> AsyncIterator[bytes]:
        """The output as it comes, until the program has ended and everything was read."""
        while True:
            ended = self.exit_code is not None
            if piece := await self.read():
                yield piece
            elif ended:
                return
            else:
                await asyncio.sleep(_POLL_S)

    async def write(self, data: bytes | str, *, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """Write to its standard input, as fast as it reads. Raises SessionBusyError when it does not take all of it in
        time, InvalidArgumentsError when its input is closed."""
        rest = data.encode() if isinstance(data, str) else data
        loop = asyncio.get_running_loop()
        until_s = loop.time() + timeout_s
        while rest:
            reply = await self._call("write", input_data=rest[:_READ_BYTES])
            rest = rest[reply.written_bytes :]
            if rest and loop.time() > until_s:
                raise SessionBusyError(f"{self.name} left {len(rest)} bytes of input unread for {timeout_s:g} s")

    async def close_input(self) -> None:
        """Close its standard input: it reads end of file."""
        await self._call("close")

    async def wait(self, timeout_s: float | None = None) -> int:
        """Wait for its end; its exit code. Raises TimeoutError when it still runs after ``timeout_s``."""
        loop = asyncio.get_running_loop()
        until_s = None if timeout_s is None else loop.time() + timeout_s
        while self.exit_code is None:
            left_s = _WAIT_S if until_s is None else min(_WAIT_S, until_s - loop.time())
            if left_s <= 0:
                raise TimeoutError(f"{self.name} still runs after {timeout_s:g} s")
            await self._call("wait", timeout_s=left_s, limit=1)
        return self.exit_code

    async def kill(self, signal: Signal = "KILL") -> None:
        """KILL ends it and everything it started; another signal goes to its process group, which may handle it. No
        effect when it has ended."""
        if self.exit_code is None:
            await self._call("kill", signal=signal, limit=1)

    async def state(self) -> ProcessState:
        """Its state now."""
        reply = await self._call("log", offset=self._offset, limit=1)
        assert reply.process is not None  # every reply about one process has its state
        return reply.process

    async def _call(self, action: str, **given: Any) -> ProcessReply:
        limit_s = None if action != "wait" else given["timeout_s"] + _WAIT_S
        arguments = {"action": action, "process": self.name, **given}
        result = await self._caller.call_tool("process", arguments, timeout_s=limit_s)
        reply = ProcessReply.model_validate(result.content)
        if reply.process is not None and reply.process.state == "exited":
            self.exit_code = reply.process.exit_code
        return reply
