"""Processes that outlive the one that started them, found again by a mark in their environment.

No pid is ever written down: a crash between a start and its note would leak the process, and a pid
that was written down may be somebody else's by now. What a marked process starts inherits the mark
(Nomad's loggers and executors, containerd), so all of it is found.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_ZOMBIE = "Z"
_ERROR_LINES = 4


@dataclass(frozen=True)
class Found:
    """A living process that bears the mark. ``argv`` as the kernel shows it."""

    pid: int
    argv: tuple[str, ...]

    def runs(self, *words: str) -> bool:
        """Whether its command line begins with a program of that name and these arguments (a script's
        interpreter comes before it)."""
        return any(
            Path(self.argv[at]).name.startswith(words[0]) and self.argv[at + 1 : at + len(words)] == words[1:]
            for at in range(min(2, len(self.argv)))
        )


def start(argv: Sequence[str], mark: str, environment: Mapping[str, str], log: Path, keep: Mapping[int, int]) -> int:
    """Start a process in a session of its own, its output in ``log``; its pid. Raises OSError.

    ``mark`` is ``NAME=value``, what :func:`find` looks for. ``keep`` maps descriptors it is to have to
    ours; it gets no others.
    """
    name, _, value = mark.partition("=")
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        actions = [
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, out, 1),
            (os.POSIX_SPAWN_DUP2, out, 2),
            *((os.POSIX_SPAWN_DUP2, ours, theirs) for theirs, ours in keep.items()),
        ]
        return os.posix_spawn(argv[0], list(argv), {**environment, name: value}, file_actions=actions, setsid=True)
    finally:
        os.close(out)


def find(mark: str) -> list[Found]:
    """Every living process that bears the mark and that we may look at, oldest pid first."""
    wanted = mark.encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and wanted in _words(entry / "environ"):
            argv = tuple(word.decode(errors="replace") for word in _words(entry / "cmdline"))
            if argv and _state(entry) != _ZOMBIE:
                found.append(Found(int(entry.name), argv))
    return sorted(found, key=lambda process: process.pid)


def values(name: str) -> set[str]:
    """What living processes bear as the value of a mark's ``name``."""
    prefix = f"{name}=".encode()
    environments = (_words(entry / "environ") for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return {os.fsdecode(word[len(prefix) :]) for words in environments for word in words if word.startswith(prefix)}


def end(mark: str, processes: Iterable[Found], *, grace_s: float) -> list[Found]:
    """SIGTERM, then SIGKILL past ``grace_s``; returns when they are gone. Those that would not go are returned.

    A process is signalled only while it still bears the mark: a pid used again is not ours.
    """
    descriptors = {process: fd for process in processes if (fd := _hold(process.pid, mark)) is not None}
    try:
        for number, patience_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 10.0)):
            for fd in descriptors.values():
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(fd, number)
            _wait(list(descriptors.values()), patience_s)
        return [process for process, fd in descriptors.items() if not _ended(fd)]
    finally:
        for process, fd in descriptors.items():
            os.close(fd)
            with contextlib.suppress(ChildProcessError):  # ours to reap only if we are who started it
                os.waitpid(process.pid, os.WNOHANG)


def end_all(mark: str, *, grace_s: float) -> list[Found]:
    """:func:`end` for everything that bears the mark, and what it starts meanwhile; what would not go."""
    stubborn: list[Found] = []
    while found := [process for process in find(mark) if process not in stubborn]:
        stubborn += end(mark, found, grace_s=grace_s)
    return stubborn


def reap(pid: int) -> int | None:
    """The exit code of a child that ended; None while it runs, or when it is not (any more) our child."""
    try:
        done, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return None
    return os.waitstatus_to_exitcode(status) if done else None


def last_words(log: Path, *, characters: int = 800) -> str:
    """What a log says of errors, else its end: for an error's message."""
    try:
        lines = log.read_text(errors="replace").strip().splitlines()
    except OSError:
        return ""
    # What comes after the reason are the errors of taking everything down.
    said_so = [at for at, line in enumerate(lines) if "error starting" in line.lower()]
    errors = [at for at, line in enumerate(lines) if "error" in line.lower() and "[WARN]" not in line]
    last = max(said_so or errors, default=None)
    said = lines if last is None else lines[last : last + _ERROR_LINES]
    return " ".join(" ".join(said).split())[-characters:]


def _hold(pid: int, mark: str) -> int | None:
    """A descriptor of the process, when it is (still) one that bears the mark."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return None
    if mark.encode() in _words(Path("/proc") / str(pid) / "environ"):
        return fd
    os.close(fd)
    return None


def _wait(descriptors: Sequence[int], patience_s: float) -> None:
    deadline = time.monotonic() + patience_s
    for fd in descriptors:
        select.select([fd], [], [], max(0.0, deadline - time.monotonic()))


def _ended(fd: int) -> bool:
    return bool(select.select([fd], [], [], 0)[0])


def _words(path: Path) -> list[bytes]:
    try:
        return path.read_bytes().rstrip(b"\0").split(b"\0")
    except OSError:
        return []


def _state(process: Path) -> str:
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return _ZOMBIE
