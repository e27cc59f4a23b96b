"""Determines which limit a slot reached: its own, or one above it (the container's, the machine's).

Based on the counters of the slot's cgroup and of those above it, never on output. The kernel counts a process
killed for memory in the cgroup it was in, whichever limit was reached; only the slot's own failure counter shows
that it was the slot's. A refused fork is counted at the limit (cgroup v2 since Linux 6.11), or where the fork was
tried (before that, and in v1). Unknown cases count as the slot's own: a policy must not be able to make them look
like infrastructure failures. Without such cgroups nothing is known, and nothing is reported.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from functools import cache

_READ_BYTES = 4096
_NEARLY_ALL = 8
"""A process count within an eighth of the limit counts as having reached it, because it has changed since the
refusal."""

MEMORY_ABOVE = "the container or its machine ran out of memory; this slot was below its own limit"
PROCESSES_ABOVE = "the container or its machine has no process to spare; this slot was below its own limit"
TERMINALS_ABOVE = "the machine has no terminal to spare; this slot was below its own limit"

_PROCESSES = ("pids.current", "pids.max")
_TERMINALS = "/proc/sys/kernel/pty"


@dataclass(frozen=True)
class LimitFiles:
    """Locations of a slot's counters: cgroup directories, None where there is no such controller."""

    version: int = 2
    memory: str | None = None
    pids: str | None = None
    cpu: str | None = None
    own_processes: int = 0
    """How many processes of agentenv's own ``pids`` and its limit count."""


@dataclass(frozen=True)
class Usage:
    """What a slot uses now, and its limits; None where that is unknown."""

    memory_bytes: int | None
    memory_limit_bytes: int | None
    cpu_s: float | None
    processes: int | None
    processes_limit: int | None


class LimitWatch:
    """The counters of one slot, from its hand-over to :meth:`close`."""

    def __init__(self, files: LimitFiles, terminals: str = _TERMINALS) -> None:
        self._files = files
        self._terminals = terminals
        self._above_slot = _Above() if files.pids is None else _above(os.path.dirname(files.pids))  # noqa: PTH120
        self._kills_fd = _open(files.memory, "memory.oom_control" if files.version == 1 else "memory.events")
        self._hits_fd = _open(files.memory, "memory.failcnt" if files.version == 1 else "memory.events")
        self._forks_fd = _open(files.pids, "pids.events")
        self._kills = _counter(self._kills_fd, b"oom_kill ")
        self._forks = _counter(self._forks_fd, b"max ")
        self._forks_above = self._read_forks_above()
        self._hits = self._hits_before = self._read_hits()
        self._own = False
        self.above = ""
        """Effect of a limit above the slot since :meth:`take_above`; empty if there was none."""

    def begin(self) -> None:
        """Start of a call: earlier kills are not attributed to it, nor refused forks above the slot (counted for
        all slots together) from before."""
        self.look(between_calls=True)
        self._own = False
        self._hits_before, self._hits = self._hits, self._read_hits()

    def killed_by_own_limit(self) -> bool:
        """Whether the kernel has killed a process since :meth:`begin` because the slot reached its own limit."""
        self.look()
        return self._own

    def take_above(self) -> str:
        """Effect of a limit above the slot, reported once; empty if there was none."""
        self.look()
        above, self.above = self.above, ""
        return above

    def refused(self, error: int) -> str:
        """A process could not be started because of a limit: returns whose it was, empty for the slot's own.

        Stored in :attr:`above` until a call reports it.
        """
        self._forks = _counter(self._forks_fd, b"max ")  # this one is reported here
        self._forks_above = self._read_forks_above()
        if error == errno.EAGAIN:
            return "" if self._processes_used_up() else PROCESSES_ABOVE
        if error == errno.ENOMEM:
            return "" if self._memory_used_up() else MEMORY_ABOVE
        if error == errno.EMFILE:
            return ""  # the agent's own limit is the slot's
        if error == errno.ENOSPC:  # of a terminal: the slot's own /dev/pts has a limit
            return TERMINALS_ABOVE if _no_terminal_left(self._terminals) else ""
        return f"the slot's agent could not start a process: {os.strerror(error)}"

    def peak_bytes(self) -> int | None:
        """The slot's peak memory use since it was created; None where that is unknown."""
        return self._number(self._files.memory, "memory.max_usage_in_bytes", "memory.peak")

    def usage(self) -> Usage:
        """What the slot uses now."""
        files, first = self._files, self._files.version == 1
        processes, most = (_less(self._number(files.pids, name, name), files.own_processes) for name in _PROCESSES)
        return Usage(
            memory_bytes=self._number(files.memory, "memory.usage_in_bytes", "memory.current"),
            memory_limit_bytes=self._number(files.memory, "memory.limit_in_bytes", "memory.max"),
            cpu_s=None if files.cpu is None else _cpu_s(files.cpu, first=first),
            processes=processes,
            processes_limit=most,
        )

    def close(self) -> None:
        """Close the files. Repeatable."""
        for fd in (self._kills_fd, self._hits_fd, self._forks_fd):
            if fd >= 0:
                os.close(fd)
        self._kills_fd = self._hits_fd = self._forks_fd = -1

    def look(self, *, between_calls: bool = False) -> None:
        """Read the counters of kills and refused forks, for the methods above. ``between_calls``: changes of
        counters shared by all slots were caused by another."""
        if (kills := _counter(self._kills_fd, b"oom_kill ")) > self._kills:
            self._kills = kills
            # Compared with the check before the last: a limit is reached before the kernel kills for it.
            if self._read_hits() > self._hits_before:
                self._own = True
            else:
                self.above = MEMORY_ABOVE
        forks, above = _counter(self._forks_fd, b"max "), self._read_forks_above()
        others = above > self._forks_above and not between_calls
        refused_above = not self._processes_used_up() if forks > self._forks else others
        if refused_above and not self.above:  # a kill is the worse of the two
            self.above = PROCESSES_ABOVE
        self._forks, self._forks_above = forks, above

    def _read_forks_above(self) -> int:
        """Number of forks refused by limits above the slot; 0 where the kernel does not count that."""
        return sum(_counter(fd, b"max ") for fd in self._above_slot.forks_fds)

    def _read_hits(self) -> int:
        """How often the slot has reached its own memory limit."""
        return _counter(self._hits_fd, b"oom " if self._files.version == 2 else b"")

    def _memory_used_up(self) -> bool:
        return self._files.memory is None or self._read_hits() > self._hits_before

    def _processes_used_up(self) -> bool:
        """Whether a fork was refused by the slot's own limit, as far as it can be determined afterwards."""
        directory = self._files.pids
        most = None if directory is None else _number(_read(directory, "pids.max"))
        if directory is None or most is None:
            return True  # RLIMIT_NPROC is the slot's own limit then
        used, peak = (_number(_read(directory, name)) for name in ("pids.current", "pids.peak"))
        if max(used or 0, peak or 0) >= most - most // _NEARLY_ALL:
            return True
        # Before Linux 6.6 there is no peak: whatever forked here may have ended since.
        return peak is None and not any(_full(above) for above in self._above_slot.directories)

    def _number(self, directory: str | None, first: str, second: str) -> int | None:
        if directory is None:
            return None
        return _number(_read(directory, first if self._files.version == 1 else second))


