"""Judges the facts: one rule per line of the doctor's table. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from agentenv import apparmor
from agentenv.config import ContainerSettings
from agentenv.doctor.facts import SLOT_PROGRAMS, Facts
from agentenv.errors import SandboxUnavailableError
from agentenv.sandbox.supervisor.image_formats import NO_NEW_PRIVILEGES
from agentenv.sandbox.supervisor.isolation import MAX_TERMINALS, bwrap_cure
from agentenv.sandbox.supervisor.limits import CONTROLLERS

MIB = 1024 * 1024
_WHERE_LIMITS = "in /etc/security/limits.conf, or LimitNOFILE= / LimitNPROC= of the service"


class Level(IntEnum):
    """Severity of a finding; the doctor's exit code is the greatest."""

    ok = 0
    weaker = 1
    broken = 2


@dataclass(frozen=True)
class Finding:
    """One line of the table. ``cure`` is empty if nothing is to be done; ``commands`` if no shell command cures it."""

    name: str
    level: Level
    detail: str
    cure: str = ""
    commands: tuple[str, ...] = ()


def judge(facts: Facts) -> list[Finding]:
    """Apply every rule, in the order of the table."""
    return [rule(facts) for rule in RULES]


def worst(findings: list[Finding]) -> Level:
    """The greatest severity found, ok if there is none."""
    return max((finding.level for finding in findings), default=Level.ok)


def _install(*packages: str) -> tuple[str, ...]:
    return ("apt-get update", f"apt-get install -y {' '.join(packages)}")


def _system(facts: Facts) -> Finding:
    number = tuple(int(part) for part in re.findall(r"\d+", facts.kernel)[:2])
    if facts.system != "Linux":
        return Finding("kernel", Level.broken, f"{facts.system}: slots need Linux", "run agentenv in a Linux machine")
    if number < (5, 6):
        return Finding("kernel", Level.broken, f"{facts.kernel}: openat2 needs 5.6", "install a newer kernel")
    if number < (5, 12):
        return Finding("kernel", Level.ok, f"{facts.kernel}: plain slots; those with images need 5.12")
    return Finding("kernel", Level.ok, facts.kernel)


def _python(facts: Facts) -> Finding:
    version = ".".join(map(str, facts.python))
    if facts.python < (3, 11):
        return Finding("python", Level.broken, f"{version}, needs 3.11", "make setup PYTHON=/path/to/python3.11")
    return Finding("python", Level.ok, version)


def _privilege(facts: Facts) -> Finding:
    if facts.root and facts.sys_admin:
        return Finding("isolation", Level.ok, "full: root with CAP_SYS_ADMIN, a uid and cgroup per slot")
    if facts.root:
        return Finding(
            "isolation",
            Level.broken,
            "root without CAP_SYS_ADMIN: neither full nor user isolation is possible",
            "grant the container SYS_ADMIN, or start as an ordinary user",
        )
    if facts.subordinate is None:
        return Finding("isolation", Level.ok, "full: a uid per slot, of this user's subordinate ids")
    default = "" if facts.one_id_accepted else "; slots start only if you accept this explicitly"
    accept = "AGENTENV_ISOLATION=user in the environment, isolation='user' in Python, or --isolation user"
    return Finding(
        "isolation",
        Level.weaker if facts.one_id_accepted else Level.broken,
        f"user: not root, so all slots share one uid behind user namespaces, and none has an image{default}: "
        f"{facts.subordinate.problem}",
        f"as root, for one uid per slot and slots with images: see below; or accept this: {accept}"
        if facts.subordinate.cures
        else f"start as root for one uid per slot, or accept this: {accept}",
        facts.subordinate.cures,
    )


