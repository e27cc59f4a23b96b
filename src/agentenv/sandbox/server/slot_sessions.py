"""A slot's sessions, over its agent: terminals, processes, tmux."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import socket
import struct
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from typing import assert_never

from agentenv.deadlines import scaled
from agentenv.errors import UnknownSessionError
from agentenv.sandbox.descriptors import KEPT_FOR_CALLS
from agentenv.sandbox.server.agent_link import memory_file
from agentenv.sandbox.server.process import SlotIo, command_of
from agentenv.sandbox.slot_paths import bundled_tmux
from agentenv.sandbox.slotagent.protocol import ANSWERS, SCRIPT_FD, STDIN, TERMINAL, SpawnStep, Usage
from agentenv.sessions.answers import SessionAnswer
from agentenv.sessions.host import Host, Program, ProgramEvents, set_size
from agentenv.sessions.process_calls import ProcessCalls
from agentenv.sessions.terminal_calls import TerminalCalls
from agentenv.sessions.tmux_calls import TmuxCalls
from agentenv.sessions.unread import Unread
from agentenv.wire.sessions import ProcessArguments, TerminalArguments, TmuxArguments

SessionArguments = TerminalArguments | ProcessArguments | TmuxArguments

_ANSWERS, _SCRIPT_FD, _STDIN, _TERMINAL = int(ANSWERS), int(SCRIPT_FD), int(STDIN), int(TERMINAL)


class SlotHost:
    """One slot's agent as a host for sessions."""

    def __init__(self, io: SlotIo, env: Mapping[str, str]) -> None:
        self._io = io
        self.env = env
        self.workspace = io.paths.start
        self.tmux_socket = io.paths.tmux_socket
        self.directory = io.paths.directory
        self.tmux: Sequence[str]
        self.tmux_env: Mapping[str, str]
        self.tmux, self.tmux_env = bundled_tmux(io.paths.tmux) if io.paths.tmux else (("tmux",), {})

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """Host."""
        return self._io.lane.loop

    def start(self, program: Program, events: ProgramEvents) -> SlotProgram:
        """Host. Raises ValueError when too much runs; UserUnsupportedError."""
        text, flags = command_of(
            self._io, program.argv, program.env, program.cwd, user=program.user, call_env=program.given
        ).spawned()
        started = SlotProgram(self._io, program, events)
        flags |= _TERMINAL if program.terminal else 0
        fds, script = [], -1
        if program.stdin is not None:
            flags |= _STDIN
            fds.append(program.stdin)
        if program.script is not None:
            flags |= _SCRIPT_FD
            script = memory_file("script", program.script)
            fds.append(script)
        elif program.answers is not None:
            flags |= _ANSWERS
            fds.append(program.answers)
        try:
            started.run = self._io.link.spawn(text, flags, fds, started, keep_free=KEPT_FOR_CALLS)
        finally:
            if script >= 0:
                os.close(script)
        return started

    def take_above(self) -> str:
        """See :meth:`agentenv.sandbox.limit_watch.LimitWatch.take_above`."""
        return self._io.limits.take_above()

    def killed_by_own_limit(self) -> bool:
        """See :meth:`agentenv.sandbox.limit_watch.LimitWatch.killed_by_own_limit`."""
        return self._io.limits.killed_by_own_limit()

    def input(self) -> tuple[int, int]:
        """Host: a socket that the agent turns into a pipe for the program."""
        return _socket_pair()

    def answers(self) -> tuple[int, int]:
        """Host."""
        return _socket_pair()

    def unread_bytes(self, ours: int) -> int:
        """Host: an upper bound that is exact at zero; data taken by the agent is in the program's pipe."""
        unread: int = struct.unpack("i", fcntl.ioctl(ours, termios.TIOCOUTQ, bytes(4)))[0]
        return unread

    def watch(self, fd: int, callback: Callable[[], None]) -> None:
        """Host."""
        self._io.lane.add(fd, callback)

    def unwatch(self, fd: int) -> None:
        """Host."""
        self._io.lane.remove(fd)

    def orphan(self, fd: int) -> None:
        """Host: the agent takes over the output from now on."""
        os.close(fd)


