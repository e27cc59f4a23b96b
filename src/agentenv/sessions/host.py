"""Interface between sessions and the place where their programs run."""

from __future__ import annotations

import asyncio
import fcntl
import struct
import termios
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True)
class Program:
    """What to start. ``stdin`` is the program's end of :meth:`Host.input`, which stays the caller's (None: nothing
    to read, or the terminal if it has one). ``script`` is readable from descriptor 9; alternatively ``answers`` is
    there, its end of :meth:`Host.answers`. With ``terminal`` (rows, columns) it is the leader of a session on a new
    PTY. ``given`` are variables added to ``env``. ``user``: whose program it is, in a slot with several users (None:
    whose programs run there anyway)."""

    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: str
    stdin: int | None = None
    script: bytes | None = None
    answers: int | None = None
    terminal: tuple[int, int] | None = None
    user: str | None = None
    given: Mapping[str, str] = field(default_factory=dict)


class ProgramEvents(Protocol):
    """Life cycle of a program. ``on_failed``, ``on_ended`` or ``on_lost`` comes last; none is called from within
    :meth:`Host.start`."""

    def on_started(self, fds: tuple[int, ...]) -> None:
        """It is running. ``fds`` are the receiver's to close: its output and its errors, or its terminal."""

    def on_failed(self, error: int, *, cwd: bool) -> None:
        """It could not be started, with this errno; ``cwd``: because its directory could not be entered."""

    def on_ended(self, exit_code: int) -> None:
        """Its first process ended; 128 + n when signal n ended it."""

    def on_lost(self) -> None:
        """The slot it ran in is gone."""


class Started(Protocol):
    """A program that was started, or is being started."""

    @property
    def input_inode(self) -> int:
        """Inode of the pipe that is its standard input; 0 before it runs, or if it is not a pipe."""

    @property
    def pid(self) -> int:
        """Its first process, as the slot sees it; 0 before it runs."""

    def kill(self) -> None:
        """Kill its whole tree; ``on_ended`` follows. No effect when it has ended."""

    def signal(self, number: int, began_s: float | None = None) -> None:
        """Send a signal to its process group. With ``began_s`` (loop time) the program is a shell whose command
        began then: its background processes, older or newer, are left alone."""


class Host(Protocol):
    """Starts programs in one slot and watches descriptors."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop of all callbacks."""

    @property
    def env(self) -> Mapping[str, str]:
        """The initial environment of every program in the slot."""

    @property
    def workspace(self) -> str:
        """Path of the slot's workspace, as its programs see it."""

    def directory(self, workdir: str | None) -> str:
        """Path of the directory that a call names, as the slot's programs see it; by default the workspace."""

    @property
    def tmux_socket(self) -> str:
        """Path of the socket of the slot's own tmux server."""

    @property
    def tmux(self) -> Sequence[str]:
        """The command that runs tmux, without arguments."""

    @property
    def tmux_env(self) -> Mapping[str, str]:
        """Variables that this command needs, and programs in its panes must not have."""

    def start(self, program: Program, events: ProgramEvents) -> Started:
        """Start a program. Raises ValueError when argv and env are too large, UserUnsupportedError."""

    def input(self) -> tuple[int, int]:
        """Create a channel to a program's input: our end to write to, and the program's end. Both are the caller's
        to close. Raises OSError."""

    def answers(self) -> tuple[int, int]:
        """Create a channel for a program's answers: our end to read from, and the program's end. Both are the
        caller's to close. Output printed before an answer is readable before it. Raises OSError."""

    def unread_bytes(self, ours: int) -> int:
        """0 when everything written to an input has reached the program."""

    def watch(self, fd: int, callback: Callable[[], None]) -> None:
        """Call back whenever ``fd`` is readable or has hung up, until :meth:`unwatch`."""

    def unwatch(self, fd: int) -> None:
        """Stop watching; it is not an error if it is not watched."""

    def orphan(self, fd: int) -> None:
        """Take over an output that is no longer read, so that its writers are not disturbed."""


TERM = "vt100"
"""Present in every terminfo database; programs can draw with it, but print no colours, titles or alternate screens,
which nobody would see."""
_NO_TERMINAL = "dumb"
_GET_NUMBER = 0x80045430
"""TIOCGPTN, which the termios module lacks."""


def set_size(fd: int, rows: int, columns: int) -> None:
    """Set the terminal's size; its programs are notified (SIGWINCH)."""
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def number_of(fd: int) -> int:
    """N, if the other side of ``fd`` is ``/dev/pts/N`` where it was created."""
    found: int = struct.unpack("i", fcntl.ioctl(fd, _GET_NUMBER, bytes(4)))[0]
    return found


def terminal_env(env: Mapping[str, str]) -> dict[str, str]:
    """The environment of a program on a terminal: TERM is set unless it is already."""
    return {**env, "TERM": TERM} if env.get("TERM", _NO_TERMINAL) == _NO_TERMINAL else dict(env)