def _user_namespaces(facts: Facts) -> Finding:
    """Every slot needs one. Root makes it with the right to, so that only their number can stop it. What was tried
    decides, not the settings: a profile may allow bwrap what is closed for others."""
    if facts.bwrap_refusal == "":
        return Finding("user namespaces", Level.ok, "allowed")
    closed = (
        (facts.userns_max == 0, "user.max_user_namespaces is 0", "sysctl -w user.max_user_namespaces=15000"),
        (
            facts.userns_clone is False and not facts.root,
            "kernel.unprivileged_userns_clone is 0",
            "sysctl -w kernel.unprivileged_userns_clone=1",
        ),
        (
            facts.userns_apparmor is True and not facts.root,
            "AppArmor restricts user namespaces",
            apparmor.install_command(),
        ),
    )
    for holds, detail, command in closed:
        if holds:
            return Finding("user namespaces", Level.broken, detail, "allow them", (command,))
    return Finding("user namespaces", Level.ok, "no setting forbids them")


def _bwrap(facts: Facts) -> Finding:
    if facts.bwrap_version is None and facts.bwrap_refusal is not None:  # it exists
        reason = facts.bwrap_refusal or "it reports no version"
        return Finding(
            "bubblewrap", Level.broken, f"bwrap does not run: {reason}", "reinstall it", _install("bubblewrap")
        )
    if facts.bwrap_version is None:
        return Finding(
            "bubblewrap", Level.broken, "bwrap is not installed", "install bubblewrap", _install("bubblewrap")
        )
    version = ".".join(map(str, facts.bwrap_version))
    if facts.bwrap_version < (0, 8):
        return Finding(
            "bubblewrap", Level.broken, f"{version}: --disable-userns needs 0.8", "install bubblewrap >= 0.8"
        )
    if facts.bwrap_refusal:
        return Finding(
            "bubblewrap",
            Level.broken,
            f"{version} cannot make namespaces here: {facts.bwrap_refusal}",
            bwrap_cure(facts.bwrap_refusal)
            or "in a container: SYS_ADMIN, SETUID, SETGID, SETPCAP and KILL, and a seccomp profile that lets it mount",
        )
    return Finding("bubblewrap", Level.ok, version)


def _compiler(facts: Facts) -> Finding:
    if facts.programs_built:
        return Finding("slot agent", Level.ok, "compiled")
    if facts.compiler is None or not facts.static_libc:
        lacking = "no C compiler" if facts.compiler is None else "no static C library"
        return Finding(
            "slot agent",
            Level.broken,
            f"{lacking} to compile it",
            "install a compiler once",
            _install("gcc", "libc6-dev"),
        )
    return Finding("slot agent", Level.ok, f"will be compiled with {facts.compiler}")


def _ripgrep(facts: Facts) -> Finding:
    if isinstance(facts.ripgrep, SandboxUnavailableError):
        return Finding("ripgrep", Level.broken, facts.ripgrep.message, facts.ripgrep.next_step)
    return Finding("ripgrep", Level.ok, f"{facts.ripgrep}, which the tool search runs")


def _cgroups(facts: Facts) -> Finding:
    groups, scope = facts.cgroups, facts.scope
    lacking = set(CONTROLLERS) - (groups.writable if scope is None else scope)
    if not lacking:
        where = "" if scope is None else ", in a scope that systemd makes for each container"
        return Finding("cgroups", Level.ok, f"{groups.version}: memory, pids and cpu per slot{where}")
    if groups.version == "v1" and facts.root:
        # No unit delegates these. Debian 13's kernel has no memory controller for them any more.
        cure = "boot with cgroup v2: no systemd.unified_cgroup_hierarchy=0 in the kernel's command line"
    elif facts.root:
        cure = "Delegate=yes in the [Service] section of this unit (systemd-run -p Delegate=yes …), or writable cgroups"
    else:
        cure = "start as root, or in a delegated cgroup (systemd-run --user --scope -p Delegate=yes …)"
    detail = f"{groups.version}: no writable {', '.join(sorted(lacking))}; rlimits bound each process, not the slot"
    return Finding("cgroups", Level.weaker, detail, cure)