def _socket_pair() -> tuple[int, int]:
    ours, theirs = socket.socketpair()
    return ours.detach(), theirs.detach()


class SlotProgram:
    """One run of the agent (RunEvents) as a program of a session."""

    def __init__(self, io: SlotIo, program: Program, events: ProgramEvents) -> None:
        self._link = io.link
        self._limits = io.limits
        self._size = program.terminal
        self._events: ProgramEvents | None = events
        self.input_inode = 0
        """Started."""
        self.pid = 0
        """Started."""
        self.run = 0
        """Its number while it is running. Numbers are reused: it must not be used after the end."""

    def kill(self) -> None:
        """Started."""
        if self.run:
            self._link.kill(self.run)

    def signal(self, number: int, began_s: float | None = None) -> None:
        """Started."""
        if not self.run:
            return
        if began_s is not None:
            # Processes report their start by another clock than the loop's; reading it first errs on the early side.
            began_s += time.clock_gettime(time.CLOCK_BOOTTIME) - asyncio.get_running_loop().time()
        self._link.signal(self.run, number, began_s)

    def on_spawned(self, fds: tuple[int, ...], input_inode: int, pid: int) -> None:
        """RunEvents."""
        assert self._events is not None
        self.pid = pid
        self.input_inode = input_inode
        if self._size is not None:
            set_size(fds[0], *self._size)
        self._events.on_started(fds)

    def on_spawn_failed(self, error: int, step: SpawnStep) -> None:
        """RunEvents."""
        if step is SpawnStep.RESOURCES:
            self._limits.above = self._limits.refused(error) or self._limits.above
        self._over().on_failed(error, cwd=step is SpawnStep.CWD)

    def on_exit(self, status: int, usage: Usage) -> None:  # noqa: ARG002 (RunEvents)
        """RunEvents."""
        code = os.waitstatus_to_exitcode(status)
        self._over().on_ended(code if code >= 0 else 128 - code)

    def on_lost(self) -> None:
        """RunEvents."""
        self._over().on_lost()

    def _over(self) -> ProgramEvents:
        """Nothing more will happen: forget the run and its listener."""
        events, self._events, self.run = self._events, None, 0
        assert events is not None
        return events


LATE_S = scaled(30.0)
"""A call without a result this long after its deadline is ended: longer than any wait for programs of the slot,
slow or stopped."""

log = logging.getLogger(__name__)


class SlotSessions:
    """All sessions of one slot, from its hand-over to :meth:`close`. Calls on them run concurrently and do not wait for
    each other."""

    def __init__(self, host: Host, cap_bytes: int) -> None:
        unread = Unread()
        self._processes = ProcessCalls(host, unread)
        self._terminals = TerminalCalls(host, cap_bytes, self._processes, unread)
        self._tmux = TmuxCalls(host, unread)

    async def call(self, arguments: SessionArguments, deadline_s: float) -> SessionAnswer:
        """Run one call, answered by ``deadline_s`` (the loop's clock), or soon after when programs in the slot are
        slow. Raises ToolCallError (also without an answer :data:`LATE_S` after the deadline), LeaseLostError."""
        try:
            async with asyncio.timeout_at(deadline_s + LATE_S):
                return await self._answer(arguments, deadline_s)
        except TimeoutError as error:
            log.warning("a call had no answer %g s after its deadline: %s", LATE_S, type(arguments).__name__)
            raise UnknownSessionError(
                "the session does not respond",
                next_step="end whatever stops or slows down the other processes, then start the session again",
            ) from error

    async def _answer(self, arguments: SessionArguments, deadline_s: float) -> SessionAnswer:
        match arguments:
            case TerminalArguments():
                return await self._terminals.call(arguments, deadline_s)
            case ProcessArguments():
                return await self._processes.call(arguments, deadline_s)
            case TmuxArguments():
                return await self._tmux.call(arguments, deadline_s)
            case _:
                assert_never(arguments)

    def close(self) -> None:
        """Release everything: the slot ends what runs in it. Repeatable."""
        self._terminals.close()
        self._tmux.close()
        self._processes.close()
