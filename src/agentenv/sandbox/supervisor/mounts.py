"""Mounts of a container: its private mount namespace, its private directory, the server's view.

Everything is mounted in the supervisor's own mount namespace, so it vanishes with the supervisor
however that dies; nothing ever has to be unmounted on the machine itself.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentenv.sandbox.supervisor import syscalls
from agentenv.sandbox.supervisor.syscalls import (
    MS_BIND,
    MS_NODEV,
    MS_NOEXEC,
    MS_NOSUID,
    MS_PRIVATE,
    MS_RDONLY,
    MS_REC,
    MS_REMOUNT,
)

_PLACES = ("/mnt", "/media", "/srv", "/opt", "/home", "/var/tmp", "/tmp")  # noqa: S108
_PRIVATE_BYTES = 128 * 1024 * 1024
PAGE_BYTES = 4096


def enter_private_namespace() -> None:
    """Enter a new mount namespace from which nothing propagates."""
    syscalls.unshare(syscalls.CLONE_NEWNS)
    syscalls.mount("none", "/", flags=MS_REC | MS_PRIVATE)


def mount_proc() -> None:
    """Mount a new ``/proc`` of this pid namespace. This also lets slots mount theirs: the kernel refuses a new
    procfs in a user namespace where the visible one is partly covered, as in docker."""
    syscalls.mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)


def mount_whole_sys(target: Path) -> None:
    """Make the directory ``target`` and mount a sysfs there that nothing covers, read-only. The kernel lets the root of
    a slot mount its own only where such a one is to be seen, and an engine covers parts of a container's /sys."""
    target.mkdir()
    flags = syscalls.MS_RDONLY | syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC
    syscalls.mount("sysfs", str(target), "sysfs", flags)


def mount_tmpfs(target: Path, *, size_bytes: int, mode: int, uid: int, inodes: int = 0) -> None:
    """Mount a tmpfs with a size limit. ``inodes`` 0: the kernel's default."""
    options = f"size={size_bytes},mode={mode:o},uid={uid},gid={uid}" + (f",nr_inodes={inodes}" if inodes else "")
    syscalls.mount("tmpfs", str(target), "tmpfs", MS_NOSUID | MS_NODEV, options)


def mount_terminals(target: Path, most: int) -> None:
    """Mount a new devpts (``ptmx`` and its terminals) in which at most ``most`` terminals are open at once."""
    options = f"newinstance,ptmxmode=0666,mode=620,max={most}"
    syscalls.mount("devpts", str(target), "devpts", MS_NOSUID | MS_NOEXEC, options)


def bind_read_only(source: str, target: str) -> None:
    """Show ``source`` (with what is mounted below it) at ``target``, read-only at its top.

    The mounts below keep their own flags; bwrap makes the whole tree read-only again per slot.
    """
    syscalls.mount(source, target, flags=MS_BIND | MS_REC)
    kept = os.statvfs(target).f_flag & (MS_NOSUID | MS_NODEV | MS_NOEXEC)
    # Flags a user namespace may not clear must be repeated, or the remount is refused.
    syscalls.mount("none", target, flags=MS_BIND | MS_REMOUNT | MS_RDONLY | kept)


def show_read_only(source: str, target: str, empty: str) -> None:
    """Show the directory ``source`` at ``target``, read-only, without revealing its location to those who see the
    mount.

    A bind of an overlay's directory carries the overlay's options along, which in a container name the engine's own
    directories on the machine. Our own overlay (over ``empty``, because one layer alone is none) names only
    paths of this container. If that is not possible a bind is used, and the self-test reports what it reveals.
    """
    if layered(Path("/proc/self/mountinfo").read_text(), source):
        with contextlib.suppress(OSError):
            flags = MS_RDONLY | MS_NOSUID | MS_NODEV
            return syscalls.mount("overlay", target, "overlay", flags, f"lowerdir={source}:{empty}")
    return bind_read_only(source, target)


def layered(mountinfo: str, path: str) -> bool:
    """Whether ``path`` lies on an overlay with no directory mounted below it (an overlay of it would not show that;
    a file there is the engine's, such as its init). Pure except for checking what is a directory."""
    lines = [line.partition(" - ") for line in mountinfo.splitlines()]
    found = [(left.split()[4], right.split()[0]) for left, _, right in lines if right]
    # The innermost mount; of several at one point the last one covers the others.
    over = [(len(point), number) for number, (point, _) in enumerate(found) if f"{path}/".startswith(_slashed(point))]
    below = [point for point, _ in found if point.startswith(f"{path}/") and Path(point).is_dir()]
    return bool(over) and found[max(over)[1]][1] == "overlay" and not below


def _slashed(point: str) -> str:
    return point.rstrip("/") + "/"


def read_only_mounts(mountinfo: str, kinds: Sequence[str]) -> list[str]:
    """Mount points of these file system types that are mounted read-only."""
    found = []
    for line in mountinfo.splitlines():
        left, separator, right = line.partition(" - ")
        fields = left.split()
        if separator and right.split()[0] in kinds and "ro" in fields[5].split(","):
            found.append(fields[4])
    return found


