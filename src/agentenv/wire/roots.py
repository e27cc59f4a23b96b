"""The root of a slot, as a part of a lease. Standard library only: the privileged supervisor reads it."""

from __future__ import annotations

import dataclasses
import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Self, get_args

from agentenv.errors import ConfigError
from agentenv.wire.environment import MAX_PATH_CHARS, MAX_USER_CHARS, why_no_argument, why_no_environment
from agentenv.wire.network import NO_NETWORK, NetworkPolicy
from agentenv.wire.spec import MIB, Capability, SlotLimits, build

Writable = Literal["memory", "disk"]

_DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")
_CHECKPOINT: Final = re.compile(r"[0-9a-f]{32}")
_MOST: Final = 2**50
"""Largest number in any field: more than a machine has, and small enough for every mount option."""
_MAX_SHOWN: Final = 80
MAX_SERVICES: Final = 8
"""Services that a slot may have beside its main root."""
MAX_VOLUMES: Final = 16
"""Volumes that one root may have."""
MAX_HOSTS: Final = 64
_SERVICE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
_HOST: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}")
_OURS: Final = ("/proc", "/sys", "/dev", "/run/agentenv")
"""Directories with mounts and files of ours, where no volume can be."""
_DEFAULTS: Final = {
    "image": "", "cpu_millis": 0, "memory_bytes": 0, "processes": 0, "writable": "memory", "nested_namespaces": False,
}  # fmt: skip
"""Field values that request nothing."""
_OF_PLAIN: Final = ("image", "checkpoint", "workdir")
"""Fields that a root without an image may have."""


@dataclass(frozen=True)
class ServiceSpec:
    """One more root of an image slot, with an agent of its own: programs in it see neither the files nor the processes
    of the other roots. It shares the slot's network namespace, its cgroup and its writable layer, so the slot's limits
    are those of all its roots together. Calls reach it by its name (``LeaseKey.service``); nothing is started in it."""

    name: str
    image: str
    user: str = ""
    """The default user of commands, as :attr:`RootSpec.user`."""
    workdir: str = ""
    env: dict[str, str] = field(default_factory=dict)
    volumes: dict[str, str] = field(default_factory=dict)
    """As :attr:`RootSpec.volumes`."""


@dataclass(frozen=True)
class RootSpec:
    """The root of an image slot, and its limits. A limit of 0 is the container's own. Without an image: the checkpoint
    that a plain slot begins with, and its ``workdir``; no other field is set."""

    image: str
    """Digest of an image in the node's store, ``sha256:…``. Empty: a plain slot."""
    checkpoint: str = ""
    """Name of a checkpoint in the slot's container: the slot begins with its files instead of the bare image's, or of
    an empty workspace."""
    writable: Writable = "memory"
    """Where what the slot writes is kept: in memory (it counts as the slot's), or on the node's disk, where
    ``writable_bytes`` are reserved for it."""
    writable_bytes: int = 1024 * MIB
    writable_inodes: int = 400_000
    memory_bytes: int = 0
    cpu_millis: int = 0
    """Most CPU time, in thousandths of a core."""
    processes: int = 0
    user: str = ""
    """The default user of commands: a name or uid, with ``:GROUP`` or without. Empty: the image's."""
    workdir: str = ""
    """The default directory of commands, which is made if it is missing. Empty: the image's, or the workspace."""
    env: dict[str, str] = field(default_factory=dict)
    """Added to the image's own environment."""
    network: NetworkPolicy = NO_NETWORK
    """What the slot may reach; may be changed while the lease lasts."""
    capabilities: tuple[Capability, ...] = ()
    nested_namespaces: bool = False
    """Programs of the slot may make user namespaces, as browsers do for their sandboxes."""
    services: tuple[ServiceSpec, ...] = ()
    """Further roots beside this one. A checkpoint of the slot has their files as well, and those of the volumes; a slot
    that begins with it has the same services and volumes."""
    volumes: dict[str, str] = field(default_factory=dict)
    """Absolute paths, and the name of the volume that is there: a directory, empty at first, that each root has which
    names it; ``NAME:ro``: read-only here. It is in the slot's writable layer, and ends with the slot."""
    hosts: tuple[str, ...] = ()
    """Names that mean 127.0.0.1 in ``/etc/hosts`` of every root of the slot."""

    def __post_init__(self) -> None:
        named = not self.checkpoint or bool(_CHECKPOINT.fullmatch(self.checkpoint))
        self._check("checkpoint", named, "32 hexadecimal digits")
        path = not self.workdir or (self.workdir.startswith("/") and _is_name(self.workdir, MAX_PATH_CHARS))
        self._check("workdir", path, f"an absolute path of at most {MAX_PATH_CHARS} characters")
        if not self.image and (self.checkpoint or self.workdir):
            for one in dataclasses.fields(self):
                default = one.default_factory() if callable(one.default_factory) else one.default
                plain = one.name in _OF_PLAIN or getattr(self, one.name) == default
                self._check(one.name, plain, "only with an image")
            return
        self._check("image", bool(_DIGEST.fullmatch(self.image)), "sha256: and 64 hexadecimal digits")
        self._check("writable", self.writable in get_args(Writable), ", ".join(get_args(Writable)))
        self._check("writable_bytes", MIB <= self.writable_bytes <= _MOST, f"1 MiB to {_MOST}")
        self._check("writable_inodes", 100 <= self.writable_inodes <= _MOST, f"100 to {_MOST}")
        for name in ("memory_bytes", "cpu_millis", "processes"):
            self._check(name, 0 <= getattr(self, name) <= _MOST, f"0 to {_MOST}")
        self._check("user", _is_name(self.user, MAX_USER_CHARS), f"at most {MAX_USER_CHARS} characters, none a NUL")
        if why := why_no_environment(self.env):
            raise ConfigError("root.env", why, next_step="write larger data to a file of the slot")
        admin = "net_admin" in self.capabilities and self.network.kind == "public"
        self._check("capabilities", not admin, "net_admin with no network, or with an allow list")
        known = set(self.capabilities) <= set(get_args(Capability))
        once = len(set(self.capabilities)) == len(self.capabilities)
        self._check("capabilities", known and once, f"each once of {', '.join(get_args(Capability))}")
        self._check_services()

    def _check_services(self) -> None:
        names = [service.name for service in self.services]
        good = len(set(names)) == len(names) <= MAX_SERVICES and all(map(is_service, names))
        self._check("services", good, f"at most {MAX_SERVICES}, of different names (letters, digits, _ . -)")
        hosts = len(self.hosts) <= MAX_HOSTS and all(map(is_host, self.hosts))
        self._check("hosts", hosts, f"at most {MAX_HOSTS} host names")
        self._check("volumes", not why_no_volumes(self.volumes), why_no_volumes(self.volumes))
        for service in self.services:
            good = (
                bool(_DIGEST.fullmatch(service.image))
                and _is_name(service.user, MAX_USER_CHARS)
                and (not service.workdir or service.workdir.startswith("/"))
                and _is_name(service.workdir, MAX_PATH_CHARS)
            )
            self._check("services", good, "an image's digest, a user and an absolute workdir as for the root itself")
            self._check("services", not why_no_volumes(service.volumes), why_no_volumes(service.volumes))
            if why := why_no_environment(service.env):
                raise ConfigError("root.services.env", why, next_step="write larger data to a file of the slot")

    def _check(self, name: str, good: bool, allowed: str) -> None:
        if not good:
            text = repr(getattr(self, name))
            raise ConfigError(f"root.{name}", f"got {text[:_MAX_SHOWN]}", next_step=f"allowed: {allowed}")

    def to_dict(self) -> dict[str, Any]:
        """As :meth:`parse` reads it."""
        fields = dataclasses.asdict(self)
        lists = {name: list(fields[name]) for name in ("capabilities", "services", "hosts")}
        return {**fields, **lists, "network": self.network.to_json()}

    @classmethod
    def parse(cls, raw: Any) -> Self:
        """From parsed JSON. Raises ConfigError naming the field that is missing, unknown, mistyped or out of range."""
        network = raw.get("network") if isinstance(raw, dict) else None
        if network is not None:
            raw = {name: value for name, value in raw.items() if name != "network"}
        root: Self = build(cls, raw, "root")
        return root if network is None else dataclasses.replace(root, network=NetworkPolicy.parse(network))


