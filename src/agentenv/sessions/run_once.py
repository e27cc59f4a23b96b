"""Runs a small program in the slot to its end, for a session's own needs."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from agentenv.sessions.host import Host, Program
from agentenv.sessions.reader import Reader

_MOST_BYTES = 64 * 1024
_NOTHING: Final[Mapping[str, str]] = MappingProxyType({})


class _Brief:
    def __init__(self, host: Host) -> None:
        self._host = host
        self._readers: list[Reader] = []
        self.output = b""
        self.ended: asyncio.Future[int | None] = host.loop.create_future()

    def on_started(self, fds: tuple[int, ...]) -> None:
        self._readers = [Reader(self._host, fd, self._came, terminal=False) for fd in fds]

    def on_failed(self, error: int, *, cwd: bool) -> None:  # noqa: ARG002 (ProgramEvents)
        self._end(None)

    def on_ended(self, exit_code: int) -> None:
        for reader in self._readers:
            reader.drain()
        self._end(exit_code)

    def on_lost(self) -> None:
        self._end(None)

    def _came(self, chunk: bytes) -> None:
        if len(self.output) < _MOST_BYTES:
            self.output += chunk

    def _end(self, exit_code: int | None) -> None:
        for reader in self._readers:
            reader.close()
        self._readers = []
        if not self.ended.done():
            self.ended.set_result(exit_code)


async def output_of(host: Host, *argv: str, longest_s: float, given: Mapping[str, str] = _NOTHING) -> bytes | None:
    """Its output, run with the variables ``given``; empty when it fails. None when it was killed after ``longest_s``:
    something in the slot may have stopped it, and its output is unknown."""
    brief = _Brief(host)
    started = host.start(Program(argv=argv, env=host.env, cwd=host.workspace, given=given), brief)
    try:
        done, _ = await asyncio.wait([brief.ended], timeout=longest_s)
    finally:
        if not brief.ended.done():
            started.kill()
    if not done:
        return None
    return brief.output if brief.ended.result() == 0 else b""
