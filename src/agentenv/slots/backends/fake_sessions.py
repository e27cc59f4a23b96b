"""Starts the programs of sessions for the fake backend: ordinary child processes, isolated from nothing."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import pty
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from agentenv.sessions.host import Program, ProgramEvents, set_size
from agentenv.sessions.slot_sessions import SlotSessions

_REAP_S = 10.0
_SCRIPT = "/dev/fd/9"
_FORKED_NO_EXEC = 0x40
"""PF_FORKNOEXEC, of the flags in /proc/PID/stat."""
_ANSWERS_FD = 9


class FakeHost:
    """One fake slot as sessions see it (:class:`agentenv.sessions.host.Host`)."""

    def __init__(self, workspace: Path, env: Mapping[str, str]) -> None:
        self.loop = asyncio.get_running_loop()
        self.env = env
        self.workspace = str(workspace)
        self.tmux_socket = f"{workspace}.tmux"
        self._programs: set[FakeProgram] = set()
        self._orphans: dict[int, None] = {}

    def start(self, program: Program, events: ProgramEvents) -> FakeProgram:
        """Host."""
        started = FakeProgram(self, program, events)
        self._programs.add(started)
        return started

    def input(self) -> tuple[int, int]:
        """Host: a pipe."""
        theirs, ours = os.pipe()
        return ours, theirs

    def answers(self) -> tuple[int, int]:
        """Host."""
        return os.pipe()

    def unread_bytes(self, ours: int) -> int:
        """Host."""
        unread: int = struct.unpack("i", fcntl.ioctl(ours, termios.FIONREAD, bytes(4)))[0]
        return unread

    def watch(self, fd: int, callback: Callable[[], None]) -> None:
        """Host."""
        self.loop.add_reader(fd, callback)

    def unwatch(self, fd: int) -> None:
        """Host."""
        self.loop.remove_reader(fd)

    def orphan(self, fd: int) -> None:
        """Host."""
        self._orphans[fd] = None
        self.loop.add_reader(fd, self._drain, fd)

    def ended(self, program: FakeProgram) -> None:
        """Its process has been reaped."""
        self._programs.discard(program)

    def close(self) -> None:
        """Kill and reap everything. Repeatable."""
        for program in tuple(self._programs):
            program.lose()
        for fd in tuple(self._orphans):
            self._close_orphan(fd)

    def _drain(self, fd: int) -> None:
        with contextlib.suppress(BlockingIOError):
            if not os.read(fd, 65_536):
                self._close_orphan(fd)

    def _close_orphan(self, fd: int) -> None:
        del self._orphans[fd]
        self.loop.remove_reader(fd)
        os.close(fd)


class FakeSessions(SlotSessions):
    """The sessions of one fake slot, and what runs in them."""

    def __init__(self, workspace: Path, env: Mapping[str, str], cap_bytes: int) -> None:
        self._host = FakeHost(workspace, env)
        super().__init__(self._host, cap_bytes)

    def close(self) -> None:
        """Kill everything, and let go of it. Repeatable."""
        super().close()
        self._host.close()


class FakeProgram:
    """One child process, reaped when it ends."""

    def __init__(self, host: FakeHost, program: Program, events: ProgramEvents) -> None:
        self._host = host
        self._events: ProgramEvents | None = events
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self.input_inode = 0 if program.stdin is None else os.fstat(program.stdin).st_ino
        """Started."""
        ours, theirs = _terminal(program.terminal) if program.terminal else _pipes()
        try:
            self._process = _spawned(program, theirs)
        except OSError as error:
            for fd in ours:
                os.close(fd)
            host.loop.call_soon(self._failed, error.errno or 1, error.filename == program.cwd)
            return
        finally:
            for fd in theirs:
                os.close(fd)
        self._pidfd = os.pidfd_open(self._process.pid)
        host.loop.call_soon(self._begin, ours)

    def kill(self) -> None:
        """Started."""
        if self._process is not None and self._process.returncode is None:
            for pid in _session(self._process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def signal(self, number: int, began_s: float | None = None) -> None:
        """Started."""
        if self._process is None or self._process.returncode is not None:
            return
        leader = self._process.pid
        with contextlib.suppress(ProcessLookupError):
            if began_s is None:
                os.killpg(leader, number)
                return
            began_s += time.clock_gettime(time.CLOCK_BOOTTIME) - self._host.loop.time()
            os.killpg(leader, signal.SIGSTOP)  # a shell whose command came or went meanwhile would go on
            for pid in _foreground(leader, began_s):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            os.killpg(leader, signal.SIGCONT)

    def lose(self) -> None:
        """The slot ends: kill it now, and tell nobody how it ended."""
        self.kill()
        if self._process is not None:
            self._process.wait(_REAP_S)
        self._finish()
        if (events := self._over()) is not None:
            events.on_lost()

    def _failed(self, error: int, in_cwd: bool) -> None:
        self._host.ended(self)
        if (events := self._over()) is not None:
            events.on_failed(error, cwd=in_cwd)

    def _begin(self, ours: tuple[int, ...]) -> None:
        if self._pidfd < 0 or self._events is None:  # lost meanwhile
            for fd in ours:
                os.close(fd)
            return
        self._events.on_started(ours)
        self._host.loop.add_reader(self._pidfd, self._exited)

    def _exited(self) -> None:
        assert self._process is not None
        code = self._process.wait(_REAP_S)
        self._finish()
        if (events := self._over()) is not None:
            events.on_ended(code if code >= 0 else 128 - code)

    def _over(self) -> ProgramEvents | None:
        """Nothing more will happen: forget who was to hear of it."""
        events, self._events = self._events, None
        return events

    def _finish(self) -> None:
        self._host.ended(self)
        if self._pidfd >= 0:
            self._host.loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1


def _pipes() -> tuple[tuple[int, ...], tuple[int, ...]]:
    out, err = os.pipe(), os.pipe()
    return (out[0], err[0]), (out[1], err[1])


def _terminal(size: tuple[int, int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    ours, theirs = pty.openpty()
    set_size(ours, *size)
    return (ours,), (theirs,)


def _spawned(program: Program, theirs: tuple[int, ...]) -> subprocess.Popen[bytes]:
    """Raises OSError."""
    argv, passed = list(program.argv), []
    if program.script is not None:
        passed.append(os.memfd_create("script", 0))
        os.write(passed[0], program.script)
        os.lseek(passed[0], 0, os.SEEK_SET)
        argv = [f"/dev/fd/{passed[0]}" if word == _SCRIPT else word for word in argv]
    elif program.answers is not None:
        passed.append(fcntl.fcntl(program.answers, fcntl.F_DUPFD, _ANSWERS_FD + 1))
        argv = ["bash", "-c", f'exec "$@" {_ANSWERS_FD}>&{passed[0]} {passed[0]}>&-', "bash", *argv]
    stdin = program.stdin
    if stdin is None:
        stdin = theirs[0] if program.terminal else subprocess.DEVNULL
    try:
        return subprocess.Popen(
            argv,
            stdin=stdin,
            stdout=theirs[0],
            stderr=theirs[-1],
            cwd=program.cwd,
            env=dict(program.env),
            pass_fds=passed,
            start_new_session=not program.terminal,
            preexec_fn=_lead_terminal if program.terminal else hear_signals,  # noqa: PLW1509 (system calls alone)
        )
    finally:
        for fd in passed:
            os.close(fd)


def hear_signals() -> None:
    """In a new process, as in a slot: what a ``nohup`` or an ``&`` had us ignore, commands do not."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)


def _lead_terminal() -> None:
    hear_signals()
    os.setsid()
    fcntl.ioctl(1, termios.TIOCSCTTY, 0)


def _session(leader: int) -> Iterator[int]:
    """The processes of the session that ``leader`` leads."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if os.getsid(int(entry.name)) == leader:
                    yield int(entry.name)


def _foreground(leader: int, began_s: float) -> Iterator[int]:
    """The processes of the shell ``leader``'s group but those it has in the background: they were there before
    ``began_s`` (of CLOCK_BOOTTIME), or come from a copy of the shell that ignores SIGINT."""
    known = {pid: fields for pid in _session(leader) if (fields := _stat(pid))}

    def shown(pid: int) -> bool:
        if pid == leader or pid not in known:
            return True
        parent, flags, started, ignored = (int(known[pid][number - 3]) for number in (4, 9, 22, 33))
        in_background = parent == leader and flags & _FORKED_NO_EXEC and ignored & 1 << (signal.SIGINT - 1)
        return started >= int(began_s * 100) and not in_background and shown(parent)

    return (pid for pid, fields in known.items() if int(fields[5 - 3]) == leader and shown(pid))


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third on; none when it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return []
