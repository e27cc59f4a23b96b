"""Specification of a container: its settings, and the file the supervisor reads at start.

Standard library only, because the privileged supervisor imports it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import IPv4Network
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Self, get_args, get_origin, get_type_hints

from agentenv.errors import ConfigError
from agentenv.wire.environment import why_no_environment

MIB = 1024 * 1024
MEMORY_HEADROOM_BYTES = 64 * MIB
"""Minimum memory left for a slot's processes when all its file systems are full."""

Isolation = Literal["auto", "full", "user"]
Capability = Literal["net_raw", "net_admin", "sys_ptrace", "sys_nice", "sys_resource", "audit_write", "mknod"]
"""Capabilities over the slot's own namespaces that a lease may request, beyond those that every image slot has."""
ImageFormat = Literal["auto", "erofs", "tree", "shifted"]
ATTACHED = "attached"
"""In :attr:`ContainerSpec.closed_networks`: all networks the container itself is attached to."""


@dataclass(frozen=True)
class Bind:
    """A host path mounted read-only in every slot."""

    source: str
    target: str


def means(about: str = "", least: int | None = None, most: int | None = None) -> Mapping[str, Any]:
    """Metadata of a field that is a setting: its meaning, and the range of its number.

    A setting of a container states them here and nowhere else: :func:`agentenv.config.stated` takes them, and the
    default, for every other way to set it.
    """
    return MappingProxyType({"about": about, "least": least, "most": most})


def _check_ranges(settings: Any, where: str = "") -> None:
    for one in dataclasses.fields(settings):
        value, least, most = getattr(settings, one.name), one.metadata.get("least"), one.metadata.get("most")
        if (least is not None and value < least) or (most is not None and value > most):
            allowed = f"at least {least}" if most is None else f"{least} to {most}"
            raise ConfigError(where + one.name, f"got {value!r}", next_step=f"allowed: {allowed}")


@dataclass(frozen=True)
class SlotLimits:
    """Limits of each slot. All are enforced by the kernel, none by the server."""

    processes: int = field(default=400, metadata=means("Maximum processes and threads of a slot", 1))
    memory_bytes: int = field(default=2048 * MIB, metadata=means("Memory of a slot, its files included", 1))
    max_memory_bytes: int = field(
        default=0, metadata=means("Most memory that a slot with an image may request, if that is more", 0)
    )
    """What it requests is its limit, in place of ``memory_bytes``. A container's own memory is enough for all its slots
    to have so much at once, unless it is oversubscribed."""
    workspace_bytes: int = field(default=1024 * MIB, metadata=means("Size of a workspace; it is in memory", 1))
    workspace_inodes: int = field(default=120_000, metadata=means("Maximum files and directories of a workspace", 1))
    tmp_bytes: int = field(default=256 * MIB, metadata=means("Size of a slot's /tmp; it is in memory", 1))
    shm_bytes: int = field(default=64 * MIB, metadata=means("Size of a slot's /dev/shm; it is in memory", 1))
    open_files: int = field(default=4096, metadata=means("Maximum open files of a process", 1))
    cpu_weight: int = field(default=100, metadata=means("Share of contested CPU time, relative to other slots", 1))

    def __post_init__(self) -> None:
        _check_ranges(self, "limits.")
        files_bytes = self.workspace_bytes + self.tmp_bytes + self.shm_bytes
        if self.memory_bytes < files_bytes + MEMORY_HEADROOM_BYTES:
            # All three are tmpfs: full ones count as memory, and no OOM kill could free them again.
            raise ConfigError(
                "limits.memory_bytes",
                f"{self.memory_bytes} is less than workspace + tmp + shm ({files_bytes}) and"
                f" {MEMORY_HEADROOM_BYTES} for processes",
                next_step="raise memory_bytes, or lower workspace_bytes, tmp_bytes or shm_bytes",
            )

    @property
    def most_memory_bytes(self) -> int:
        """The most that a slot can have, whatever its root requests."""
        return max(self.memory_bytes, self.max_memory_bytes)


