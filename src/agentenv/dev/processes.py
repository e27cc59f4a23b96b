"""Processes that outlive their starter, found again by a mark (an environment variable).

Pids are never stored: a crash between starting and storing would leak the process, and a stored pid may be reused by
an unrelated process. Children inherit the mark (Nomad's loggers and executors, containerd), so they are found too.
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

from agentenv.deadlines import scaled

_ZOMBIE = "Z"
_STATE, _ENV_END = 3 - 3, 51 - 3
"""Of a process' fields, as :func:`_stat` has them."""
_ERROR_LINES = 4
_EXEC_S = scaled(2.0)
"""For the kernel to end an exec, on a machine with other things to do."""
_KILL_S = scaled(10.0)


@dataclass(frozen=True)
class Found:
    """A running process with the mark. ``argv`` as shown by the kernel."""

    pid: int
    argv: tuple[str, ...]

    def runs(self, *words: str) -> bool:
        """Whether its command line starts with this program name and these arguments, possibly after a script's
        interpreter."""
        return any(
            Path(self.argv[at]).name.startswith(words[0]) and self.argv[at + 1 : at + len(words)] == words[1:]
            for at in range(min(2, len(self.argv)))
        )


def start(argv: Sequence[str], mark: str, environment: Mapping[str, str], log: Path, keep: Mapping[int, int]) -> int:
    """Start a process in a new session, with its output appended to ``log``; returns its pid. Raises OSError.

    ``mark`` is ``NAME=value``, for :func:`find`. ``keep`` maps its descriptors to ours; it inherits no others.
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
    """All running processes with the mark that we may inspect, lowest pid first."""
    wanted = mark.encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and wanted in _environment(entry):
            argv = tuple(word.decode(errors="replace") for word in _words(entry / "cmdline"))
            if argv and _state(entry) != _ZOMBIE:
                found.append(Found(int(entry.name), argv))
    return sorted(found, key=lambda process: process.pid)


def values(name: str) -> set[str]:
    """Values of the environment variable ``name`` in all running processes."""
    prefix = f"{name}=".encode()
    environments = (_environment(entry) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return {os.fsdecode(word[len(prefix) :]) for words in environments for word in words if word.startswith(prefix)}


def end(mark: str, processes: Iterable[Found], *, grace_s: float) -> list[Found]:
    """Send SIGTERM, after ``grace_s`` SIGKILL, and wait for their ends. Returns those that still run.

    A process is signalled only if it has the mark, because its pid may have been reused.
    """
    descriptors = {process: fd for process in processes if (fd := _hold(process.pid, mark)) is not None}
    try:
        for number, patience_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, _KILL_S)):
            for fd in descriptors.values():
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(fd, number)
            _wait(list(descriptors.values()), patience_s)
        return [process for process, fd in descriptors.items() if not _ended(fd)]
    finally:
        for process, fd in descriptors.items():
            os.close(fd)
            with contextlib.suppress(ChildProcessError):  # only our children can be reaped
                os.waitpid(process.pid, os.WNOHANG)


def end_all(mark: str, *, grace_s: float) -> list[Found]:
    """:func:`end` for all marked processes, including new ones. Returns those that still run."""
    stubborn: list[Found] = []
    while found := [process for process in find(mark) if process not in stubborn]:
        stubborn += end(mark, found, grace_s=grace_s)
    return stubborn


def reap(pid: int) -> int | None:
    """Exit code of an ended child; None if it runs, is not our child, or has been reaped already."""
    try:
        done, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return None
    return os.waitstatus_to_exitcode(status) if done else None


def last_words(log: Path, *, characters: int = 800) -> str:
    """The first lines of the relevant error in a log, otherwise the log's end; for an error message."""
    try:
        lines = log.read_text(errors="replace").strip().splitlines()
    except OSError:
        return ""
    # The lines after the reason are errors of the shutdown that follows.
    said_so = [at for at, line in enumerate(lines) if "error starting" in line.lower()]
    errors = [at for at, line in enumerate(lines) if "error" in line.lower() and "[WARN]" not in line]
    last = max(said_so or errors, default=None)
    said = lines if last is None else lines[last : last + _ERROR_LINES]
    return " ".join(" ".join(said).split())[-characters:]


def _hold(pid: int, mark: str) -> int | None:
    """Pid descriptor of the process if it has the mark, else None."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return None
    if mark.encode() in _environment(Path("/proc") / str(pid)):
        return fd
    os.close(fd)
    return None


def _wait(descriptors: Sequence[int], patience_s: float) -> None:
    deadline = time.monotonic() + patience_s
    for fd in descriptors:
        select.select([fd], [], [], max(0.0, deadline - time.monotonic()))


def _ended(fd: int) -> bool:
    return bool(select.select([fd], [], [], 0)[0])


def _environment(process: Path) -> list[bytes]:
    """``NAME=value``. In the middle of an exec the kernel shows none, whether there will be some or not."""
    until_s = time.monotonic() + _EXEC_S
    while not any(words := _words(process / "environ")) and _is_in_exec(process) and time.monotonic() < until_s:
        time.sleep(0.001)
    return words


def _is_in_exec(process: Path) -> bool:
    """Whether its new memory has no place for an environment yet: where one that is empty lies is known as well."""
    try:
        (process / "exe").readlink()  # neither a thread of the kernel has one, nor what has ended
        return _stat(process)[_ENV_END] == "0"
    except (OSError, IndexError):
        return False


def _stat(process: Path) -> list[str]:
    """The fields of proc(5) that come after its name, the first of which is the third. Raises OSError."""
    return (process / "stat").read_text().rpartition(")")[2].split()


def _words(path: Path) -> list[bytes]:
    try:
        return path.read_bytes().rstrip(b"\0").split(b"\0")
    except OSError:
        return []


def _state(process: Path) -> str:
    try:
        return _stat(process)[_STATE]
    except (OSError, IndexError):
        return _ZOMBIE
