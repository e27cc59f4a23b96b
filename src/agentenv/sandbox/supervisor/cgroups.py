"""Creates, joins, empties and removes the cgroups that :mod:`agentenv.sandbox.supervisor.limits` plans."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from agentenv.sandbox.supervisor.limits import (
    CgroupLayout,
    CgroupPlan,
    Machine,
    Setting,
    delegation,
    layout_v1,
    own_directory_v2,
)

log = logging.getLogger(__name__)

_V2_WANTED = frozenset({"memory", "pids", "cpu"})
_V2_NEEDED = frozenset({"memory", "pids"})
_REMOVE_DEADLINE_S = 2.0


def discover(container: str) -> tuple[CgroupLayout | None, str]:
    """Find where this process can create cgroups, preparing v2 delegation; otherwise None and the reason.

    Call it before any namespace is created: pids must be the machine's own.
    """
    mountinfo = Path("/proc/self/mountinfo").read_text()
    own = Path("/proc/self/cgroup").read_text()
    second = own_directory_v2(mountinfo, own)
    reason = "no cgroup v2 hierarchy with memory and pids controllers"
    if second is not None:
        layout, reason = _discover_v2(*second, container)
        if layout is not None:
            return layout, ""
    first = layout_v1(mountinfo, own)
    if first is None:
        return None, reason
    usable = {name: parent for name, parent in first.parents.items() if _can_make(parent)}
    if not usable:
        return None, f"{next(iter(first.parents.values()))} is not writable"
    return CgroupLayout(1, usable), ""


def this_machine() -> Machine:
    """The cores that this process may run on, and the machine's memory."""
    return Machine(len(os.sched_getaffinity(0)), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def _can_make(parent: Path) -> bool:
    try:
        (parent / "agentenv").mkdir(exist_ok=True)
    except OSError:
        return False
    return os.access(parent / "agentenv", os.W_OK)


def _discover_v2(top: Path, own: Path, container: str) -> tuple[CgroupLayout | None, str]:
    """The nearest cgroup, from our own upwards, whose controllers we may delegate."""
    reason = f"{own} is not delegated to this user"
    for directory in (own, *own.parents):
        available = frozenset(_read(directory / "cgroup.controllers").split()) & _V2_WANTED
        if available >= _V2_NEEDED and os.access(directory, os.W_OK):
            enabled = frozenset(_read(directory / "cgroup.subtree_control").split()) & available
            # Delegating needs an empty cgroup; one above ours is used only as far as it does so
            # already: cgroups that are not ours are not reconfigured.
            usable = available if directory == own else enabled
            if usable >= _V2_NEEDED:
                try:
                    delegate(directory, container, usable)
                except OSError as error:
                    reason = f"cannot delegate {directory}: {error.strerror}"
                else:
                    return CgroupLayout(2, dict.fromkeys(sorted(usable), directory)), ""
        if directory == top:
            break
    return None, reason


def delegate(own: Path, container: str, controllers: frozenset[str]) -> None:
    """Apply :func:`limits.delegation` for ``own``. Raises OSError when the kernel refuses."""
    steps = delegation(own, container, controllers, is_real_root=not (own / "cgroup.type").exists())
    steps.subtree_control[-1].parent.mkdir(parents=True, exist_ok=True)
    already = frozenset(_read(steps.subtree_control[0]).split()) >= controllers
    if steps.leave is not None and not already:
        steps.leaf.mkdir(parents=True, exist_ok=True)
        for pid in _read(steps.leave / "cgroup.procs").split():
            with contextlib.suppress(ProcessLookupError):
                (steps.leaf / "cgroup.procs").write_text(pid)
    for file in steps.subtree_control[already:]:
        file.write_text(steps.enable)


def claim(bases: Iterable[Path]) -> None:
    """Create a container's directories, removing empty ones of the same name first.

    Raises FileExistsError when a process is in one: another container has the name.
    """
    for base in bases:
        base.parent.mkdir(exist_ok=True)
        if base.is_dir():
            tree = [base, *(Path(root) / name for root, names, _ in os.walk(base) for name in names)]
            if any(_read(directory / "cgroup.procs").split() for directory in tree):
                raise FileExistsError(errno.EEXIST, f"{base} is in use")
            remove_tree(base)
        base.mkdir(parents=True)


def make(plan: CgroupPlan) -> None:
    """Create a new, empty cgroup. Raises OSError: it could not be created, or an old one could not be removed."""
    for directory in plan.directories:
        try:
            directory.mkdir()
        except FileExistsError:
            directory.rmdir()  # fresh counters; fails with EBUSY while any process is in it
            directory.mkdir()
    for setting in plan.settings:
        _write(setting)


def _write(setting: Setting) -> None:
    try:
        fd = os.open(setting.file, os.O_WRONLY)
    except FileNotFoundError:
        if setting.required:
            raise
        return
    try:
        os.write(fd, setting.value.encode())
    except OSError as error:
        if setting.required:
            raise OSError(error.errno, f"writing {setting.value} to {setting.file}: {error.strerror}") from error
        log.warning("%s did not take %s: %s", setting.file, setting.value, error.strerror)
    finally:
        os.close(fd)


def join(plan: CgroupPlan) -> None:
    """Move the calling (single-threaded) process to the cgroup."""
    for file in plan.join_files:
        fd = os.open(file, os.O_WRONLY)
        os.write(fd, b"0")
        os.close(fd)


def members(plan: CgroupPlan) -> set[int]:
    """Pids in the cgroup, in any hierarchy; 0 stands for those invisible in our pid namespace."""
    return {int(pid) for file in plan.process_files for pid in _read(file).split()}


def kill(plan: CgroupPlan) -> None:
    """SIGKILL everything in the cgroup; atomically if the kernel has ``cgroup.kill`` (5.14)."""
    if plan.kill_file is not None:
        with contextlib.suppress(OSError):
            plan.kill_file.write_text("1")
            return
    _kill_all(members(plan))


def remove(plan: CgroupPlan) -> bool:
    """Remove the cgroup's directories; False while the kernel still counts a process in one."""
    return all(_remove_directory(directory) for directory in plan.directories)


def _remove_directory(directory: Path) -> bool:
    try:
        directory.rmdir()
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno not in (errno.EBUSY, errno.ENOTEMPTY):
            raise
        return False
    return True


def remove_tree(base: Path) -> bool:
    """Kill every process in ``base`` and below, then remove all of it. False when something remains after the
    deadline. For cgroups of dead containers; waits up to 2 s for the kernel."""
    deadline = time.monotonic() + _REMOVE_DEADLINE_S
    while base.is_dir():
        tree = [base, *(Path(root) / name for root, names, _ in os.walk(base) for name in names)]
        _kill_all({int(pid) for directory in tree for pid in _read(directory / "cgroup.procs").split()})
        removed = [_remove_directory(directory) for directory in reversed(tree)]
        if all(removed):
            break
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    _give_back(base.parent)
    return True


def _give_back(agentenv: Path) -> None:
    """Undo the delegation and remove ``agentenv`` itself when it contains no container."""
    if any(entry.is_dir() and entry.name != "outside" for entry in _entries(agentenv)):
        return
    leaf = agentenv / "outside"
    with contextlib.suppress(OSError):
        if leaf.is_dir():
            for directory in (agentenv, agentenv.parent):
                names = _read(directory / "cgroup.subtree_control").split()
                (directory / "cgroup.subtree_control").write_text(" ".join(f"-{name}" for name in names))
            for pid in _read(leaf / "cgroup.procs").split():
                (agentenv.parent / "cgroup.procs").write_text(pid)
            leaf.rmdir()
        agentenv.rmdir()


def _entries(directory: Path) -> list[Path]:
    try:
        return list(directory.iterdir())
    except OSError:
        return []


def _kill_all(pids: Iterable[int]) -> None:
    for pid in pids:
        if pid > 0:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