def _network(facts: Facts) -> Finding:
    if facts.network_stacks and not facts.tun_open:
        return Finding(
            "network in a slot",
            Level.weaker,
            "off; allow_network is not possible: not every user may open /dev/net/tun, which udev normally allows",
            "modprobe tun, chmod 0666 /dev/net/tun",
        )
    if facts.network_stacks:
        return Finding("network in a slot", Level.ok, f"off by default; {facts.network_stacks[0]} when enabled")
    return Finding(
        "network in a slot",
        Level.weaker,
        "off; allow_network is not possible",
        "install slirp4netns",
        _install("slirp4netns"),
    )


def _fast_shell(facts: Facts) -> Finding:
    if facts.bash_static:
        return Finding("fast shell", Level.ok, "bash-static, used if its version is the same as that of bash")
    return Finding(
        "fast shell",
        Level.weaker,
        "bash-static is not installed: everything works, but each call takes about 0.4 ms more CPU time",
        "install bash-static",
        _install("bash-static"),
    )


def _slot_programs(facts: Facts) -> Finding:
    missing = [name for name in SLOT_PROGRAMS if name not in facts.slot_programs]
    if not missing:
        return Finding("programs in slots", Level.ok, ", ".join(SLOT_PROGRAMS))
    detail = f"not installed in /usr: {', '.join(missing)}"
    if missing == ["pip"]:
        return Finding("programs in slots", Level.ok, f"{detail} (apt-get install python3-pip)")
    packages = [name for name in missing if name != "pip"]
    return Finding("programs in slots", Level.weaker, detail, f"install {' and '.join(packages)}", _install(*packages))


def _tmux(facts: Facts) -> Finding:
    if facts.tmux:
        return Finding("tmux", Level.ok, "installed")
    return Finding(
        "tmux", Level.weaker, "not installed: models cannot use it in a slot", "install tmux", _install("tmux")
    )


def _limits(facts: Facts) -> Finding:
    files = facts.open_files_hard
    if files is not None and files < 4096:
        return Finding("ulimits", Level.weaker, f"limit of {files} open files", f"nofile 65536 {_WHERE_LIMITS}")
    processes = facts.processes_hard
    if processes is not None and not facts.root and processes < 1000:
        return Finding("ulimits", Level.weaker, f"limit of {processes} processes", f"nproc 16384 {_WHERE_LIMITS}")
    return Finding("ulimits", Level.ok, f"open files {_count(files)}, processes {_count(processes)}")


def _terminals(facts: Facts) -> Finding:
    most, slots = facts.terminals, ContainerSettings().slots_per_container
    if most is None:
        return Finding("terminals", Level.ok, "not counted here")
    detail = f"{most} on this machine: enough for {most // MAX_TERMINALS} slots that each have {MAX_TERMINALS} open"
    if most < slots * MAX_TERMINALS:
        wanted = slots * MAX_TERMINALS + 1024
        return Finding(
            "terminals",
            Level.weaker,
            f"{detail}, one container has {slots}",
            "raise kernel.pty.max (it includes kernel.pty.reserve)",
            (f"sysctl -w kernel.pty.max={wanted} kernel.pty.reserve=1024",),
        )
    return Finding("terminals", Level.ok, detail)


def _memory(facts: Facts) -> Finding:
    free = facts.memory_available_bytes
    detail = f"{_size(free)} available; workspaces live in memory, each up to its limit"
    if free is not None and free < 512 * MIB:
        return Finding("memory", Level.weaker, detail, "use fewer slots, or a smaller limits.workspace_bytes")
    return Finding("memory", Level.ok, detail)


def _shm(facts: Facts) -> Finding:
    if facts.shm_bytes is None:
        return Finding("shared memory", Level.ok, "missing here; slots have their own")
    return Finding("shared memory", Level.ok, f"{_size(facts.shm_bytes)} free; slots have their own")


