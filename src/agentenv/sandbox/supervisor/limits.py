"""Plans the values of cgroup files, for cgroup v1 and v2. Pure: nothing here touches a file.

A container's cgroups are ``agentenv/<container>/slot-K``, ``image-K`` while slot K has an image, and ``server`` beside
them, below the cgroup it was started in, so the limits of that cgroup still apply.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from agentenv.errors import ConfigError
from agentenv.sandbox.limit_watch import LimitFiles
from agentenv.wire.roots import RootSpec
from agentenv.wire.spec import SlotLimits

OWN_PROCESSES = 2
"""The slot's bwrap and agent are in its cgroup too and do not count against the limit."""
SERVER_CPU_WEIGHT = 1_000
"""Equal to ten slots: a server starved by its slots would make every slot look slow."""
_SWAP_BYTES = 1024 * 1024
"""How much memory and swap together may exceed memory with cgroup v1: more than the kernel charges at once."""
_CPU_PERIOD_US = 100_000
"""The kernel's default. A quota of less than 1 ms a period it refuses: at least 10 thousandths of a core."""
_ROOT_NAME = "agentenv"
CONTROLLERS = ("memory", "pids", "cpu")
"""Those that limit a slot."""


@dataclass(frozen=True)
class CgroupLayout:
    """Where cgroups can be created: ``parents`` maps a controller to the directory of this process's cgroup (v2:
    one directory for all)."""

    version: int
    parents: Mapping[str, Path]

    def base(self, container: str) -> tuple[Path, ...]:
        """The container's directory in each hierarchy, in a fixed order and without repeats."""
        return tuple(dict.fromkeys(parent / _ROOT_NAME / container for parent in self.parents.values()))

    @property
    def controllers(self) -> frozenset[str]:
        """The controllers that can be used here."""
        return frozenset(self.parents)


@dataclass(frozen=True)
class Setting:
    """One value for one cgroup file. ``required`` False: a kernel without the file is acceptable."""

    file: Path
    value: str
    required: bool = True


@dataclass(frozen=True)
class CgroupPlan:
    """One cgroup: directories to create, values to write, how a process joins, what to read."""

    directories: tuple[Path, ...]
    settings: tuple[Setting, ...]
    join_files: tuple[Path, ...]
    """Writing ``0`` to each puts the writer in the cgroup. v1 uses ``tasks``: unlike
    ``cgroup.procs`` it does not wait for an RCU grace period (up to 13 ms measured)."""
    kill_file: Path | None
    pids_limit: Path | None
    memory_limit: Path | None
    version: int
    cpu: Path | None = None
    """The directory that counts CPU time."""

    @property
    def process_files(self) -> tuple[Path, ...]:
        """Files that list the pids in the cgroup; empty means that no process of the slot is alive."""
        return tuple(directory / "cgroup.procs" for directory in self.directories)


def parse_mounts(mountinfo: str) -> list[tuple[str, PurePosixPath, Path, frozenset[str]]]:
    """(type, root, mount point, super options) of each cgroup mount in a ``/proc/self/mountinfo``."""
    found = []
    for line in mountinfo.splitlines():
        left, separator, right = line.partition(" - ")
        fields, kinds = left.split(), right.split()
        if separator and kinds and kinds[0] in ("cgroup", "cgroup2"):
            found.append((kinds[0], PurePosixPath(fields[3]), Path(fields[4]), frozenset(kinds[2].split(","))))
    return found


def _own_directory(root: PurePosixPath, mount_point: Path, own: PurePosixPath) -> Path | None:
    """The directory of cgroup ``own`` when a mount shows ``root`` and everything below it."""
    if root != own and root not in own.parents:
        return None  # mounted from outside our cgroup namespace: not ours
    directory = mount_point / own.relative_to(root)
    parts = directory.parts
    return Path(*parts[: parts.index(_ROOT_NAME)]) if _ROOT_NAME in parts else directory


def layout_v1(mountinfo: str, self_cgroup: str) -> CgroupLayout | None:
    """The v1 hierarchies of memory, pids and cpu of this process; None if there are none."""
    own: dict[str, PurePosixPath] = {}
    for line in self_cgroup.splitlines():
        _, controllers, path = line.split(":", 2)
        own.update((name, PurePosixPath(path)) for name in controllers.split(","))
    parents: dict[str, Path] = {}
    for kind, root, point, options in parse_mounts(mountinfo):
        for controller in CONTROLLERS:
            if kind == "cgroup" and controller in options and controller in own:
                directory = _own_directory(root, point, own[controller])
                if directory is not None:
                    parents.setdefault(controller, directory)
    ordered = {name: parents[name] for name in CONTROLLERS if name in parents}
    return CgroupLayout(1, ordered) if ordered else None


def own_directory_v2(mountinfo: str, self_cgroup: str) -> tuple[Path, Path] | None:
    """(mount point, directory of this process's cgroup) of cgroup v2, if it is mounted."""
    own = next((line[3:] for line in self_cgroup.splitlines() if line.startswith("0::")), None)
    if own is None:
        return None
    for kind, root, point, _ in parse_mounts(mountinfo):
        if kind == "cgroup2":
            directory = _own_directory(root, point, PurePosixPath(own))
            if directory is not None:
                return point, directory
    return None


@dataclass(frozen=True)
class Machine:
    """What the container has of its machine: the most that one slot could ever use."""

    cores: int
    memory_bytes: int

    def refusal(self, root: RootSpec) -> ConfigError | None:
        """Why no slot here can have what this root asks for; None if one can. A limit that is above the machine is
        no limit, and what counts on it would run with less."""
        if root.cpu_millis > self.cores * 1000:
            return ConfigError(
                "root.cpu_millis",
                f"{root.cpu_millis / 1000:g} cores are more than this machine has ({self.cores})",
                next_step="use fewer, or use a larger machine",
            )
        if root.memory_bytes > self.memory_bytes:
            return ConfigError(
                "root.memory_bytes",
                f"{root.memory_bytes} bytes are more than this machine has ({self.memory_bytes})",
                next_step="reserve less, or use a larger machine",
            )
        return None


