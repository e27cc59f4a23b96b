"""A slot's isolation as data: its identity, the bwrap command line, its /etc, and where it is weaker.

Pure decisions; :mod:`~agentenv.sandbox.supervisor.rootfs` and :mod:`~agentenv.sandbox.supervisor.slot_process` act
on them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import get_args

from agentenv import apparmor
from agentenv.errors import ConfigError, SandboxUnavailableError
from agentenv.sandbox.slot_env import GITCONFIG
from agentenv.sandbox.slot_paths import WORKSPACE, SlotPaths
from agentenv.wire.spec import Bind, Capability, SandboxSpec, SlotLimits

FULL = "full"
USER = "user"
SERVER_UID = 10_000
PROXY_UID = 10_001
UNUSED_ID = 10_002
"""0 in the user namespaces of root's plain slots: of users and of groups. No process ever has it, and of files only the
root directory."""
FIRST_SLOT_UID = 20_000
UIDS_PER_CONTAINER = 1_000
AGENT_FD = 3
AGENT_PATH = "/run/agentenv/slotagent"
FILES_PATH = SlotPaths.files
SHELL_PATH = "/run/agentenv/bash"
MAX_TERMINALS = 64
"""Terminals a slot may have open at once; the kernel's own count covers the whole machine."""

ROOT_LINKS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
ROOT_DIRECTORIES = ("usr", "etc", "proc", "dev", "tmp", "run/agentenv", "workspace", "var", "root", "home")
ETC_COPIES = (
    "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "timezone", "os-release", "debian_version",
    "alternatives", "ssl/certs", "ssl/openssl.cnf", "pki", "ca-certificates.conf", "mime.types", "services",
    "protocols", "locale.alias", "locale.conf", "terminfo", "python3*", "java-*", "maven", "perl",
)  # fmt: skip
"""Files copied from the machine's /etc, if world-readable. Debian's /usr points into several of them
(``/etc/alternatives``); none of them names a user, a host or a secret."""

_RESERVED_TARGETS = ("/", "/run", "/run/agentenv", "/etc", "/usr")
_PROGRAMS = PurePosixPath("/run/agentenv")
_MAX_BINDS = 64  # slotagent/root/tree.h
_SLOT_OWN = ("proc", "dev", "sys", "tmp", "workspace")
DNS_ADDRESS = "10.0.2.3"
"""Where slirp4netns answers DNS in a slot with network."""


def choose_mode(wanted: str, uid: int) -> str:
    """``full`` or ``user``. Raises SandboxUnavailableError when the requested one is not possible."""
    have = FULL if uid == 0 else USER
    if wanted in ("auto", have):
        return have
    if wanted == FULL:
        raise SandboxUnavailableError(
            "isolation=full needs root: an own uid and cgroup per slot",
            next_step="start it as root, or accept less explicitly: isolation=user",
        )
    raise SandboxUnavailableError(
        "isolation=user is not possible as root: a slot must never run as uid 0",
        next_step="start it as an ordinary user, or use isolation=full (and unset AGENTENV_ISOLATION)",
    )


@dataclass(frozen=True)
class Identity:
    """Uids and gids. ``first_slot_uid`` None: everything runs as the current user."""

    mode: str
    own_uid: int
    own_gid: int
    uid_block: int = 0

    def slot_uid(self, slot: int) -> int:
        """``full``: 20000 + slot (further containers on one machine take other blocks of 1000)."""
        if self.mode == USER:
            return self.own_uid
        return first_uid(self.uid_block) + slot

    def slot_gid(self, slot: int) -> int:
        """The group that goes with :meth:`slot_uid`."""
        return self.own_gid if self.mode == USER else self.slot_uid(slot)

    @property
    def server_uid(self) -> int:
        """The uid the server runs as."""
        return self.own_uid if self.mode == USER else SERVER_UID

    @property
    def proxy_uid(self) -> int:
        """The uid the slots' proxy runs as."""
        return self.own_uid if self.mode == USER else PROXY_UID


