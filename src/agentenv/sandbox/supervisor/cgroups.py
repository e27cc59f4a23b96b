"""Creates, joins, empties and removes the cgroups that :mod:`agentenv.sandbox.supervisor.limits` plans."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from agentenv.deadlines import scaled
from agentenv.sandbox.supervisor.limits import (
    CONTROLLERS,
    CgroupLayout,
    CgroupPlan,
    Delegation,
    Machine,
    Setting,
    delegation,
    layout_v1,
    own_directory_v2,
)

log = logging.getLogger(__name__)

_V2_WANTED = frozenset(CONTROLLERS)
_V2_NEEDED = frozenset({"memory", "pids"})
_REMOVE_DEADLINE_S = scaled(2.0)
_BUSY_DEADLINE_S = scaled(10.0)
"""A killed process is counted until it has let go of its namespaces, which takes seconds on a busy machine."""
_PAUSE_S = 0.005

Record = Callable[[tuple[Path, ...]], None]
"""Is called with a container's directories."""


def claim(container: str, record: Record) -> tuple[CgroupLayout | None, str]:
    """Create a container's directories where this process may, in cgroup v2 with the controllers delegated to them;
    otherwise None and the reason. :func:`remove_tree` undoes it.

    ``record`` is called before they are created, so that a sweep finds them. Call this before any namespace is created:
    pids must be the machine's own. Raises FileExistsError when a process is in one: another container has the name.
    """
    mountinfo = Path("/proc/self/mountinfo").read_text()
    own = Path("/proc/self/cgroup").read_text()
    second = own_directory_v2(mountinfo, own)
    reason = "no cgroup v2 hierarchy with memory and pids controllers"
    if second is not None:
        layout, reason = _claim_v2(*second, container, record)
        if layout is not None:
            return layout, ""
    first = layout_v1(mountinfo, own)
    if first is None:
        return None, reason
    _record_unused(first.base(container), record)
    usable = {name: parent for name, parent in first.parents.items() if _can_make(parent / "agentenv" / container)}
    if not usable:
        return None, f"{next(iter(first.parents.values()))} is not writable"
    return CgroupLayout(1, usable), ""