def _less(count: int | None, own: int) -> int | None:
    return None if count is None else max(0, count - own)


def _cpu_s(directory: str, *, first: bool) -> float | None:
    if first:
        used_ns = _number(_read(directory, "cpuacct.usage"))
        return None if used_ns is None else used_ns / 1e9
    text = _read(directory, "cpu.stat")
    return _field(text, b"usage_usec ") / 1e6 if text else None


@dataclass(frozen=True)
class _Above:
    """The cgroups above a slot's that may have a process limit, and their counters of refused forks."""

    directories: tuple[str, ...] = ()
    forks_fds: tuple[int, ...] = ()


@cache
def _above(directory: str) -> _Above:
    """``directory`` and all cgroups above it that are visible. They are the container's, the same for all slots, so
    they are opened once and stay open for the life of this process."""
    found = []
    while _read(directory, "pids.max"):
        found.append(directory)
        directory = os.path.dirname(directory)  # noqa: PTH120
    # Only where this file exists does a cgroup count the forks that its own limit refused, whoever tried them.
    opened = (_open(above, "pids.events.local") for above in found)
    return _Above(tuple(found), tuple(fd for fd in opened if fd >= 0))


def _full(directory: str) -> bool:
    most, used = _number(_read(directory, "pids.max")), _number(_read(directory, "pids.current"))
    return most is not None and used is not None and used >= most


def _no_terminal_left(directory: str) -> bool:
    """Whether the machine's terminals are all taken, which one slot alone cannot cause."""
    most, kept, used = (_number(_read(directory, name)) for name in ("max", "reserve", "nr"))
    # The kernel refuses the one that would make the count as large as the limit.
    return most is not None and used is not None and used + 1 >= most - (kept or 0)


def _open(directory: str | None, name: str) -> int:
    """A descriptor for repeated reading of the file; -1 if it does not exist."""
    if directory is None:
        return -1
    try:
        return os.open(f"{directory}/{name}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1


def _counter(fd: int, name: bytes) -> int:
    """One counter of an open file, or its only one; 0 if it is unknown (the cgroup is removed with its slot)."""
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
    """None for ``max`` and for a missing file."""
    try:
        return int(text)
    except ValueError:
        return None