def is_service(name: str) -> bool:
    """Whether a service may have this name."""
    return bool(_SERVICE.fullmatch(name))


def is_host(name: str) -> bool:
    """Whether :attr:`RootSpec.hosts` may have this name."""
    return bool(_HOST.fullmatch(name))


def why_no_volumes(volumes: Mapping[str, str]) -> str:
    """What is allowed of the volumes of a root, if these are not; empty if they are."""
    if len(volumes) > MAX_VOLUMES:
        return f"at most {MAX_VOLUMES} in one root"
    for path, name in volumes.items():
        if not is_service(name.removesuffix(":ro")):
            return "names of letters, digits, _ . -, and after them :ro"
        whole = path.startswith("/") and path == posixpath.normpath(path) and _is_name(path, MAX_PATH_CHARS)
        if (
            not whole
            or path in ("/", "/run", "/etc")
            or any(path == ours or path.startswith(f"{ours}/") for ours in _OURS)
        ):
            return f"absolute paths without '..', not /, /run or /etc, and outside of {', '.join(_OURS)}"
    return ""


def _is_name(text: str, most_chars: int) -> bool:
    return len(text) <= most_chars and not why_no_argument(text)


def shm_bytes(given_bytes: int, memory_bytes: int) -> int:
    """The size of an image slot's /dev/shm: that of plain slots, but at most a quarter of its memory."""
    return min(given_bytes, memory_bytes // 4)


def unfit(root: RootSpec, limits: SlotLimits, refused: Mapping[str, str]) -> ConfigError | None:
    """Why a container cannot hold such a root; None if it can. ``limits`` are those of its slots, ``refused`` the
    fields of a root that it cannot hold at all, or with a value (``writable=memory``, ``capabilities=net_raw``), each
    with the reason."""
    for name, reason in refused.items():
        field_name, _, value = name.partition("=")
        requested = getattr(root, field_name)
        values = requested if isinstance(requested, tuple) else (requested,)
        if value in values if value else requested != _DEFAULTS.get(field_name):
            return ConfigError(f"root.{field_name}", reason)
    for wanted, most, name, setting in (
        (root.memory_bytes, limits.most_memory_bytes, "memory_bytes", "max_memory_bytes"),
        (root.processes, limits.processes, "processes", "processes"),
    ):
        if wanted > most:
            return ConfigError(
                f"root.{name}",
                f"{wanted} is more than a slot here has ({most})",
                next_step=f"request less, or let the containers give more (limits.{setting})",
            )
    if not root.image:
        return None
    memory_bytes = root.memory_bytes or limits.memory_bytes
    if root.writable == "memory" and root.writable_bytes + shm_bytes(limits.shm_bytes, memory_bytes) > memory_bytes:
        return ConfigError(
            "root.writable_bytes",
            f"{root.writable_bytes} bytes of files in memory do not fit in {memory_bytes} bytes of it",
            next_step="lower storage, raise memory, or keep the files on disk (writable = disk)",
        )
    return None
