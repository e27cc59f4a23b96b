"""Which limit a slot met: its own, or one above it (the container's, the machine's).

Told by the counters of the slot's cgroup, never by what was printed. The kernel counts a process killed for
memory in the cgroup it lived in, whoever's limit was met; only the slot's own failure counter says that it was
its own. Where there is no such cgroup nothing is known, and nothing is reported.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass

_READ_BYTES = 4096
_NEARLY_ALL = 8
"""A count of processes within an eighth of the limit is the limit: it has changed since the kernel said no."""

MEMORY_ABOVE = "the container or its machine ran out of memory; this slot was below its own limit"
PROCESSES_ABOVE = "the container or its machine has no process to spare; this slot was below its own limit"


@dataclass(frozen=True)
class LimitFiles:
    """Where the counters of one slot are: cgroup directories, None where there is no such controller."""

    version: int = 2
    memory: str | None = None
    pids: str | None = None


class LimitWatch:
    """The counters of one slot, from its hand-over to :meth:`close`."""

    def __init__(self, files: LimitFiles) -> None:
        self._files = files
        self._kills_fd = _open(files.memory, "memory.oom_control" if files.version == 1 else "memory.events")
        self._hits_fd = _open(files.memory, "memory.failcnt" if files.version == 1 else "memory.events")
        self._forks_fd = _open(files.pids, "pids.events")
        self._kills = _counter(self._kills_fd, b"oom_kill ")
        self._forks = _counter(self._forks_fd, b"max ")
        self._hits = self._hits_before = self._read_hits()
        self._own = False
        self.above = ""
        """What a limit above the slot did to it since :meth:`take_above`; empty when it did nothing."""

    def begin(self) -> None:
        """What was killed until now is no later call's doing."""
        self.look()
        self._own = False
        self._hits_before, self._hits = self._hits, self._read_hits()

    def killed_by_own_limit(self) -> bool:
        """Whether the kernel has killed something here since :meth:`begin` because the slot met its own limit."""
        self.look()
        return self._own

    def take_above(self) -> str:
        """What a limit above the slot has done to it, told once; empty when it did nothing."""
        self.look()
        above, self.above = self.above, ""
        return above

    def refused(self, error: int) -> str:
        """A process could not be started for want of something: whose? Empty when the slot's own limit was met.

        Noted as :attr:`above` by whoever has a call to tell of it.
        """
        self._forks = _counter(self._forks_fd, b"max ")  # this one is told of here
        if error == errno.EAGAIN:
            return "" if self._processes_used_up() else PROCESSES_ABOVE
        if error == errno.ENOMEM:
            return "" if self._memory_used_up() else MEMORY_ABOVE
        return f"the slot's agent could not start a process: {os.strerror(error)}"

    def peak_bytes(self) -> int | None:
        """The most memory the slot has used since it was made; None where that cannot be known."""
        return self._number(self._files.memory, "memory.max_usage_in_bytes", "memory.peak")

    def close(self) -> None:
        """Repeatable."""
        for fd in (self._kills_fd, self._hits_fd, self._forks_fd):
            if fd >= 0:
                os.close(fd)
        self._kills_fd = self._hits_fd = self._forks_fd = -1

    def look(self) -> None:
        """Note what was killed, and which forks were refused, since the last look. The methods above tell."""
        if (kills := _counter(self._kills_fd, b"oom_kill ")) > self._kills:
            self._kills = kills
            # Compared with the look before the last: a limit is met before the kernel kills for it.
            if self._read_hits() > self._hits_before:
                self._own = True
            else:
                self.above = MEMORY_ABOVE
        # Some kernels count here what a limit above refused, others do not: then it is not known.
        if (forks := _counter(self._forks_fd, b"max ")) > self._forks:
            self._forks = forks
            if not self._processes_used_up():
                self.above = PROCESSES_ABOVE

    def _read_hits(self) -> int:
        """How often the slot has met its own memory limit."""
        return _counter(self._hits_fd, b"oom " if self._files.version == 2 else b"")

    def _memory_used_up(self) -> bool:
        return self._files.memory is None or self._read_hits() > self._hits_before

    def _processes_used_up(self) -> bool:
        directory = self._files.pids
        most = None if directory is None else _number(_read(directory, "pids.max"))
        if directory is None or most is None:
            return True  # RLIMIT_NPROC is the slot's own limit then
        used = max(_number(_read(directory, name)) or 0 for name in ("pids.current", "pids.peak"))
        return used >= most - most // _NEARLY_ALL

    def _number(self, directory: str | None, first: str, second: str) -> int | None:
        if directory is None:
            return None
        return _number(_read(directory, first if self._files.version == 1 else second))


def _open(directory: str | None, name: str) -> int:
    """A descriptor of the file, to be read again and again; -1 where there is none."""
    if directory is None:
        return -1
    try:
        return os.open(f"{directory}/{name}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1


def _counter(fd: int, name: bytes) -> int:
    """One counter of an open file, or its only one; 0 where it cannot be known (the cgroup goes with its slot)."""
    if fd < 0:
        return 0
    try:
        return _field(os.pread(fd, _READ_BYTES, 0), name)
    except OSError:
        return 0


def _read(directory: str, name: str) -> bytes:
    try:
        with open(f"{directory}/{name}", "rb") as file:  # noqa: PTH123 (the hot server imports no pathlib)
            return file.read(_READ_BYTES)
    except OSError:
        return b""


def _field(text: bytes, name: bytes) -> int:
    for line in text.splitlines():
        if line.startswith(name):
            return _number(line[len(name) :]) or 0
    return 0


def _number(text: bytes) -> int | None:
    """None for ``max`` and for a file that is not there."""
    try:
        return int(text)
    except ValueError:
        return None
