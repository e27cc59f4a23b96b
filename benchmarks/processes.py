"""The processes of this machine, as far as they are of a farm."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
SERVER_UID = 10_000
SLOT_UIDS = 20_000
_SANDBOX = "agentenv.sandbox"


@dataclass(frozen=True)
class Process:
    """One row of the process table."""

    pid: int
    parent: int
    uid: int
    command: str


def process_table() -> dict[int, Process]:
    """Every process there is, by pid."""
    table: dict[int, Process] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = dict(line.split(":\t", 1) for line in (entry / "status").read_text().splitlines() if ":\t" in line)
            pid, parent, uid = int(entry.name), int(fields["PPid"]), int(fields["Uid"].split()[0])
            table[pid] = Process(pid, parent, uid, fields["Name"])
        except (OSError, KeyError, ValueError):
            continue
    return table


def process_tree(root: int) -> list[Process]:
    """``root`` and all its descendants, as the host sees them."""
    table = process_table()
    children: dict[int, list[Process]] = {}
    for process in table.values():
        children.setdefault(process.parent, []).append(process)
    found = [table[root]] if root in table else []
    for process in found:
        found.extend(children.get(process.pid, []))
    return found


def processes_of(module: str) -> list[int]:
    """The processes that were started to run this Python module."""
    return [pid for pid in process_table() if module in _arguments(pid)]


def container_roots() -> set[int]:
    """The outermost process of each container that runs on this machine, whoever started it."""
    inside = set(processes_of(_SANDBOX))
    table = process_table()
    return {pid for pid in inside if pid in table and table[pid].parent not in inside}


def root_of(container: str) -> int | None:
    """The outermost process of the container with this id, None if there is none on this machine."""
    named = (pid for pid in container_roots() if any(container in word for word in _arguments(pid)))
    return min(named, default=None)


def server_of(root: int) -> int | None:
    """The sandbox server of a container, None while it has none."""
    return next((p.pid for p in process_tree(root) if p.uid == SERVER_UID or _serves(p.pid)), None)


def _serves(pid: int) -> bool:
    return f"{_SANDBOX}.serve" in _arguments(pid)


def _arguments(pid: int) -> list[str]:
    try:
        return os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes()).split("\0")
    except OSError:
        return []


def pss_bytes(pid: int) -> int:
    """Proportional set size of one process; 0 when it has ended meanwhile."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def rss_bytes(pid: int) -> int:
    """Resident set size of one process, pages it shares with others included."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES


def cpu_s(pid: int) -> float:
    """CPU time that one process has used, in steps of 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def descriptors(pid: int) -> int:
    """Open descriptors of one process; 0 when it has ended meanwhile."""
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208 - names are enough
    except OSError:
        return 0


def mounts(pids: Iterable[int]) -> int:
    """Mounts in all mount namespaces of these processes, but for that of this process (others mount there too)."""
    found: dict[int, int] = {}
    for pid in pids:
        try:
            namespace = os.stat(f"/proc/{pid}/ns/mnt").st_ino  # noqa: PTH116 - a link to nothing that has a path
            found[namespace] = len(Path(f"/proc/{pid}/mountinfo").read_bytes().splitlines())
        except OSError:
            continue
    found.pop(os.stat("/proc/self/ns/mnt").st_ino, None)  # noqa: PTH116
    return sum(found.values())


def mounts_here(of: str) -> int:
    """Mounts of this process's namespace that name ``of``."""
    return sum(of in line for line in Path("/proc/self/mountinfo").read_text().splitlines())