def fitting_block(wanted: int, uid_map: str) -> int:
    """Choose the block of uids in a user namespace with this ``/proc/self/uid_map``.

    It is ``wanted`` if all ids exist. If ids are remapped (dockerd's ``userns-remap``: 65536 of them), the blocks
    that fit are assigned by remainder, so that containers of one machine may share one. Raises
    SandboxUnavailableError when no block fits.
    """
    ranges = [(int(first), int(count)) for first, _, count in (line.split() for line in uid_map.splitlines())]
    if any(first_uid(wanted) >= first and first_uid(wanted + 1) <= first + count for first, count in ranges):
        return wanted
    fitting = [
        block
        for first, count in ranges
        for block in range(
            max(0, -(-(first - FIRST_SLOT_UID) // UIDS_PER_CONTAINER)),
            (first + count - FIRST_SLOT_UID) // UIDS_PER_CONTAINER,
        )
    ]
    if not fitting:
        raise SandboxUnavailableError(
            f"this user namespace has no {UIDS_PER_CONTAINER} uids from {FIRST_SLOT_UID} on",
            next_step="give the container a larger id range, or run it without one",
        )
    return fitting[wanted % len(fitting)]


def first_uid(block: int) -> int:
    """Of a block: that of its first slot."""
    return FIRST_SLOT_UID + block * UIDS_PER_CONTAINER


_OWN_USER_NAMESPACE = ("--unshare-user", "--disable-userns", "--cap-drop", "ALL")
_GIVEN_USER_NAMESPACE = ("--userns", "5", "--assert-userns-disabled", "--cap-drop", "ALL")
"""Descriptor 5 of slotlaunch -n."""


def user_namespace_options(*, given: bool) -> tuple[str, ...]:
    """Of bwrap: join the user namespace that slotlaunch made, or make its own, for which no capability is needed but
    the machine's leave."""
    return _GIVEN_USER_NAMESPACE if given else _OWN_USER_NAMESPACE


def bwrap_argv(
    bwrap: str,
    root: Path,
    workspace: Path,
    terminals: Path,
    limits: SlotLimits,
    info_fd: int,
    covered: Iterable[str],
    *,
    namespace_given: bool,
    workdir: str = "",
) -> list[str]:
    """The command that creates one slot and becomes its agent.

    ``root`` is the container's template tree (one bind instead of a dozen); ``terminals`` a devpts with a limit,
    which bwrap's own lacks; ``info_fd`` receives bwrap's report of the agent's pid; ``covered``: files of /proc that
    describe the machine, and read as empty in the slot; ``namespace_given``: see :func:`user_namespace_options`;
    ``workdir``: a directory that the agent makes. Order matters: later mounts cover earlier ones.
    """
    return [
        bwrap,
        *user_namespace_options(given=namespace_given),
        "--unshare-ipc", "--unshare-pid", "--unshare-uts", "--unshare-cgroup-try", "--unshare-net",
        "--as-pid-1", "--die-with-parent", "--new-session",
        "--clearenv", "--hostname", "slot", "--info-fd", str(info_fd),
        "--ro-bind", str(root), "/",
        "--proc", "/proc",
        *(word for file in covered for word in ("--dev-bind", "/dev/null", file)),
        # Nothing can be set through it: neither a lower oom_score_adj nor another process's memory.
        "--remount-ro", "/proc",
        # bwrap's /dev is a tmpfs of unlimited size: sized parts on it, the rest read-only.
        "--dev", "/dev",
        "--dev-bind", str(terminals), "/dev/pts",
        "--size", str(limits.shm_bytes), "--perms", "1777", "--tmpfs", "/dev/shm",  # noqa: S108
        "--remount-ro", "/dev",
        "--size", str(limits.tmp_bytes), "--perms", "1777", "--tmpfs", "/tmp",  # noqa: S108
        "--bind", str(workspace), WORKSPACE,
        "--chdir", WORKSPACE,
        "--", AGENT_PATH, str(AGENT_FD), *filter(None, [workdir]),
    ]  # fmt: skip


def etc_files(identity: Identity, slots: int, *, allow_network: bool) -> dict[str, str]:
    """The files of /etc that are written rather than copied.

    Every slot's uid has a passwd line with the same name, so that ``whoami`` prints ``agent`` in all.
    """
    uids = sorted({(identity.slot_uid(slot), identity.slot_gid(slot)) for slot in range(slots)})
    passwd = [f"agent:x:{uid}:{gid}:agent:{WORKSPACE}:/bin/bash" for uid, gid in uids]
    groups = [f"agent:x:{gid}:" for gid in sorted({gid for _, gid in uids})]
    files = {
        "passwd": "\n".join(["root:x:0:0:root:/root:/bin/bash", *passwd, _NOBODY]) + "\n",
        "group": "\n".join(["root:x:0:", *groups, "nogroup:x:65534:"]) + "\n",
        "hosts": "127.0.0.1 localhost slot\n::1 localhost ip6-localhost\n",
        "nsswitch.conf": f"passwd: files\ngroup: files\nshadow: files\nhosts: files{' dns' * allow_network}\n",
        "hostname": "slot\n",
        "gitconfig": GITCONFIG,
    }
    if allow_network:
        files["resolv.conf"] = f"nameserver {DNS_ADDRESS}\n"
    return files


_NOBODY = "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin"


def check_binds(binds: Sequence[Bind]) -> None:
    """Raise ConfigError for a bind that is not absolute, or covers a part of the slot itself, and
    for more than 64."""
    if len(binds) > _MAX_BINDS:
        raise ConfigError("binds", f"has {len(binds)}", next_step=f"at most {_MAX_BINDS}: bind a directory above them")
    for index, bind in enumerate(binds):
        target = PurePosixPath(bind.target)
        where = f"binds[{index}]"
        if not bind.source.startswith("/") or not target.is_absolute() or ".." in target.parts:
            raise ConfigError(where, "source and target must be absolute paths without '..'")
        own = str(target) in _RESERVED_TARGETS or target.parts[1] in _SLOT_OWN or _PROGRAMS in target.parents
        if own:
            raise ConfigError(where, f"{target} is the slot's own", next_step="choose another target, such as /opt/x")


def weaker(identity: Identity, controllers: Iterable[str], why_no_cgroup: str, why_one_id: str = "") -> list[str]:
    """Where isolation is weaker than promised, one sentence each."""
    found: list[str] = []
    have = frozenset(controllers)
    if identity.mode == USER:
        why = f" ({why_one_id})" if why_one_id else ""
        found += [
            f"All slots, the server and the supervisor share one uid ({identity.own_uid}){why}: only namespaces keep "
            "them apart, and slots share that user's quotas for inotify, pipes and keys.",
        ]
    because = f" ({why_no_cgroup})" if why_no_cgroup else ""
    if "pids" not in have:
        found.append(f"Processes are limited by RLIMIT_NPROC, not by a cgroup{because}.")
    if "memory" not in have:
        found += [
            f"Memory is limited per process (RLIMIT_DATA), not per slot{because}: many processes together, "
            "their temporary files and the workspace can use more.",
            "An out-of-memory kill looks like any other kill, so it is not reported.",
        ]
    if "cpu" not in have:
        found.append(f"CPU time is shared per process, not per slot{because}: a busy slot can slow its neighbours.")
    return found


_GROUP = (
    "(this user may not create cgroups in any cgroup: start it in one with systemd-run --user --scope -p "
    "Delegate=yes …)"
)
_LIMITED_BY = {"memory_bytes": "memory", "processes": "pids", "cpu_millis": "cpu"}


def weaker_images(controllers: Iterable[str], *, root: bool) -> list[str]:
    """Where slots of images are weaker than promised because of cgroups, one sentence each. ``root``: root has started
    the container; without cgroups it has no such slots."""
    lacking = sorted({"memory", "pids"} - frozenset(controllers))
    if root or not lacking:
        return []
    named = " and ".join(lacking)
    return [f"What an image slot takes of {named} is limited for each of its processes, not for the slot {_GROUP}."]


def refused_roots(
    spec: SandboxSpec, controllers: Iterable[str], images: str, memory: str, disk: str, *, root: bool = True
) -> dict[str, str]:
    """The fields of a RootSpec that no slot of the container can have, or not with a value, each with the reason.
    ``images``: why slots cannot have images at all; ``memory``, ``disk``: why what they write cannot lie there. Empty
    if they can. ``root``: root has started the container."""
    have = frozenset(controllers)
    refused: dict[str, str] = {}
    if images:
        refused["image"] = images
    elif not spec.store_dir:
        refused["image"] = "this container has plain slots only: it was started without an image store"
    elif root and (lacking := sorted({"memory", "pids"} - have)):
        # A limit for each process, or for each uid, is none for a slot of 65,536 uids. An ordinary user's slots take no
        # more than he may take himself.
        refused["image"] = f"a slot's {' and '.join(lacking)} cannot be limited here: no cgroup is available"
    elif memory and disk:
        refused["image"] = f"there is no place for what slots write: {memory} {disk}"
    if "cpu" not in have:
        refused["cpu_millis"] = "CPU time cannot be limited here: no cgroup of the cpu controller is writable"
    if not root:
        for name, controller in _LIMITED_BY.items():
            if controller not in have:
                refused[name] = f"a slot's {controller} cannot be limited here {_GROUP}"
    if memory:
        refused["writable=memory"] = f'{memory} Request the disk explicitly: --writable disk, storage="disk" in Python.'
    if disk:
        refused["writable=disk"] = disk
    for name in get_args(Capability):
        if name not in spec.allowed_capabilities:
            refused[f"capabilities={name}"] = f"this container does not allow {name} (allowed_capabilities)"
    if not spec.allow_nested_namespaces:
        refused["nested_namespaces"] = "this container does not allow them (allow_nested_namespaces)"
    return refused


def explain_namespaces(error: OSError) -> SandboxUnavailableError:
    """Why this machine does not allow namespaces, and what to do about it."""
    cure = (
        "as an ordinary user: allow unprivileged user namespaces (sysctl user.max_user_namespaces and "
        f"kernel.unprivileged_userns_clone; on Ubuntu AppArmor's profile {apparmor.PROFILE}: agentenv doctor --cure); "
        "in a container: give it CAP_SYS_ADMIN and the seccomp profile of docker/"
    )
    return SandboxUnavailableError(f"this machine refuses namespaces: {error}", next_step=cure)


_SECURITY_MODULE = (
    "a security module forbids it: `journalctl -k | grep -i denied` names the profile. AppArmor: the rule `userns,` "
    "and the flag attach_disconnected in that profile, or, for an ordinary user, the profile "
    f"{apparmor.PROFILE} (docs/operations.md#nodes); SELinux: allow bwrap user_namespace create; in a container: the "
    "seccomp profile of docker/"
)
_NOT_PERMITTED = ("No permissions to creat", "make a user namespace: Operation not permitted")
"""bwrap's words, and slotlaunch's."""
_CLONE = Path("/proc/sys/kernel/unprivileged_userns_clone")
"""Debian's and its descendants' switch."""
_BWRAP_CURES = (
    ("max_user_namespaces", "sysctl -w user.max_user_namespaces=100000"),
    ("new namespace failed: Permission denied", _SECURITY_MODULE),  # EACCES; EPERM is _NOT_PERMITTED
    ("new namespace failed: Operation not permitted", _SECURITY_MODULE),
    ("Creating new namespace failed", "sysctl -w user.max_user_namespaces=100000, or a larger user.max_net_namespaces"),
    ("setting up uid map", _SECURITY_MODULE),
    ("Failed RTM_NEWADDR", _SECURITY_MODULE),  # Ubuntu gives the namespace, and no capability in it
    ("Can't open /proc/self/mountinfo: Permission denied", _SECURITY_MODULE),  # AppArmor without attach_disconnected
    ("Can't mount proc", "the container needs an unmasked /proc: start it with CAP_SYS_ADMIN (docker/README.md)"),
    ("Unknown option", "bubblewrap 0.8 or newer is needed: apt-get install bubblewrap"),
)


def _is_on(switch: Path) -> bool:
    """Also where there is none."""
    try:
        return switch.read_text().strip() != "0"
    except OSError:
        return True


def bwrap_cure(words: str) -> str:
    """What cures bwrap's last output; empty: unknown."""
    if any(text in words for text in _NOT_PERMITTED):  # bwrap guesses that it is the switch
        return _SECURITY_MODULE if _is_on(_CLONE) else "sysctl -w kernel.unprivileged_userns_clone=1"
    return next((cure for pattern, cure in _BWRAP_CURES if pattern in words), "")


def explain_bwrap(words: str) -> SandboxUnavailableError:
    """Explanation of bwrap's last output, for users."""
    return SandboxUnavailableError(
        f"the first slot could not be started: {words}", next_step=bwrap_cure(words) or "run `agentenv doctor`"
    )
