"""One run in a slot, with its captured output."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

from agentenv.sandbox.limit_watch import LimitFiles, LimitWatch
from agentenv.sandbox.server.agent_link import AgentLink, memory_file
from agentenv.sandbox.server.poller import Lane
from agentenv.sandbox.server.uploads import Upload
from agentenv.sandbox.slot_env import env_of
from agentenv.sandbox.slot_paths import USUAL_PATHS, SlotPaths, as_user, is_root
from agentenv.sandbox.slotagent.protocol import PROGRAM, SCRIPT_FD, SCRIPT_PIPE, STDIN, SpawnStep, Usage, spawn_text
from agentenv.sessions.allowance import Allowance
from agentenv.sessions.head_tail import HeadTail
from agentenv.wire.base import MAX_PIECE_BYTES

_SCRIPT_PIPE, _SCRIPT_FD, _STDIN, _PROGRAM = int(SCRIPT_PIPE), int(SCRIPT_FD), int(STDIN), int(PROGRAM)
_FLOOD_BYTES_PER_S = 64 * 1024 * 1024
_FLOOD_BURST_BYTES = 4 * 1024 * 1024
"""Beyond this burst, the rate at which an output is read whose bytes are dropped: only a flood is slowed down, never
output that is kept."""


class Outcome(StrEnum):
    """Outcome of a run."""

    running = "running"
    exited = "exited"
    failed = "failed"
    """It could not be started: see ``error``."""
    lost = "lost"
    """The slot's agent is gone."""


@dataclass(frozen=True)
class SlotIo:
    """Resources shared by the runs of one slot."""

    link: AgentLink
    lane: Lane
    limits: LimitWatch = field(default_factory=lambda: LimitWatch(LimitFiles()))
    paths: SlotPaths = USUAL_PATHS


@dataclass(frozen=True)
class Command:
    """What to start, and where. If given, ``program`` is executed instead of ``argv[0]``."""

    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: str
    program: str = ""

    def spawned(self) -> tuple[bytes, int]:
        """The text of SPAWN and its flags."""
        argv = [self.program, *self.argv] if self.program else self.argv
        return spawn_text(argv, self.env, self.cwd), _PROGRAM if self.program else 0


def command_of(
    io: SlotIo,
    argv: Sequence[str],
    env: Mapping[str, str],
    cwd: str,
    program: str = "",
    *,
    user: str | None = None,
    call_env: Mapping[str, str] = MappingProxyType({}),
) -> Command:
    """The command as a user of the slot runs it: ``user``, or by default the slot's own. ``env`` is the slot's
    environment, ``call_env`` what the call adds. Raises UserUnsupportedError."""
    who = io.paths.of_user(user).user
    if user is not None:
        env = env_of(user, env)
    if call_env:
        env = {**env, **call_env}
    if is_root(who):
        return Command(argv, env, cwd, program)
    return Command(as_user(who, argv, program), env, cwd)