def make_cgroups_writable() -> None:
    """Undo the read-only mount of cgroups by container runtimes, in our own mount namespace.

    Needs CAP_SYS_ADMIN. Only our own part of the tree is ever written to. Raises OSError when the kernel refuses
    (the mounts are locked); the machine's mounts are never touched.
    """
    blocked = read_only_mounts(Path("/proc/self/mountinfo").read_text(), ("cgroup", "cgroup2"))
    if blocked:
        enter_private_namespace()
    for point in blocked:
        syscalls.mount("none", point, flags=MS_BIND | MS_REMOUNT | MS_NOSUID | MS_NODEV | MS_NOEXEC)


def searchable_by_all(path: Path) -> bool:
    """Whether every user may traverse the directory ``path`` and all above it."""
    return first_blocker(path) is None


def first_blocker(path: Path, mode_of: Callable[[Path], int] | None = None) -> Path | None:
    """The topmost directory on the way to ``path``, including itself, that not everybody may search."""
    mode_of = mode_of or (lambda directory: directory.stat().st_mode)
    for directory in (*reversed(path.parents), path):
        mode = mode_of(directory)
        if stat.S_ISDIR(mode) and not mode & stat.S_IXOTH:
            return directory
    return None


def private_place(fallback: Path, needed: Iterable[Path], exists: Callable[[Path], bool] | None = None) -> Path:
    """Where to mount the container's private directory.

    A slot's bwrap runs under the slot's uid and must be able to traverse it for the life of the container, and it
    must not cover anything in ``needed``. So it is the first system directory that fits (the mount is invisible
    outside our mount namespace), whose permissions never change, unlike those of a state directory; else
    ``fallback``, if everybody can reach it. Raises FileNotFoundError if neither works.
    """
    exists = exists or (lambda path: path.is_dir() and searchable_by_all(path))
    keep = [*needed]
    for place in map(Path, _PLACES):
        if exists(place) and not any(place == path or place in path.parents for path in keep):
            return place
    if exists(fallback):
        return fallback
    raise FileNotFoundError(f"no directory every user can reach: tried {', '.join(_PLACES)}, {fallback}")


def mount_private(place: Path, uid: int) -> None:
    """The container's private tmpfs: readable by all, writable only by the supervisor."""
    mount_tmpfs(place, size_bytes=_PRIVATE_BYTES, mode=0o755, uid=uid)


@dataclass(frozen=True)
class Shown:
    """A directory the server must reach, and the topmost directory that blocks the way."""

    directory: Path
    blocker: Path


def import_directories() -> list[Path]:
    """Directories outside the interpreter's prefix that agentenv and its packages are imported from: its own, which is
    on no path in a checkout that is not installed, and those of PYTHONPATH."""
    named = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return [Path(__file__).resolve().parents[3], *(Path(text) for text in named if Path(text).is_absolute())]


def interpreter_directories() -> list[Path]:
    """Directories the running interpreter needs to run agentenv again."""
    prefixes = (sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix)
    paths = {Path(text) for text in prefixes} | {Path(text).resolve() for text in prefixes}
    paths |= {*import_directories(), Path(sys.executable).parent, Path(sys.executable).resolve().parent}
    return sorted(path for path in paths if path.is_dir())


def unreachable(directories: Iterable[Path]) -> list[Shown]:
    """Directories that another user cannot reach, outermost first, without repeats."""
    found: list[Shown] = []
    for directory in sorted(directories):
        blocker = first_blocker(directory)
        if blocker is not None and not any(shown.directory in (directory, *directory.parents) for shown in found):
            found.append(Shown(directory, blocker))
    return found


def show_to_everybody(shown: Sequence[Shown]) -> None:
    """Make these directories reachable in this (private!) mount namespace.

    For example, with a pyenv below a 0700 home the unprivileged server could not start its interpreter. An empty
    read-only tmpfs is mounted over each blocking directory, with just the needed directories bound read-only at
    their old paths. So the rest of that home is *less* visible than before, and no permission on disk is changed.
    """
    # Opened first: once its parent is covered, a directory has no path any more, only a descriptor.
    opened = [(item, os.open(item.directory, os.O_PATH | os.O_DIRECTORY)) for item in shown]
    try:
        for blocker in dict.fromkeys(item.blocker for item in shown):
            mount_tmpfs(blocker, size_bytes=1024 * 1024, mode=0o755, uid=0)
        for item, fd in opened:
            item.directory.mkdir(parents=True, exist_ok=True, mode=0o755)
            bind_read_only(f"/proc/self/fd/{fd}", str(item.directory))
        for blocker in dict.fromkeys(item.blocker for item in shown):
            if not any(item.directory == blocker for item in shown):
                flags = MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV
                syscalls.mount("none", str(blocker), flags=flags)
    finally:
        for _, fd in opened:
            os.close(fd)