def this_machine() -> Machine:
    """The cores that this process may run on, and the machine's memory."""
    return Machine(len(os.sched_getaffinity(0)), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def _record_unused(bases: tuple[Path, ...], record: Record) -> None:
    for base in bases:
        if any(_read(directory / "cgroup.procs").split() for directory in _tree(base)):
            raise FileExistsError(errno.EEXIST, f"{base} is in use")
    record(bases)


def _can_make(base: Path) -> bool:
    try:
        base.parent.mkdir(exist_ok=True)
        base.mkdir(exist_ok=True)
    except OSError:
        return False
    return os.access(base, os.W_OK)


def _claim_v2(top: Path, own: Path, container: str, record: Record) -> tuple[CgroupLayout | None, str]:
    """In the nearest cgroup, from our own upwards, whose controllers we may delegate."""
    reason = f"{own} is not delegated to this user"
    for directory in (own, *(parent for parent in own.parents if parent.is_relative_to(top))):
        usable = _usable(directory, own=directory == own)
        if usable >= _V2_NEEDED and os.access(directory, os.W_OK):
            layout = CgroupLayout(2, dict.fromkeys(sorted(usable), directory))
            _record_unused(layout.base(container), record)
            try:
                delegate(directory, container, usable)
            except OSError as error:
                reason = f"cannot delegate {directory}: {error.strerror}"
                remove_tree(directory / "agentenv" / container)
                record(())
            else:
                return layout, ""
    return None, reason


def _usable(directory: Path, *, own: bool) -> frozenset[str]:
    """The controllers that a container in this cgroup can have. Delegating needs an empty cgroup; one above ours is
    used only as far as it does so already: cgroups that are not ours are not reconfigured."""
    names = _read(directory / "cgroup.controllers").split()
    return _V2_WANTED.intersection(names if own else _read(directory / "cgroup.subtree_control").split())


def delegate(own: Path, container: str, controllers: frozenset[str]) -> None:
    """Apply :func:`limits.delegation` for ``own``: create the container's directory with these controllers. Raises
    OSError when the kernel refuses."""
    steps = delegation(own, container, controllers, is_real_root=not (own / "cgroup.type").exists())
    _repeat(lambda: _delegate(steps, controllers))


def _delegate(steps: Delegation, controllers: frozenset[str]) -> None:
    # First, so that a container that ends during this sees that it is not the last one.
    steps.subtree_control[-1].parent.mkdir(parents=True, exist_ok=True)
    already = frozenset(_read(steps.subtree_control[0]).split()) >= controllers
    if steps.leave is not None and not already:
        steps.leaf.mkdir(exist_ok=True)
        _move(steps.leave, steps.leaf)
    for file in steps.subtree_control[already:]:
        file.write_text(steps.enable)


def _move(source: Path, target: Path) -> None:
    """Move every process. Raises PermissionError: some are of another pid namespace."""
    pids = _read(source / "cgroup.procs").split()
    if "0" in pids:
        raise PermissionError(errno.EPERM, "processes of another pid namespace are in it")
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            (target / "cgroup.procs").write_text(pid)


def _repeat(step: Callable[[], None]) -> None:
    """Repeat ``step`` until the kernel accepts it, for up to 10 s: processes start and end, and containers
    next to ours delegate the same controllers, give them back, and remove directories."""
    deadline = time.monotonic() + _BUSY_DEADLINE_S
    while True:
        try:
            step()
        except OSError as error:
            if error.errno not in (errno.EBUSY, errno.ENOENT, errno.ENODEV) or time.monotonic() > deadline:
                raise
        else:
            return
        time.sleep(_PAUSE_S)


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
        log.warning("%s does not accept %s: %s", setting.file, setting.value, error.strerror)
    finally:
        os.close(fd)


def join(plan: CgroupPlan) -> None:
    """Move the calling (single-threaded) process to the cgroup."""
    for file in plan.join_files:
        fd = os.open(file, os.O_WRONLY)
        os.write(fd, b"0")
        os.close(fd)


def members(plan: CgroupPlan) -> set[int]:
    """Pids in the cgroup, in any hierarchy; 0 for those invisible in our pid namespace."""
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
    """Kill every process in ``base`` and below, then remove all of it; with the last container, the processes that made
    room for the delegation move back. False when something remains after 2 s. Those processes are waited for for up to
    10 s.

    Call it in the pid namespace of :func:`claim`: pids of others read as 0, and are neither killed nor moved.
    """
    deadline = time.monotonic() + _REMOVE_DEADLINE_S
    while tree := _tree(base):
        _kill_all({int(pid) for directory in tree for pid in _read(directory / "cgroup.procs").split()})
        removed = [_remove_directory(directory) for directory in reversed(tree)]
        if all(removed):
            break
        if time.monotonic() > deadline:
            return False
        time.sleep(_PAUSE_S)
    try:
        _repeat(lambda: _give_back(base.parent))
    except OSError as error:
        log.warning("controllers delegated to %s cannot be revoked: %s", base.parent, error.strerror)
    return True


def _give_back(agentenv: Path) -> None:
    """Undo the delegation and remove ``agentenv`` itself when it contains no container."""
    names = {entry.name for entry in _entries(agentenv) if entry.is_dir()}
    if not agentenv.is_dir() or names - {"outside"}:
        return
    if names:
        own, leaf = agentenv.parent, agentenv / "outside"
        for directory in (agentenv, own):
            enabled = _read(directory / "cgroup.subtree_control").split()
            (directory / "cgroup.subtree_control").write_text(" ".join(f"-{name}" for name in enabled))
        _move(leaf, own)
        leaf.rmdir()
    agentenv.rmdir()


def _tree(base: Path) -> list[Path]:
    """``base`` and every directory below it, from the top; empty where there is none."""
    return [Path(root) for root, _, _ in os.walk(base)]


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
