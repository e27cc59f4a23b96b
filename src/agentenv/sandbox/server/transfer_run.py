"""A run of slotfiles whose input or output is streamed through the server."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Mapping, Sequence

from agentenv.errors import LeaseLostError
from agentenv.sandbox.server.process import Command, SlotIo
from agentenv.sandbox.slotagent.protocol import STDIN, SpawnStep, Usage
from agentenv.sessions.ends import ReadEnd, Watcher, WriteEnd
from agentenv.wire.base import MAX_PIECE_BYTES


class TransferRun:
    """From :meth:`start` to :meth:`close`, which kills what is still running. Not queued: it runs concurrently with
    the slot's calls."""

    def __init__(self, io: SlotIo) -> None:
        self._io = io
        self._run = 0
        self._stdin: WriteEnd | None = None
        self._stdout: ReadEnd | None = None
        self._lost = False
        self._begun = asyncio.Event()
        self._over = asyncio.Event()
        self.exit_code = 0
        """Set once it is over, as in a shell; an errno when it could not be started."""

    def start(self, argv: Sequence[str], env: Mapping[str, str], *, feeds: bool, keep_free: int = 0) -> None:
        """Start it; ``feeds``: it will be written to; ``keep_free``: how many descriptors the slot must have left then.
        Raises TooManyRunsError."""
        text, flags = Command(argv, env, self._io.paths.start).spawned()
        if not feeds:
            self._run = self._io.link.spawn(text, flags, (), self)
            return
        ours, theirs = socket.socketpair()
        with theirs:
            self._stdin = WriteEnd(self._io.lane.loop, ours.detach())
            try:
                self._run = self._io.link.spawn(text, flags | int(STDIN), (theirs.fileno(),), self, keep_free=keep_free)
            except BaseException:
                self.end_input()
                raise

    async def write(self, data: bytes) -> bool:
        """Write all of ``data``. False when it no longer reads (it has failed)."""
        return self._stdin is not None and await self._stdin.write(data)

    def end_input(self) -> None:
        """Close its input. Repeatable."""
        if self._stdin is not None:
            self._stdin.close()

    async def read(self) -> bytes:
        """Its next output; empty at the end. Raises LeaseLostError when the slot was lost."""
        await self._begun.wait()
        piece = b"" if self._stdout is None else await self._stdout.read(MAX_PIECE_BYTES)
        if not piece:
            self._check()
        return piece

    async def ended(self) -> int:
        """Wait for its end; returns its exit code. Raises LeaseLostError when the slot was lost."""
        await self._over.wait()
        self._check()
        return self.exit_code

    def kill(self) -> None:
        """Kill it now. No effect when it has ended."""
        self._io.link.kill(self._run)

    def close(self) -> None:
        """Kill it if it is running, and release it. Repeatable."""
        self.end_input()
        if not self._over.is_set():
            self.kill()
        if self._stdout is not None:
            self._stdout.close()
        self._finish()

    # -- RunEvents ---------------------------------------------------------------------------------

    def on_spawned(self, fds: tuple[int, ...], input_inode: int, pid: int) -> None:  # noqa: ARG002 (RunEvents)
        """RunEvents: its output can be read."""
        stdout, stderr = fds
        os.close(stderr)  # its exit code is enough
        if self._over.is_set():  # closed before it began
            os.close(stdout)
            self._io.link.kill(self._run)
            return
        lane = self._io.lane
        self._stdout = ReadEnd(Watcher(lane.loop, lane.add, lane.remove), stdout)
        self._begun.set()

    def on_spawn_failed(self, error: int, step: SpawnStep) -> None:  # noqa: ARG002 (RunEvents)
        """RunEvents: it could not be started."""
        self.exit_code = error
        self._finish()

    def on_exit(self, status: int, usage: Usage) -> None:  # noqa: ARG002 (RunEvents)
        """RunEvents: its output can still be read."""
        code = os.waitstatus_to_exitcode(status)
        self.exit_code = code if code >= 0 else 128 - code
        self._finish()

    def on_lost(self) -> None:
        """RunEvents: nothing more will be known."""
        self._lost = True
        self._finish()

    # ----------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        self._over.set()
        self._begun.set()

    def _check(self) -> None:
        if self._lost:
            raise LeaseLostError("the slot was lost while it was sent to or from")
