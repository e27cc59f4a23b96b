"""Checks an image slot from outside, by what the kernel reports about its first process, before anything runs in it.

A plain slot is checked from inside, by the self-test at the container's start. In an image slot that would run
programs of its image, so nothing is run inside. :func:`judge` is pure; :func:`read` gives it what it judges.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

NAMESPACES: Final = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")
DEVICES: Final = ("full", "null", "random", "tty", "urandom", "zero")
READ_ONLY: Final = (
    *("/proc/bus", "/proc/driver", "/proc/dynamic_debug", "/proc/fs", "/proc/irq", "/proc/mtrr", "/proc/pressure"),
    *("/proc/sys", "/proc/sysrq-trigger"),
)
"""Where root may write, and reach the machine. ``/proc/pressure``: whoever writes has the kernel watch for him."""
COVERED_FILES: Final = (
    *("/proc/config.gz", "/proc/diskstats", "/proc/interrupts", "/proc/iomem", "/proc/ioports", "/proc/kcore"),
    *("/proc/keys", "/proc/latency_stats", "/proc/partitions", "/proc/sched_debug", "/proc/timer_list"),
    *("/proc/timer_stats", "/sys/kernel/notes"),
)
COVERED_DIRECTORIES: Final = (
    *("/proc/acpi", "/proc/asound", "/proc/scsi", "/sys/block", "/sys/class/bdi", "/sys/class/block", "/sys/dev/block"),
    *("/sys/devices/virtual/bdi", "/sys/devices/virtual/block", "/sys/devices/virtual/powercap", "/sys/firmware"),
    "/sys/fs",
)
"""What is covered of the machine's, as in ``slotagent/root/tree.c``; plain slots have those of /proc only."""
_PRIVATE = frozenset({"nosuid", "nodev", "noexec"})
_WRITABLE = ("tmpfs", "ext4")
_STATUS = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp")


@dataclass(frozen=True)
class Mount:
    """One line of a mountinfo. ``options`` are those of the mount and those of its file system."""

    point: str
    kind: str
    root: str
    flags: frozenset[str]
    options: frozenset[str]


@dataclass(frozen=True)
class Expected:
    """What an image slot must be like. ``lowers``: the names of its layers, the upmost first."""

    first_id: int
    """The id outside of the slot's root."""
    maps: str
    capabilities: int
    oom_score_adj: int
    lowers: tuple[str, ...]
    shm_bytes: int
    terminals: int
    nested: bool = False
    cgroup: bool = True
    """Whether there are cgroups at all."""
    outside: Mapping[str, str] = field(default_factory=dict)
    """The supervisor's own namespaces, by kind."""
    network: str = ""
    """The network namespace that it shares; empty: it has its own."""
    volumes: Mapping[str, bool] = field(default_factory=dict)
    """Where volumes are, and whether they are read-only there."""
    binds: tuple[str, ...] = ()
    """Where binds are; what is mounted below them is theirs."""
    covers: frozenset[str] = frozenset()
    """Paths of /proc and /sys that are there on this machine, of those that have to be covered."""


@dataclass(frozen=True)
class Seen:
    """What the kernel reports about a process. ``namespaces`` is empty where they are unreadable (no CAP_SYS_PTRACE):
    then the user namespace is known by its maps, and the others by the mounts and pids that they make."""

    uid_map: str
    gid_map: str
    status: Mapping[str, str]
    pids: tuple[str, ...]
    """Its pid in each namespace, the outermost first."""
    namespaces: Mapping[str, str]
    mounts: tuple[Mount, ...]
    oom_score_adj: int
    in_cgroup: bool


def parse_mounts(mountinfo: str) -> Iterator[Mount]:
    """The mounts of a ``/proc/PID/mountinfo`` (proc_pid_mountinfo(5))."""
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        fields, kinds = left.split(), right.split()
        yield Mount(fields[4], kinds[0], fields[3], frozenset(fields[5].split(",")), frozenset(kinds[2].split(",")))


def expected_covers() -> frozenset[str]:
    """Which of the paths to be covered this machine has."""
    paths = (*READ_ONLY, *COVERED_FILES, *COVERED_DIRECTORIES)
    return frozenset(path for path in paths if os.path.lexists(path))


def namespaces_of(pid: int | str) -> dict[str, str]:
    """The process's namespaces by kind; empty when we may not know them."""
    try:
        return {kind: str(Path(f"/proc/{pid}/ns/{kind}").readlink()) for kind in NAMESPACES}
    except PermissionError:
        return {}


def named_namespace(fd: int) -> str:
    """The namespace of this descriptor, as :func:`namespaces_of` names it."""
    return str(Path(f"/proc/self/fd/{fd}").readlink())


def read(pid: int, groups: Iterable[Path]) -> Seen:
    """What the kernel reports about this process; ``groups``: the lists of pids of the cgroups that it must be in.
    Raises OSError."""
    of = Path(f"/proc/{pid}")
    lines = (line.partition(":") for line in (of / "status").read_text().splitlines())
    status = {name: value.strip() for name, _, value in lines}
    return Seen(
        uid_map=(of / "uid_map").read_text(),
        gid_map=(of / "gid_map").read_text(),
        status=status,
        pids=tuple(status.get("NSpid", "").split()),
        namespaces=namespaces_of(pid),
        mounts=tuple(parse_mounts((of / "mountinfo").read_text())),
        oom_score_adj=int((of / "oom_score_adj").read_text()),
        in_cgroup=all(str(pid) in group.read_text().split() for group in groups),
    )


