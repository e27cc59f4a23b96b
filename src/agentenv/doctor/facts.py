"""Facts about this machine: read, not judged (that is :mod:`agentenv.doctor.rules`)."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from agentenv import apparmor, subordinate_ids
from agentenv.config import cache_dir, isolation_here, state_dir
from agentenv.deadlines import scaled
from agentenv.errors import SandboxUnavailableError
from agentenv.sandbox.slotagent.build import find_ripgrep, is_compiled
from agentenv.sandbox.supervisor.disk_layers import refusal
from agentenv.sandbox.supervisor.image_formats import may_not_gain_privileges
from agentenv.sandbox.supervisor.launch import trial
from agentenv.sandbox.supervisor.limits import CONTROLLERS, layout_v1, own_directory_v2
from agentenv.sandbox.supervisor.network import TUN, everybody_may_open
from agentenv.slots.backends.local_scope import make_scope

_CAP_SYS_ADMIN = 21
_PROGRAM_TIMEOUT_S = scaled(10)
_SLOT_PATH = "/usr/local/bin:/usr/bin:/bin"
SLOT_PROGRAMS = ("python3", "git", "pip")
"""Programs that models use most, besides the shell."""


@dataclass(frozen=True)
class Cgroups:
    """``writable``: the controllers in which this process may create groups below its own."""

    version: str = "none"
    writable: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Facts:
    """One machine as this process sees it. None means "could not be read"."""

    system: str = "Linux"
    kernel: str = ""
    python: tuple[int, int] = (0, 0)
    root: bool = False
    subordinate: subordinate_ids.Refusal | None = None
    """Why an ordinary user cannot be root of a namespace of subordinate ids; None if he can."""
    one_id_accepted: bool = False
    """That all slots share his one uid is accepted by name, in this environment."""
    sys_admin: bool = False
    userns_max: int | None = None
    userns_clone: bool | None = None
    userns_apparmor: bool | None = None
    bwrap_version: tuple[int, ...] | None = None
    bwrap_refusal: str | None = None
    """bwrap's message when it could not create namespaces; empty if it could; None if not tried."""
    compiler: str | None = None
    static_libc: bool = False
    programs_built: bool = False
    ripgrep: Path | SandboxUnavailableError | None = None
    """The program, or why there is none."""
    cgroups: Cgroups = field(default_factory=Cgroups)
    scope: frozenset[str] | None = None
    """The controllers in the scope that systemd makes for a container; None where a container gets none."""
    network_stacks: tuple[str, ...] = ()
    tun_open: bool = False
    slot_programs: frozenset[str] = frozenset()
    """Those of :data:`SLOT_PROGRAMS` that slots have."""
    tmux: bool = False
    bash_static: bool = False
    skopeo: bool = False
    no_new_privileges: bool = False
    disk_refusal: str = ""
    """Why slots with images cannot keep what they write on this machine's disk; empty if they can."""
    shm_bytes: int | None = None
    open_files_hard: int | None = None
    """None: unlimited."""
    processes_hard: int | None = None
    terminals: int | None = None
    """Maximum number of terminals on the machine, without those reserved for administrators."""
    state_dir: str = ""
    state_dir_writable: bool = False
    state_free_bytes: int | None = None
    memory_available_bytes: int | None = None
    stale_containers: tuple[str, ...] = ()


def gather() -> Facts:
    """Read everything; starts ``bwrap`` once with a harmless command. Takes well under a second."""
    apparmor.take_profile()  # as a container's start does
    state = state_dir()
    existing = _nearest_existing(state)
    compiler = shutil.which("cc")
    bwrap = shutil.which("bwrap")
    scope = make_scope("doctor", detached=False)
    return Facts(
        system=platform.system(),
        kernel=platform.release(),
        python=sys.version_info[:2],
        root=os.geteuid() == 0,
        subordinate=None if os.geteuid() == 0 else subordinate_ids.refusal_when_tried(),
        one_id_accepted=isolation_here("auto") == "user",
        sys_admin=bool(_effective_capabilities() >> _CAP_SYS_ADMIN & 1),
        userns_max=_number("/proc/sys/user/max_user_namespaces"),
        userns_clone=_switch("/proc/sys/kernel/unprivileged_userns_clone"),
        userns_apparmor=_switch("/proc/sys/kernel/apparmor_restrict_unprivileged_userns"),
        bwrap_version=_version(bwrap) if bwrap else None,
        bwrap_refusal=_try_bwrap(bwrap) if bwrap else None,
        compiler=compiler,
        static_libc=compiler is not None and Path(_output_of([compiler, "-print-file-name=libc.a"])).is_absolute(),
        programs_built=is_compiled(cache_dir()),
        ripgrep=_ripgrep(),
        cgroups=read_cgroups(_text("/proc/self/mountinfo"), _text("/proc/self/cgroup")),
        scope=scope.controllers if scope else None,
        network_stacks=tuple(name for name in ("slirp4netns",) if shutil.which(name)),
        tun_open=everybody_may_open(TUN),
        slot_programs=frozenset(name for name in SLOT_PROGRAMS if shutil.which(name, path=_SLOT_PATH)),
        tmux=shutil.which("tmux") is not None,
        bash_static=shutil.which("bash-static") is not None,
        skopeo=shutil.which("skopeo") is not None,
        no_new_privileges=may_not_gain_privileges(_text("/proc/self/status")),
        disk_refusal=_disk_refusal() if os.geteuid() == 0 else "",
        shm_bytes=_free_bytes(Path("/dev/shm")),  # noqa: S108 - looked at, not written to
        open_files_hard=_hard_limit(resource.RLIMIT_NOFILE),
        processes_hard=_hard_limit(resource.RLIMIT_NPROC),
        terminals=_terminals(),
        state_dir=str(state),
        state_dir_writable=os.access(existing, os.W_OK),
        state_free_bytes=_free_bytes(existing),
        memory_available_bytes=_available_memory(_text("/proc/meminfo")),
        stale_containers=current_stale_containers(state),
    )


