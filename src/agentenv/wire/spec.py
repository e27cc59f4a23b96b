"""Specification of a container: the file the supervisor reads at start.

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
from typing import Any, get_args, get_origin, get_type_hints

from agentenv.errors import ConfigError

MIB = 1024 * 1024
MEMORY_HEADROOM_BYTES = 64 * MIB
"""Minimum memory left for a slot's processes when all its file systems are full."""

SEALED_ENV: Mapping[str, str] = MappingProxyType(
    {
        "HOME": "/nonexistent",
        "XDG_CACHE_HOME": "/tmp/.cache",  # noqa: S108 - of the slot's own, which a seal makes anew
        "PYTHONNOUSERSITE": "1",
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "GIT_CONFIG_COUNT": "2",
        "GIT_CONFIG_KEY_0": "core.fsmonitor",
        "GIT_CONFIG_VALUE_0": "false",
        "GIT_CONFIG_KEY_1": "core.hooksPath",
        "GIT_CONFIG_VALUE_1": "/dev/null",
    }
)
"""Environment of every command in a sealed slot; a call's own variables are added to it. Home is no longer the
workspace but a directory that does not exist, and cannot be created where the root is read-only: the files that
programs execute or obey in a home directory (usercustomize, .bashrc, .gitconfig, .local/bin, pip.conf) could have
been written by the policy."""

ATTACHED = "attached"
"""In :attr:`SandboxSpec.closed_networks`: all networks the container itself is attached to."""


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


@dataclass(frozen=True)
class SandboxSpec:
    """One container: its number of slots, their mounts and limits, and where the server listens.

    ``isolation``: ``auto`` takes ``full`` when started by root and ``user`` otherwise; when named explicitly, the
    container refuses to start as anything else. ``token_file`` holds the bearer token (mode 0600). ``port`` 0 means
    any free port; the supervisor prints the one it got.
    """

    container: str
    token_file: str
    data_dir: str
    slots: int = 10
    host: str = "127.0.0.1"
    port: int = 0
    isolation: str = "auto"
    allow_network: bool = False
    limits: SlotLimits = field(default_factory=SlotLimits)
    binds: tuple[Bind, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    """Additional environment variables of every command in a slot."""
    output_bytes: int = MIB
    """Cap on each of stdout and stderr returned per call (head + tail kept)."""
    spare_shells: bool = True
    reply_memory: int = 1024
    """Number of finished replies remembered per lease, for clients that resubmit calls."""
    uid_block: int = -1
    """Block of uids that the slots use (slot k: 20000 + 1000 * uid_block + k). -1 claims a block unused on this
    machine, which requires a network namespace shared by all containers of the machine; where each container has
    its own (Docker), its starter passes a number that is unique on the machine (Nomad: the host port)."""

    closed_networks: tuple[str, ...] = ()
    """With ``allow_network``: IPv4 networks (``10.0.0.0/8``) no slot may reach, beside the container's own
    addresses and 169.254.0.0/16, which never can. ``attached``: the networks the container is directly on
    (under Docker: its host's bridge, and the containers beside it)."""

    def __post_init__(self) -> None:
        checks = {
            "container": (self.container.replace("-", "").replace("_", "").isalnum(), "letters, digits, - and _"),
            "slots": (1 <= self.slots <= 1000, "1 to 1000"),
            "port": (0 <= self.port <= 65535, "0 to 65535"),
            "isolation": (self.isolation in ("auto", "full", "user"), "auto, full or user"),
            "output_bytes": (1024 <= self.output_bytes <= 64 * MIB, "1 KiB to 64 MiB"),
            "reply_memory": (1 <= self.reply_memory <= 100_000, "1 to 100000"),
            "closed_networks": (
                all(map(_is_network, self.closed_networks)),
                "IPv4 networks as 10.0.0.0/8, or attached",
            ),
            "uid_block": (-1 <= self.uid_block <= 2_000_000, "-1 to 2000000"),
        }
        for name, (good, allowed) in checks.items():
            if not good:
                raise ConfigError(name, f"got {getattr(self, name)!r}", next_step=f"allowed: {allowed}")

    def to_json(self) -> str:
        """The file's text."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def load(cls, path: Path) -> SandboxSpec:
        """Read the file; ConfigError names the first field that is missing, unknown or mistyped."""
        try:
            raw = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ConfigError("spec", f"cannot read {path}: {error}") from error
        spec: SandboxSpec = _build(cls, raw, "spec")
        return spec


def _is_network(name: str) -> bool:
    try:
        return name == ATTACHED or bool(IPv4Network(name))
    except ValueError:
        return False


def _build(kind: Any, raw: Any, where: str) -> Any:
    """``raw`` (parsed JSON) as ``kind``, a dataclass, tuple, dict or scalar type; strict."""
    if dataclasses.is_dataclass(kind):
        if not isinstance(raw, dict):
            raise ConfigError(where, "must be an object")
        hints = get_type_hints(kind)
        unknown = set(raw) - set(hints)
        if unknown:
            raise ConfigError(where, f"unknown field {min(unknown)!r}", next_step=f"allowed: {', '.join(hints)}")
        try:
            return kind(**{name: _build(hints[name], value, f"{where}.{name}") for name, value in raw.items()})  # type: ignore[operator]
        except TypeError as error:
            raise ConfigError(where, str(error)) from error
    if get_origin(kind) is tuple:
        if not isinstance(raw, list):
            raise ConfigError(where, "must be a list")
        return tuple(_build(get_args(kind)[0], item, where) for item in raw)
    if get_origin(kind) is dict:
        if not isinstance(raw, dict) or not all(isinstance(v, str) for v in raw.values()):
            raise ConfigError(where, "must be an object of strings")
        return raw
    if type(raw) is not kind:
        raise ConfigError(where, f"must be {kind.__name__}, got {type(raw).__name__}")
    return raw