def _state(facts: Facts) -> Finding:
    if not facts.state_dir_writable:
        return Finding(
            "state directory",
            Level.broken,
            f"{facts.state_dir} cannot be written",
            "set AGENTENV_STATE_DIR to a directory you can write",
        )
    if facts.state_free_bytes is not None and facts.state_free_bytes < 16 * MIB:
        return Finding(
            "state directory",
            Level.broken,
            f"{facts.state_dir}: {_size(facts.state_free_bytes)} free",
            "free some space, or set AGENTENV_STATE_DIR",
        )
    return Finding("state directory", Level.ok, f"{facts.state_dir}, {_size(facts.state_free_bytes)} free")


def _stale(facts: Facts) -> Finding:
    stale = facts.stale_containers
    if not stale:
        return Finding("dead containers", Level.ok, "none left behind")
    return Finding(
        "dead containers",
        Level.weaker,
        f"{len(stale)} left behind: {', '.join(stale[:3])}{' …' if len(stale) > 3 else ''}",
        "the next start removes them; or remove them now",
        ("agentenv gc",),
    )


def _privileges_of_images(facts: Facts) -> Finding:
    if facts.no_new_privileges:
        return Finding(
            "privileges of images",
            Level.weaker,
            f"no slots with images: {NO_NEW_PRIVILEGES}",
            "in docker: leave out --security-opt no-new-privileges",
        )
    return Finding("privileges of images", Level.ok, "programs of images may be setuid")


def _registries(facts: Facts) -> Finding:
    if facts.skopeo:
        return Finding("images of registries", Level.ok, "fetched by skopeo")
    return Finding(
        "images of registries",
        Level.weaker,
        "skopeo is not installed: images come from archives, OCI layouts and the Docker engine only",
        "install skopeo",
        _install("skopeo"),
    )


def _disk(facts: Facts) -> Finding:
    if not facts.root:
        return Finding("storage on disk", Level.ok, "for slots with images of containers that root starts")
    if not facts.disk_refusal:
        return Finding("storage on disk", Level.ok, "reserved for each slot that requests it")
    return Finding(
        "storage on disk",
        Level.weaker,
        f"slots write to memory only: {facts.disk_refusal}",
        "set AGENTENV_CACHE_DIR to a directory on such a disk, or use storage in memory"
        if "lies on" in facts.disk_refusal
        else "see there, or use storage in memory",
    )


def image_slots(image_format: str, problems: Sequence[str]) -> Finding:
    """A container's report on slots with images: their format (empty: it has none), and what is less or why."""
    name, sentences = "slots with images", "\n".join(f"· {sentence}" for sentence in problems)
    if not image_format:
        return Finding(name, Level.weaker, f"refused:\n{sentences}", "docs/images.md lists the requirements")
    if problems:
        return Finding(name, Level.weaker, f"{image_format}:\n{sentences}")
    return Finding(name, Level.ok, f"{image_format}: images are mounted as they are stored")


def workspaces(copied: str) -> Finding:
    """How workspaces of slots without an image are kept as checkpoints: ``copied`` is the reason why not as layers."""
    name = "checkpoints"
    if copied:
        return Finding(name, Level.ok, f"workspaces are copied, about a second for 500 MB each way: {copied}")
    return Finding(name, Level.ok, "workspaces are checkpointed in place, in milliseconds")


RULES: tuple[Callable[[Facts], Finding], ...] = (
    _system,
    _python,
    _privilege,
    _user_namespaces,
    _bwrap,
    _compiler,
    _ripgrep,
    _cgroups,
    _network,
    _slot_programs,
    _tmux,
    _fast_shell,
    _privileges_of_images,
    _registries,
    _disk,
    _limits,
    _terminals,
    _memory,
    _shm,
    _state,
    _stale,
)


def _size(size_bytes: int | None) -> str:
    if size_bytes is None:
        return "unknown"
    gib = size_bytes / 1024**3
    return f"{gib:.1f} GiB" if gib >= 1 else f"{size_bytes / MIB:.0f} MiB"


def _count(limit: int | None) -> str:
    return "unlimited" if limit is None else str(limit)