@dataclass(frozen=True)
class ContainerSpec:
    """Settings of a container, however it is started: its slots, their mounts and limits.

    The only definition of these settings, with their defaults, ranges and meaning.
    :class:`agentenv.config.ContainerSettings` is the same for users, a Nomad job has it as one JSON variable, and
    :class:`SandboxSpec` adds the parameters of a launch.
    """

    slots: int = field(default=10, metadata=means("Slots of each container", 1, 1000))
    isolation: Isolation = field(
        default="auto",
        metadata=means("Isolation of the slots. auto: the value of AGENTENV_ISOLATION, otherwise full, or an error"),
    )
    """For the container itself ``auto`` is ``full`` when started by root, otherwise ``user``. When named explicitly,
    the container refuses to start as anything else."""
    allow_network: bool = field(
        default=False, metadata=means("Give slots network access, but never to their machine's loopback")
    )
    closed_networks: tuple[str, ...] = field(
        default=(),
        metadata=means("With allow_network: IPv4 networks that no slot may reach (10.0.0.0/8), or attached"),
    )
    """In addition to the container's own addresses and 169.254.0.0/16, which are always closed. ``attached``: the
    networks the container is attached to (under Docker: its host's bridge, with the other containers)."""
    limits: SlotLimits = field(default=SlotLimits(), metadata=means("Limits of each slot"))
    binds: tuple[Bind, ...] = field(
        default=(), metadata=means("Host paths mounted read-only in slots: /source:/target")
    )
    env: dict[str, str] = field(
        default_factory=dict, metadata=means("Environment variables of every command in a slot")
    )
    output_bytes: int = field(
        default=MIB, metadata=means("Maximum bytes of stdout and of stderr that a call returns", 1024, 64 * MIB)
    )
    """Head and tail are kept."""
    spare_shells: bool = field(default=True, metadata=means("Each slot keeps a bash ready for its next command"))
    image_format: ImageFormat = field(
        default="auto", metadata=means("Format of images in slots. auto: the best that the machine supports")
    )
    """When one is named, and not possible, slots of images are refused."""
    checkpoint_bytes: int = field(
        default=4096 * MIB, metadata=means("Memory for checkpoints of a container, in addition to its slots'", 0, 2**50)
    )
    """0: there are none. Checkpoints of slots that write to a disk take space there instead."""
    allowed_capabilities: tuple[Capability, ...] = field(
        default=("sys_ptrace", "sys_nice", "sys_resource", "audit_write", "mknod"),
        metadata=means("Capabilities that slots with images may request: net_raw, net_admin, sys_ptrace, ..."),
    )
    """Not by default: ``net_admin`` and ``net_raw``, with which programs reach parts of the kernel that have often been
    flawed (packet filters, packet sockets)."""
    allow_nested_namespaces: bool = field(
        default=False, metadata=means("Slots with images may request user namespaces of their own")
    )
    """Leases request them as ``nested_namespaces``: their programs reach most of the kernel then."""

    def __post_init__(self) -> None:
        _check_ranges(self)
        self._check("isolation", self.isolation in get_args(Isolation), ", ".join(get_args(Isolation)))
        self._check("image_format", self.image_format in get_args(ImageFormat), ", ".join(get_args(ImageFormat)))
        unknown = set(self.allowed_capabilities) - set(get_args(Capability))
        self._check("allowed_capabilities", not unknown, ", ".join(get_args(Capability)))
        if why := why_no_environment(self.env):
            raise ConfigError("env", why)
        networks = all(map(_is_network, self.closed_networks))
        self._check("closed_networks", networks, "IPv4 networks as 10.0.0.0/8, or attached")

    def _check(self, name: str, good: bool, allowed: str) -> None:
        if not good:
            raise ConfigError(name, f"got {getattr(self, name)!r}", next_step=f"allowed: {allowed}")

    def to_json(self) -> str:
        """The complete settings, including those at their default."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def parse(cls, raw: Any, where: str = "spec") -> Self:
        """Create from parsed JSON. Raises ConfigError, which names the first field (below ``where``) that is
        missing, unknown, mistyped or out of range."""
        spec: Self = build(cls, raw, where)
        return spec


@dataclass(frozen=True, kw_only=True)
class SandboxSpec(ContainerSpec):
    """One container to start: its settings and the parameters of its launch. The file the supervisor reads.

    ``token_file`` holds the bearer token (mode 0600). ``port`` 0 means any free port, which the supervisor prints.
    """

    container: str
    token_file: str
    data_dir: str
    host: str = "127.0.0.1"
    port: int = field(default=0, metadata=means(least=0, most=65535))
    reply_memory: int = field(default=1024, metadata=means(least=1, most=100_000))
    """Number of finished replies remembered per lease, for clients that resubmit calls."""
    uid_block: int = field(default=-1, metadata=means(least=-1, most=2_000_000))
    """Block of uids that the slots use (slot k: 20000 + 1000 * uid_block + k). -1 claims a block unused on this
    machine, which requires a network namespace shared by all containers of the machine; where each container has
    its own (Docker), its starter passes a number that is unique on the machine (Nomad: the host port)."""
    store_dir: str = ""
    """The image store of this node, for image slots. Empty: there are plain slots only."""
    disk_dir: str = ""
    """A directory on ext4 or xfs: layers of image slots that are on a disk reserve their space there. Empty:
    ``data_dir``."""
    unattended_after_s: int = field(default=0, metadata=means(least=0, most=31_536_000))
    """The container ends itself after so long without an authenticated request or a lease. 0: never."""

    def __post_init__(self) -> None:
        name = self.container.replace("-", "").replace("_", "")
        self._check("container", name.isalnum(), "letters, digits, - and _")
        super().__post_init__()

    @classmethod
    def launch(
        cls,
        spec: ContainerSpec,
        *,
        container: str,
        token_file: Path,
        data_dir: Path,
        unattended_after_s: int = 0,
        store_dir: str = "",
        disk_dir: str = "",
    ) -> SandboxSpec:
        """The spec of a container started on this machine on any free port of loopback."""
        return cls(
            **vars(spec),
            container=container,
            token_file=str(token_file),
            data_dir=str(data_dir),
            unattended_after_s=unattended_after_s,
            store_dir=store_dir,
            disk_dir=disk_dir,
        )

    @classmethod
    def load(cls, path: Path) -> SandboxSpec:
        """Read the file. Raises ConfigError naming the first field that is missing, unknown or mistyped."""
        try:
            raw = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ConfigError("spec", f"cannot read {path}: {error}") from error
        return cls.parse(raw)


def check_machine(spec: ContainerSpec) -> None:
    """Raise ConfigError when a container that is a virtual machine (driver ``vm``) cannot have these settings: it has
    nothing of its host (docs/machines.md)."""
    cures = {
        "binds": (spec.binds, "put what slots need into the containers' image"),
        "allow_network": (spec.allow_network, "reach networks by tools of a tool server, or use another driver"),
        "isolation": (spec.isolation == "user", "use auto or full"),
        "limits.max_memory_bytes": (
            spec.limits.most_memory_bytes > spec.limits.memory_bytes,
            "it is for slots with images, which need another driver: docker or raw_exec",
        ),
        "store_dir": (
            isinstance(spec, SandboxSpec) and spec.store_dir,
            "slots with images need another driver: docker or raw_exec",
        ),
    }
    for name, (requested, cure) in cures.items():
        if requested:
            raise ConfigError(name, "is not possible in a virtual machine", next_step=cure)


def _is_network(name: str) -> bool:
    try:
        return name == ATTACHED or bool(IPv4Network(name))
    except ValueError:
        return False


def build(kind: Any, raw: Any, where: str) -> Any:
    """``raw`` (parsed JSON) as ``kind``, a dataclass, tuple, dict or scalar type; strict."""
    if dataclasses.is_dataclass(kind):
        if not isinstance(raw, dict):
            raise ConfigError(where, "must be an object")
        hints = get_type_hints(kind)
        unknown = set(raw) - set(hints)
        if unknown:
            raise ConfigError(where, f"unknown field {min(unknown)[:80]!r}", next_step=f"allowed: {', '.join(hints)}")
        try:
            return kind(**{name: build(hints[name], value, f"{where}.{name}") for name, value in raw.items()})  # type: ignore[operator]
        except TypeError as error:
            raise ConfigError(where, str(error)) from error
    if get_origin(kind) is tuple:
        if not isinstance(raw, list):
            raise ConfigError(where, "must be a list")
        return tuple(build(get_args(kind)[0], item, where) for item in raw)
    if get_origin(kind) is Literal:
        if raw not in get_args(kind):
            raise ConfigError(where, f"got {str(raw)[:80]!r}", next_step=f"allowed: {', '.join(get_args(kind))}")
        return raw
    if get_origin(kind) is dict:
        if not isinstance(raw, dict) or not all(isinstance(v, str) for v in raw.values()):
            raise ConfigError(where, "must be an object of strings")
        return raw
    if type(raw) is not kind:
        raise ConfigError(where, f"must be {kind.__name__}, got {type(raw).__name__}")
    return raw