def slot_plan(layout: CgroupLayout, container: str, name: str, limits: SlotLimits, cpu_millis: int = 0) -> CgroupPlan:
    """The cgroup ``name`` of one slot. ``cpu_millis``: the most CPU time that it gets, in thousandths of a core; 0: no
    limit."""
    plan = _plan(layout, container, name, limits.processes + OWN_PROCESSES, limits, limits.cpu_weight)
    if cpu_millis and "cpu" in layout.parents:
        directory = layout.parents["cpu"] / _ROOT_NAME / container / name
        plan = replace(plan, settings=(*plan.settings, *_cpu_most(layout.version, directory, cpu_millis)))
    return plan


def server_plan(layout: CgroupLayout, container: str) -> CgroupPlan:
    """The cgroup of the server: no limits of its own, a higher weight than a slot."""
    return _plan(layout, container, "server", None, None, SERVER_CPU_WEIGHT)


def _plan(
    layout: CgroupLayout, container: str, name: str, processes: int | None, limits: SlotLimits | None, weight: int
) -> CgroupPlan:
    at = {controller: parent / _ROOT_NAME / container / name for controller, parent in layout.parents.items()}
    directories = tuple(dict.fromkeys(at.values()))
    settings: list[Setting] = []
    if processes is not None and "pids" in at:
        settings.append(Setting(at["pids"] / "pids.max", str(processes)))
    if limits is not None and "memory" in at:
        settings.extend(_memory_settings(layout.version, at["memory"], limits.memory_bytes))
    if "cpu" in at:
        settings.append(_cpu_setting(layout.version, at["cpu"], weight))
    first = layout.version == 1
    memory = at.get("memory")
    return CgroupPlan(
        directories=directories,
        settings=tuple(settings),
        join_files=tuple(directory / ("tasks" if first else "cgroup.procs") for directory in directories),
        kill_file=None if first else directories[0] / "cgroup.kill",
        pids_limit=at["pids"] / "pids.max" if "pids" in at else None,
        memory_limit=memory / ("memory.limit_in_bytes" if first else "memory.max") if memory else None,
        version=layout.version,
        cpu=at.get("cpu") if first else directories[0],
    )


def _memory_settings(version: int, directory: Path, memory_bytes: int) -> list[Setting]:
    limit = str(memory_bytes)
    if version == 1:
        # Memory plus swap must not be below memory, so it is written second; kernels without swap
        # accounting do not have the file. It is a little above: the kernel looks at it first, and does not
        # always count how often it was met, which distinguishes a slot's own limit from one above it.
        return [
            Setting(directory / "memory.limit_in_bytes", limit),
            Setting(directory / "memory.memsw.limit_in_bytes", str(memory_bytes + _SWAP_BYTES), required=False),
            # The buffers of TCP and UDP, which are counted apart, and only once they have a limit.
            Setting(directory / "memory.kmem.tcp.limit_in_bytes", limit, required=False),
        ]
    return [
        Setting(directory / "memory.max", limit),
        Setting(directory / "memory.swap.max", "0", required=False),
        Setting(directory / "memory.oom.group", "0", required=False),
    ]


def _cpu_setting(version: int, directory: Path, weight: int) -> Setting:
    if version == 1:
        return Setting(directory / "cpu.shares", str(max(2, weight * 1024 // 100)), required=False)
    return Setting(directory / "cpu.weight", str(max(1, min(weight, 10_000))), required=False)


def _cpu_most(version: int, directory: Path, cpu_millis: int) -> list[Setting]:
    quota_us = cpu_millis * _CPU_PERIOD_US // 1000
    if version == 1:
        return [
            Setting(directory / "cpu.cfs_period_us", str(_CPU_PERIOD_US)),
            Setting(directory / "cpu.cfs_quota_us", str(quota_us)),
        ]
    return [Setting(directory / "cpu.max", f"{quota_us} {_CPU_PERIOD_US}")]


@dataclass(frozen=True)
class Delegation:
    """Steps to delegate controllers in cgroup v2, where a cgroup with processes may not delegate ("no internal
    processes"): first the processes in ``leave`` move to ``leaf``, then each of ``subtree_control`` is written
    ``+memory +pids …`` from the top."""

    leave: Path | None
    leaf: Path
    subtree_control: tuple[Path, ...]
    enable: str


def delegation(own: Path, container: str, controllers: frozenset[str], *, is_real_root: bool) -> Delegation:
    """The steps below ``own``. The real root cgroup may hold processes and controllers at once."""
    agentenv = own / _ROOT_NAME
    return Delegation(
        leave=None if is_real_root else own,
        leaf=agentenv / "outside",
        subtree_control=tuple(d / "cgroup.subtree_control" for d in (own, agentenv, agentenv / container)),
        enable=" ".join(f"+{name}" for name in sorted(controllers)),
    )


def limit_files(plan: CgroupPlan | None, roots: int = 1) -> LimitFiles:
    """Location of the counters of a slot with this plan, and so many roots."""
    if plan is None:
        return LimitFiles()
    files = (plan.memory_limit and plan.memory_limit.parent, plan.pids_limit and plan.pids_limit.parent, plan.cpu)
    memory, pids, cpu = (None if file is None else str(file) for file in files)
    return LimitFiles(plan.version, memory, pids, cpu, OWN_PROCESSES * roots)
