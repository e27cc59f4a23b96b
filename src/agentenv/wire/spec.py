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
"""Capabilities over the slot's own namespaces that a lease may ask for, beyond those that every image slot has."""
ImageFormat = Literal["auto", "erofs", "tree", "shifted"]
ATTACHED = "attached"
"""In :attr:`ContainerSpec.closed_networks`: all networks the container itself is attached to."""


@dataclass(frozen=True)
class Bind:
    """A host path mounted read-only in every slot."""

    source: str
    target: str


@dataclass(frozen=True)
class SlotLimits:
    """Limits of each slot. All are enforced by the kernel, none by the server."""

    processes: int = 400
    memory_bytes: int = 2048 * MIB
    workspace_bytes: int = 1024 * MIB
    workspace_inodes: int = 120_000
    tmp_bytes: int = 256 * MIB
    shm_bytes: int = 64 * MIB
    open_files: int = 4096
    cpu_weight: int = 100

    def __post_init__(self) -> None:
        for limit in dataclasses.fields(self):
            if getattr(self, limit.name) < 1:
                raise ConfigError(f"limits.{limit.name}", "must be at least 1")
        files_bytes = self.workspace_bytes + self.tmp_bytes + self.shm_bytes
        if self.memory_bytes < files_bytes + MEMORY_HEADROOM_BYTES:
            # All three are tmpfs: full ones count as memory, and no OOM kill could free them again.
            raise ConfigError(
                "limits.memory_bytes",
                f"{self.memory_bytes} is less than workspace + tmp + shm ({files_bytes}) and"
                f" {MEMORY_HEADROOM_BYTES} for processes",
                next_step="raise memory_bytes, or lower workspace_bytes, tmp_bytes or shm_bytes",
            )


def _within(least: int, most: int) -> Mapping[str, int]:
    """Field metadata: the allowed range of its number."""
    return MappingProxyType({"least": least, "most": most})


@dataclass(frozen=True)
class ContainerSpec:
    """Settings of a container, whoever starts it: its slots, their mounts and limits.

    The only definition of these settings, with their defaults and ranges.
    :class:`agentenv.config.ContainerSettings` is the same for users, a Nomad job has it as one JSON variable, and
    :class:`SandboxSpec` adds the parameters of a launch. A new setting is a field here and one in
    ContainerSettings.
    """

    slots: int = field(default=10, metadata=_within(1, 1000))
    isolation: Isolation = "auto"
    """``auto``: ``full`` when started by root, otherwise ``user``. When named explicitly, the container refuses to
    start as anything else."""
    allow_network: bool = False
    """Slots have network access, but never to their machine's loopback."""
    closed_networks: tuple[str, ...] = ()
    """With ``allow_network``: IPv4 networks (``10.0.0.0/8``) that no slot may reach, in addition to the container's
    own addresses and 169.254.0.0/16, which are always closed. ``attached``: the networks the container is attached
    to (under Docker: its host's bridge, with the other containers)."""
    limits: SlotLimits = SlotLimits()
    """Limits of each slot."""
    binds: tuple[Bind, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    """Additional environment variables of every command in a slot."""
    output_bytes: int = field(default=MIB, metadata=_within(1024, 64 * MIB))
    """Cap on each of stdout and stderr returned per call (head + tail kept)."""
    spare_shells: bool = True
    """Each slot keeps a bash ready for its next command."""
    image_format: ImageFormat = "auto"
    """How images are shown to slots. ``auto``: as the machine can do it best. When one is named, and not possible,
    slots of images are refused."""
    checkpoint_bytes: int = field(default=4096 * MIB, metadata=_within(0, 2**50))
    """Memory that all checkpoints of the container may take together, beside that of the slots. 0: there are none.
    Those of slots that write to a disk take theirs there instead."""
    allowed_capabilities: tuple[Capability, ...] = ("sys_ptrace", "sys_nice", "sys_resource", "audit_write", "mknod")
    """What a lease with an image may ask for. Not by default: ``net_admin`` and ``net_raw``, with which programs reach
    parts of the kernel that have often been flawed (packet filters, packet sockets)."""
    allow_nested_namespaces: bool = False
    """Leases with an image may ask for ``nested_namespaces``: its programs reach most of the kernel then."""

    def __post_init__(self) -> None:
        for setting in dataclasses.fields(self):
            if bounds := setting.metadata:
                least, most = bounds["least"], bounds["most"]
                self._check(setting.name, least <= getattr(self, setting.name) <= most, f"{least} to {most}")
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
    port: int = field(default=0, metadata=_within(0, 65535))
    reply_memory: int = field(default=1024, metadata=_within(1, 100_000))
    """Number of finished replies remembered per lease, for clients that resubmit calls."""
    uid_block: int = field(default=-1, metadata=_within(-1, 2_000_000))
    """Block of uids that the slots use (slot k: 20000 + 1000 * uid_block + k). -1 claims a block unused on this
    machine, which requires a network namespace shared by all containers of the machine; where each container has
    its own (Docker), its starter passes a number that is unique on the machine (Nomad: the host port)."""
    store_dir: str = ""
    """The image store of this node, for image slots. Empty: there are plain slots only."""
    disk_dir: str = ""
    """A directory on ext4 or xfs: layers of image slots that are on a disk reserve their space there. Empty:
    ``data_dir``."""
    unattended_after_s: int = field(default=0, metadata=_within(0, 31_536_000))
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
    """Raise ConfigError when a container that is a virtual machine (driver ``vm``) cannot be what is asked for: it has
    nothing of its host (docs/machines.md)."""
    cures = {
        "binds": (spec.binds, "put what slots need into the containers' image"),
        "allow_network": (spec.allow_network, "reach networks by tools of a tool server, or use another driver"),
        "isolation": (spec.isolation == "user", "use auto or full"),
        "store_dir": (
            isinstance(spec, SandboxSpec) and spec.store_dir,
            "slots with images need another driver: docker or raw_exec",
        ),
    }
    for name, (asked, cure) in cures.items():
        if asked:
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