def judge(seen: Seen, want: Expected) -> list[str]:
    """What is not as it must be, one phrase each; empty: the slot is what was promised."""
    return [
        *_ids(seen, want),
        *_privileges(seen, want),
        *_namespaces(seen, want),
        *_mounts(seen.mounts, want),
        *_limits(seen, want),
    ]


def _ids(seen: Seen, want: Expected) -> Iterator[str]:
    for name in ("Uid", "Gid"):
        if set(ids := seen.status.get(name, "").split()) != {str(want.first_id)}:
            yield f"{name} is {' '.join(ids) or 'missing'}, not {want.first_id}"
    for name, maps in (("uid_map", seen.uid_map), ("gid_map", seen.gid_map)):
        if maps.split() != want.maps.split():
            yield f"{name} is {' '.join(maps.split()) or 'empty'}"


def _privileges(seen: Seen, want: Expected) -> Iterator[str]:
    capabilities = f"{want.capabilities:016x}"
    wanted = {"CapInh": "0" * 16, "CapAmb": "0" * 16, "CapBnd": capabilities, "CapEff": capabilities}
    wanted |= {"CapPrm": capabilities, "NoNewPrivs": "0", "Seccomp": "2"}
    for name in _STATUS:
        if (found := seen.status.get(name, "missing")) != wanted[name]:
            yield f"{name} is {found}, not {wanted[name]}"


def _namespaces(seen: Seen, want: Expected) -> Iterator[str]:
    if seen.pids[-1:] != ("1",) or len(seen.pids) < 2:
        yield f"its pids are {' '.join(seen.pids)!r}: it is not the first process of its own pid namespace"
    for kind, inode in seen.namespaces.items():
        if want.outside.get(kind) == inode:
            yield f"its {kind} namespace is the container's"
    if want.network and seen.namespaces.get("net", want.network) != want.network:
        yield "its net namespace is not the slot's"


def _limits(seen: Seen, want: Expected) -> Iterator[str]:
    if want.cgroup and not seen.in_cgroup:
        yield "it is not in the slot's cgroup"
    if seen.oom_score_adj != want.oom_score_adj:
        yield f"its oom_score_adj is {seen.oom_score_adj}, not {want.oom_score_adj}"


# ---- mounts


@dataclass(frozen=True)
class _Rule:
    """What a mount must be. ``kinds`` and ``root`` empty: any."""

    kinds: tuple[str, ...] = ()
    root: str = ""
    flags: frozenset[str] = frozenset()
    options: frozenset[str] = frozenset()

    def broken_by(self, mount: Mount) -> str:
        if self.kinds and mount.kind not in self.kinds:
            return f"{mount.point} is a {mount.kind}"
        if self.root and mount.root != self.root:
            return f"{mount.point} shows {mount.root}"
        lacking = [*sorted(self.flags - mount.flags), *sorted(self.options - mount.options)]
        return f"{mount.point} is not {', '.join(lacking)}" if lacking else ""


_BIND: Final = _Rule(flags=frozenset({"ro", "nosuid", "nodev"}))


def table(want: Expected) -> dict[str, _Rule]:
    """Every mount that an image slot has, by its mount point."""
    page_bytes = resource.getpagesize()
    shm_kib = -(-want.shm_bytes // page_bytes) * page_bytes // 1024  # the kernel rounds up to whole pages
    layers = frozenset({f"lowerdir={':'.join(want.lowers)}", "upperdir=upper", "workdir=work", "userxattr"})
    rules = {
        "/": _Rule(("overlay",), "/", options=layers),
        "/proc": _Rule(("proc",), "/", _PRIVATE if want.nested else _PRIVATE | {"ro"}),
        "/sys": _Rule(("sysfs",), "/", _PRIVATE | {"ro"}),
        "/dev": _Rule(("tmpfs",), "/", frozenset({"nosuid", "noexec"})),
        "/dev/shm": _Rule(("tmpfs",), "/", frozenset({"nosuid", "nodev"}), frozenset({f"size={shm_kib}k"})),  # noqa: S108
        "/dev/pts": _Rule(
            ("devpts",), "/", frozenset({"nosuid", "noexec"}), frozenset({f"max={want.terminals}", "ptmxmode=666"})
        ),
        "/dev/mqueue": _Rule(("mqueue",), "/", _PRIVATE),
        "/run/agentenv": _Rule(flags=frozenset({"ro", "nosuid", "nodev"})),
        **{f"/dev/{name}": _Rule(root=f"/{name}") for name in DEVICES},
        **{path: _Rule(_WRITABLE, flags=frozenset({"ro"} if kept else ())) for path, kept in want.volumes.items()},
    }
    rules |= dict.fromkeys(want.binds, _BIND)
    for path in want.covers:
        rules[path] = _cover(path)
    return rules


def _cover(path: str) -> _Rule:
    if path in READ_ONLY:
        return _Rule(("proc",), path.removeprefix("/proc"), _PRIVATE | {"ro"})
    return _Rule(root="/null") if path in COVERED_FILES else _Rule(("tmpfs",), "/", _PRIVATE | {"ro"})


def _mounts(found: Iterable[Mount], want: Expected) -> Iterator[str]:
    rules = table(want)
    seen: set[str] = set()
    for mount in found:
        rule = rules.get(mount.point)
        if rule is None and any(mount.point.startswith(f"{bind}/") for bind in want.binds):
            rule = _BIND
        if rule is None:
            yield f"{mount.kind} is mounted at {mount.point}"
        elif mount.point in seen:
            yield f"{mount.point} is mounted twice"
        elif broken := rule.broken_by(mount):
            yield broken
        seen.add(mount.point)
    yield from (f"nothing is mounted at {point}" for point in sorted(rules.keys() - seen))