class OutputReader:
    """Reads one output of a run, from :meth:`watch` to :meth:`finish`, and keeps its head and tail under a cap, however
    long it is. Owns the descriptor."""

    __slots__ = ("_allowance", "_fd", "_lane", "kept")

    def __init__(self, lane: Lane, fd: int, cap_bytes: int) -> None:
        os.set_blocking(fd, False)
        self._lane = lane
        self._fd = fd
        self._allowance: Allowance | None = None
        self.kept = HeadTail(cap_bytes)

    def watch(self) -> None:
        """Start reading whenever there is data."""
        self._lane.add(self._fd, self._readable)

    def finish(self) -> None:
        """The run has ended: read the rest, which is already here, and release the descriptor."""
        while self._fd >= 0:
            if self._read() is None:
                self.close()

    def close(self) -> None:
        """Release the descriptor. Repeatable."""
        if self._fd >= 0:
            self._lane.remove(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _readable(self) -> None:
        count = self._read() or 0
        dropped = min(count, self.kept.total_bytes - self.kept.kept_bytes)
        if dropped and self._fd >= 0:
            self._throttle(dropped)

    def _read(self) -> int | None:
        """One read: number of bytes; 0 at the end (now closed); None if nothing is available now."""
        try:
            chunk = os.read(self._fd, MAX_PIECE_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            chunk = b""
        if not chunk:
            self.close()
            return 0
        self.kept.feed(chunk)
        return len(chunk)

    def _throttle(self, count: int) -> None:
        self._allowance = self._allowance or Allowance(_FLOOD_BYTES_PER_S, _FLOOD_BURST_BYTES)
        if wait_s := self._allowance.take(count, self._lane.loop.time()):
            self._lane.remove(self._fd)
            self._lane.loop.call_later(wait_s + 0.001, self._resume)

    def _resume(self) -> None:
        if self._fd >= 0:
            self.watch()


class Process:
    """One run: started, given its script, ended; then ``on_end`` is called once, never from within the method that
    started it. Without ``on_end`` the run just ends."""

    __slots__ = (
        "_cap_bytes",
        "_io",
        "_memory_files",
        "_run",
        "_script",
        "_script_fd",
        "error",
        "on_end",
        "outcome",
        "status",
        "stderr",
        "stdout",
        "step",
        "usage",
    )

    def __init__(self, io: SlotIo, cap_bytes: int, on_end: Callable[[Process], None] | None = None) -> None:
        self._io = io
        self._cap_bytes = cap_bytes
        self._run = 0
        self._script: bytes | None = None
        self._script_fd = -1
        self._memory_files: list[int] = []
        self.on_end = on_end
        self.outcome = Outcome.running
        self.error = 0
        self.step: SpawnStep | None = None
        self.status = 0
        self.usage = Usage(0.0, 0.0, 0)
        self.stdout: OutputReader | None = None
        self.stderr: OutputReader | None = None

    def start(self, command: Command, *, stdin: bytes | Upload | None = None, script: bytes | None = None) -> None:
        """Run ``command`` with this standard input (an attachment stays the caller's) and script (descriptor 9)."""
        text, flags = command.spawned()
        fds: list[int] = []
        try:
            if isinstance(stdin, Upload):
                flags |= _STDIN
                fds.append(stdin.fd)
            elif stdin is not None:
                flags |= _STDIN
                self._memory_files.append(memory_file("stdin", stdin))
                fds.append(self._memory_files[-1])
            if script is not None:
                flags |= _SCRIPT_FD
                self._memory_files.append(memory_file("script", script))
                fds.append(self._memory_files[-1])
            self._run = self._io.link.spawn(text, flags, fds, self)
        except BaseException:
            self._free_memory_files()
            raise

    def start_waiting(self, text: bytes, flags: int) -> None:
        """Start a prepared SPAWN (:meth:`Command.spawned`) that reads its script once :meth:`feed` is called."""
        self._run = self._io.link.spawn(text, flags | _SCRIPT_PIPE, (), self)

    def feed(self, script: bytes) -> bool:
        """Send a waiting run its script (small enough for an empty socket) and watch its output. False when it is
        certain that the script did not and will not run."""
        if self.outcome is not Outcome.running:
            return False
        if self.stdout is None:
            self._script = script
            return True
        return self._write_script(script)

    def dismiss(self) -> None:
        """Let a waiting run end without a script. Repeatable."""
        self._close_script()
        self.on_end = None
        self._script = b""

    def kill(self) -> None:
        """Kill the run's whole tree; ``on_end`` follows. No effect when it has ended, because its number may belong
        to another run by then."""
        if self.outcome is Outcome.running:
            self._io.link.kill(self._run)

    def on_spawned(self, fds: tuple[int, ...], input_inode: int, pid: int) -> None:  # noqa: ARG002 (RunEvents)
        """RunEvents: its output can be read."""
        self.stdout = OutputReader(self._io.lane, fds[0], self._cap_bytes)
        self.stderr = OutputReader(self._io.lane, fds[1], self._cap_bytes)
        if len(fds) == 3:
            self._script_fd = fds[2]
            os.set_blocking(self._script_fd, False)
            if self._script is None:
                return
            script, self._script = self._script, None
            self._write_script(script)
        else:
            self._watch()

    def on_spawn_failed(self, error: int, step: SpawnStep) -> None:
        """RunEvents: there is no run."""
        self.error = error
        self.step = step
        self._end(Outcome.failed)

    @property
    def usual_directory(self) -> str:
        """Where runs of its slot start if their calls name no other directory."""
        return self._io.paths.start

    def refused_from_above(self) -> str:
        """Why a run could not be started, if the cause is outside the slot."""
        return self._io.limits.refused(self.error) if self.step is SpawnStep.RESOURCES else ""

    def on_exit(self, status: int, usage: Usage) -> None:
        """RunEvents: what can be read at this moment is the whole output."""
        self.status = status
        self.usage = usage
        for pipe in (self.stdout, self.stderr):
            if pipe is not None:
                pipe.finish()
        self._end(Outcome.exited)

    def on_lost(self) -> None:
        """RunEvents: the agent is gone."""
        for pipe in (self.stdout, self.stderr):
            if pipe is not None:
                pipe.close()
        self._end(Outcome.lost)

    def _end(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self._io.lane.not_later(self)
        if self._script_fd >= 0:
            self._close_script()
        if self._memory_files:
            self._free_memory_files()
        if self.on_end is not None:
            on_end, self.on_end = self.on_end, None
            on_end(self)

    def _write_script(self, script: bytes) -> bool:
        self._watch()
        try:
            # An empty socket takes all of it: a spare's scripts are short.
            written = os.write(self._script_fd, script) if script else 0
        except OSError:
            written = -1
        self._close_script()
        return written == len(script)

    def _watch(self) -> None:
        # Later, because most runs have ended by then, with less output than a socket holds: watching it at once would
        # wake the server when it is closed, for nothing.
        self._io.lane.later(self, self._watch_pipes)

    def _watch_pipes(self) -> None:
        if self.stdout is not None and self.stderr is not None:
            self.stdout.watch()
            self.stderr.watch()

    def _close_script(self) -> None:
        if self._script_fd >= 0:
            os.close(self._script_fd)
            self._script_fd = -1

    def _free_memory_files(self) -> None:
        for fd in self._memory_files:
            os.close(fd)
        self._memory_files.clear()