def read_cgroups(mountinfo: str, own: str) -> Cgroups:
    """``mountinfo`` and ``own`` are the texts of /proc/self/mountinfo and /proc/self/cgroup. Creates nothing."""
    first = layout_v1(mountinfo, own)
    second = own_directory_v2(mountinfo, own)
    if second is not None:
        found = set(CONTROLLERS) & set(_text(str(second[1] / "cgroup.controllers")).split())
        if found:
            return Cgroups("v2", frozenset(found) if os.access(second[1], os.W_OK) else frozenset())
    if first is not None:
        return Cgroups("v1", frozenset(name for name, parent in first.parents.items() if os.access(parent, os.W_OK)))
    return Cgroups()


def stale_containers(state: Path, locks: str) -> tuple[str, ...]:
    """Names of directories whose ``lock`` is not held: of containers, and of backends that launched them.

    ``locks`` is the text of /proc/locks: reading it disturbs no holder, unlike trying the lock.
    """
    held = {line.split(":")[-1].split()[0] for line in locks.splitlines() if "FLOCK" in line}
    found = {lock: _inode(lock) for place in swept_directories(state) for lock in place.glob("*/lock")}
    return tuple(sorted(lock.parent.name for lock, inode in found.items() if inode and str(inode) not in held))


def _inode(path: Path) -> int | None:
    """None for a file that has just been removed."""
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None


def swept_directories(state: Path) -> tuple[Path, Path]:
    """Directories with leftovers of dead processes: the containers' own data, and their launch files."""
    return state / "containers", state


def current_stale_containers(state: Path) -> tuple[str, ...]:
    """The same, from the kernel's current state."""
    return stale_containers(state, _text("/proc/locks"))


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _number(path: str) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _switch(path: str) -> bool | None:
    number = _number(path)
    return None if number is None else bool(number)


def _effective_capabilities() -> int:
    match = re.search(r"^CapEff:\s*([0-9a-f]+)", _text("/proc/self/status"), re.MULTILINE)
    return int(match[1], 16) if match else 0


def _run(argv: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        argv,
        check=False,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=_PROGRAM_TIMEOUT_S,
        cwd="/",
    )


def _output_of(argv: list[str]) -> str:
    try:
        return _run(argv).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _version(bwrap: str) -> tuple[int, ...] | None:
    match = re.search(r"(\d+(?:\.\d+)+)", _output_of([bwrap, "--version"]))
    return tuple(int(part) for part in match[1].split(".")) if match else None


def _try_bwrap(bwrap: str) -> str | None:
    """Namespaces and a fresh /proc, which stock Docker and hardened kernels forbid, as a slot gets them."""
    argv = trial(bwrap, ["true"], cache_dir())
    if argv is None:
        return None
    try:
        done = _run(argv)
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return "" if done.returncode == 0 else done.stderr.strip() or f"exit code {done.returncode}"


def _ripgrep() -> Path | SandboxUnavailableError:
    try:
        return find_ripgrep()
    except SandboxUnavailableError as error:
        return error


def _hard_limit(which: int) -> int | None:
    hard = resource.getrlimit(which)[1]
    return None if hard == resource.RLIM_INFINITY else hard


def _nearest_existing(path: Path) -> Path:
    return next(candidate for candidate in (path, *path.parents) if candidate.exists())


def _disk_refusal() -> str:
    return refusal(_nearest_existing(cache_dir() / "disk").resolve(), _text("/proc/self/mountinfo"))


def _terminals() -> int | None:
    most, kept = _number("/proc/sys/kernel/pty/max"), _number("/proc/sys/kernel/pty/reserve")
    return None if most is None else most - (kept or 0)


def _free_bytes(path: Path) -> int | None:
    try:
        stat = os.statvfs(path)
    except OSError:
        return None
    return stat.f_bavail * stat.f_frsize


def _available_memory(meminfo: str) -> int | None:
    match = re.search(r"^MemAvailable:\s*(\d+) kB", meminfo, re.MULTILINE)
    return int(match[1]) * 1024 if match else None
