"""What sessions need of the place they run in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Program:
    """What to start. ``stdin`` is the program's end of :meth:`Host.input`, which stays the caller's (None: nothing
    to read, or the terminal when it has one). ``script`` is what the program can read from descriptor 9; or it has
    ``answers`` there, its end of :meth:`Host.answers`. With ``terminal`` (rows, columns) it leads a session on a PTY
    of its own."""

    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: str
    stdin: int | None = None
    script: bytes | None = None
    answers: int | None = None
    terminal: tuple[int, int] | None = None


class ProgramEvents(Protocol):
    """What becomes of a program. After ``on_failed``, ``on_ended`` or ``on_lost`` nothing more does;
    none is called from within :meth:`Host.start`."""

    def on_started(self, fds: tuple[int, ...]) -> None:
        """It runs. ``fds`` are the receiver's to close: its output and its errors, or its terminal."""

    def on_failed(self, error: int, *, cwd: bool) -> None:
        """It could not be started, with this errno; ``cwd``: because its directory could not be entered."""

    def on_ended(self, exit_code: int) -> None:
        """Its first process ended; 128 + n when signal n ended it."""

    def on_lost(self) -> None:
        """The place it ran in is gone."""


class Started(Protocol):
    """A program that was asked for."""

    @property
    def input_inode(self) -> int:
        """Which pipe its standard input is; 0 before it runs, and when it is none."""

    def kill(self) -> None:
        """Kill its whole tree; ``on_ended`` follows. Nothing happens when it has ended."""

    def signal(self, number: int, began_s: float | None = None) -> None:
        """Send a signal to its process group. With ``began_s`` (of the loop's time) the program is a shell whose
        command began then: what runs in its background, from before or since, is left alone."""


class Host(Protocol):
    """Starts programs in one slot and watches descriptors."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop all of this happens in."""

    @property
    def env(self) -> Mapping[str, str]:
        """The environment every program of the slot starts with."""

    @property
    def workspace(self) -> str:
        """The slot's workspace, as its programs see it."""

    @property
    def tmux_socket(self) -> str:
        """Where the slot's own tmux server listens."""

    def start(self, program: Program, events: ProgramEvents) -> Started:
        """Start it. Raises ValueError when argv and env are too large."""

    def input(self) -> tuple[int, int]:
        """Where to write what a program is to read, and the program's end. Both are the caller's to close. Raises
        OSError."""

    def answers(self) -> tuple[int, int]:
        """Where to read what a program answers, and the program's end. Both are the caller's to close. What it
        prints before an answer can be read before it. Raises OSError."""

    def unread_bytes(self, ours: int) -> int:
        """0 when all that was written to an input has reached the program."""

    def watch(self, fd: int, callback: Callable[[], None]) -> None:
        """Call back whenever ``fd`` can be read or has hung up, until :meth:`unwatch`."""

    def unwatch(self, fd: int) -> None:
        """Stop; no error when it is not watched."""

    def orphan(self, fd: int) -> None:
        """Take over an output nobody reads any more, so that those who write to it are not disturbed."""
