"""From the words of a user (an image, cores, MiB) to the root of an image slot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Literal, TypedDict, TypeVar

from agentenv.config import ContainerFields, ContainerSettings, cache_dir
from agentenv.errors import ConfigError
from agentenv.farm_client.images import FarmImages
from agentenv.farm_client.pool import FarmPool
from agentenv.wire.network import NetworkPolicy
from agentenv.wire.roots import RootSpec, ServiceSpec, Writable
from agentenv.wire.spec import MEMORY_HEADROOM_BYTES, MIB, Capability, SlotLimits

Network = Literal["none", "public"] | Sequence[str] | NetworkPolicy
"""What a sandbox may reach: nothing; everything but this machine and closed networks; or only these hosts
(``example.org``, ``*.example.org``, ``10.0.0.0/8``, each also with ``:PORT``), through a proxy. As a policy:
``NetworkPolicy("public", denied=("10.0.0.0/8",))``, everything but these addresses and networks."""
_MILLIS: Final = 1000
_ROOM_BYTES: Final = 1024 * MIB
"""Memory for the programs of a sandbox that asks for storage in memory and does not say how much memory."""
R = TypeVar("R")
_NO_IMAGE: Final = "sha256:" + 64 * "0"
_OF_PLAIN: Final = ("memory_mib", "storage_mib", "network", "workdir")
"""What a sandbox without an image may be given too."""


class RootFields(TypedDict, total=False):
    """:class:`ImageRoot` as keyword arguments, without its image and its environment."""

    cpus: float | None
    memory_mib: int | None
    storage_mib: int | None
    storage: Writable
    user: str
    workdir: str
    network: Network
    capabilities: Sequence[Capability]
    nested_namespaces: bool
    services: Mapping[str, Service]
    volumes: Mapping[str, str]


class ImageFields(RootFields, total=False):
    """:class:`ImageRoot` as keyword arguments, without its image."""

    env: Mapping[str, str]
    hosts: Sequence[str]


class SandboxFields(RootFields, ContainerFields, total=False):
    """What a sandbox and its container may be given by name."""


def network_policy(given: Network) -> NetworkPolicy:
    """The policy that somebody wrote. Raises ConfigError (``network``)."""
    if isinstance(given, NetworkPolicy):
        return given
    if given in ("none", "public"):
        return NetworkPolicy(given)
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise ConfigError(
            "network",
            f"got {given!r}",
            next_step="allowed: 'none', 'public', or a list of hosts: ['example.org', '*.example.org', '10.0.0.0/8']",
        )
    return NetworkPolicy("allow", tuple(given)) if given else NetworkPolicy()


@dataclass(frozen=True)
class Service:
    """One more image beside that of a sandbox: a database, a server. Its programs see their own files and processes
    only; with the sandbox's they share the network (all are at 127.0.0.1) and the limits. Nothing of it is started:
    that is what :meth:`agentenv.sdk.slot_tools.SlotTools.service` is for. ``user``, ``workdir``, ``env`` and
    ``volumes`` as of an :class:`ImageRoot`."""

    image: str
    user: str = ""
    workdir: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    volumes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ImageRoot:
    """The image of a sandbox and its limits: ``cpus`` in cores, None where the container's own limits hold.

    ``storage_mib`` bounds what the sandbox may write: in memory (it counts as the sandbox's memory) or on disk.
    ``user`` and ``workdir`` replace those of the image; a ``workdir`` that is missing is made. ``network``: what it may
    reach, which the container has to allow (``allow_network``). ``capabilities`` are over the sandbox's own namespaces,
    beyond those that its root has; with ``nested_namespaces`` its programs may make user namespaces, as browsers do for
    their sandboxes. ``services`` by their names, which mean 127.0.0.1 in it as ``hosts`` do; ``volumes``: absolute
    paths, and the name of the directory that is there (``NAME:ro``: read-only), shared with services that name it.
    """

    image: str
    cpus: float | None = None
    memory_mib: int | None = None
    storage_mib: int | None = None
    storage: Writable = "memory"
    user: str = ""
    workdir: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    network: Network = "none"
    capabilities: Sequence[Capability] = ()
    nested_namespaces: bool = False
    services: Mapping[str, Service] = field(default_factory=dict)
    volumes: Mapping[str, str] = field(default_factory=dict)
    hosts: Sequence[str] = ()

    def __post_init__(self) -> None:
        network_policy(self.network)
        _check_positive(cpus=self.cpus, memory_mib=self.memory_mib, storage_mib=self.storage_mib)

    def spec(self, digest: str, of_services: Mapping[str, str] | None = None) -> RootSpec:
        """The root with the image of that digest. ``of_services``: the digests of the services' images, by name."""
        digests = of_services or dict.fromkeys(self.services, _NO_IMAGE)
        memory_bytes = 0 if self.memory_mib is None else self.memory_mib * MIB
        default = RootSpec(digest).writable_bytes
        writable_bytes = self.storage_mib * MIB if self.storage_mib is not None else default
        if self.storage_mib is None and memory_bytes:
            writable_bytes = min(default, memory_bytes // 2)
        return RootSpec(
            image=digest,
            writable=self.storage,
            writable_bytes=writable_bytes,
            memory_bytes=memory_bytes,
            cpu_millis=0 if self.cpus is None else round(self.cpus * _MILLIS),
            user=self.user,
            workdir=self.workdir,
            env=dict(self.env),
            network=network_policy(self.network),
            capabilities=tuple(self.capabilities),
            nested_namespaces=self.nested_namespaces,
            services=tuple(
                ServiceSpec(name, digests[name], one.user, one.workdir, dict(one.env), dict(one.volumes))
                for name, one in self.services.items()
            ),
            volumes=dict(self.volumes),
            hosts=tuple(dict.fromkeys((*self.services, *self.hosts))),
        )


def container_for(root: ImageRoot, settings: ContainerSettings) -> ContainerSettings:
    """The settings of a container for such a sandbox alone: its slots have at least the memory that the root asks for,
    and a network if it asks for one. Pure."""
    asked = root.spec(_NO_IMAGE)
    memory_bytes = asked.memory_bytes
    if not memory_bytes and root.storage_mib is not None and asked.writable == "memory":
        memory_bytes = asked.writable_bytes + _ROOM_BYTES
    limits = replace(settings.limits, memory_bytes=max(settings.limits.memory_bytes, memory_bytes))
    allowed = tuple(dict.fromkeys((*settings.allowed_capabilities, *asked.capabilities)))
    nested = settings.allow_nested_namespaces or asked.nested_namespaces
    update = {"allowed_capabilities": allowed, "allow_nested_namespaces": nested}
    return _with(settings, limits, asked.network).model_copy(update=update)


def plain_container_for(fields: RootFields, settings: ContainerSettings) -> ContainerSettings:
    """The settings of the container of a sandbox without an image: memory and storage are its slots' own limits. Pure.
    Raises ConfigError for what only sandboxes with an image can have."""
    network = network_policy(fields.get("network", "none"))
    if network.kind == "allow":
        raise ConfigError(
            "network", "an allow list is for sandboxes with an image", next_step="name an image, or give 'public'"
        )
    for_images = [name for name, value in fields.items() if value and name not in _OF_PLAIN and value != "memory"]
    if for_images:
        raise ConfigError(for_images[0], "is for sandboxes with an image", next_step="name an image, or leave it out")
    memory_mib, storage_mib = fields.get("memory_mib"), fields.get("storage_mib")
    _check_positive(memory_mib=memory_mib, storage_mib=storage_mib)
    # A plain slot's network is its container's, from its start to its end. It has no IPv6.
    denied = (text for text in network.denied if ":" not in text)
    closed = tuple(dict.fromkeys((*settings.closed_networks, *denied)))
    made = _with(settings, _plain_limits(settings.limits, memory_mib, storage_mib), network)
    return made.model_copy(update={"closed_networks": closed})


def with_memory(settings: ContainerSettings, memory_mib: int) -> ContainerSettings:
    """With slots of so much memory, and in less of it less for files of those without an image. Pure. Raises
    ConfigError."""
    _check_positive(memory_mib=memory_mib)
    return settings.model_copy(update={"limits": _plain_limits(settings.limits, memory_mib, None)})


def root_of(given: R | str | None, fields: ImageFields) -> R | ImageRoot | RootSpec | None:
    """The root of a sandbox of a farm, from an image or a whole root, and fields by name. Raises ConfigError naming a
    field that this root cannot be given."""
    if isinstance(given, str):
        return ImageRoot(given, **fields)
    if given is None and not set(fields) - {"workdir"}:
        return plain_root(fields.get("workdir"))
    if fields:
        name = next(iter(fields))
        cure = "name an image" if given is None else "give it as a field of the root"
        raise ConfigError(name, "belongs to an image that is given by its name", next_step=cure)
    return given


def plain_root(workdir: str | None) -> RootSpec | None:
    """The root of a sandbox without an image that starts in ``workdir``. Raises ConfigError (``root.workdir``)."""
    return RootSpec("", workdir=workdir) if workdir else None


def _plain_limits(limits: SlotLimits, memory_mib: int | None, storage_mib: int | None) -> SlotLimits:
    """All three file systems are in memory: in less of it they are smaller, and for more storage there is more of it,
    unless the other is given too."""
    if memory_mib is None:
        files_bytes = limits.workspace_bytes if storage_mib is None else storage_mib * MIB
        least_bytes = files_bytes + limits.tmp_bytes + limits.shm_bytes + MEMORY_HEADROOM_BYTES
        return replace(limits, workspace_bytes=files_bytes, memory_bytes=max(limits.memory_bytes, least_bytes))
    memory_bytes = memory_mib * MIB
    return replace(
        limits,
        memory_bytes=memory_bytes,
        workspace_bytes=min(limits.workspace_bytes, memory_bytes // 2) if storage_mib is None else storage_mib * MIB,
        tmp_bytes=min(limits.tmp_bytes, memory_bytes // 8),
        shm_bytes=min(limits.shm_bytes, memory_bytes // 16),
    )


def _with(settings: ContainerSettings, limits: SlotLimits, network: NetworkPolicy) -> ContainerSettings:
    allow = settings.allow_network or network.kind != "none"
    return settings.model_copy(update={"limits": limits, "allow_network": allow})


def _check_positive(**given: float | None) -> None:
    for name, value in given.items():
        if value is not None and not value > 0:
            raise ConfigError(name, f"got {value!r}", next_step="allowed: more than 0")


def store_directory() -> Path:
    """The image store of this machine, which containers of the local backend see."""
    return cache_dir() / "store"


def farm_images(pool: object) -> FarmImages | None:
    """The images of a pool whose farm fetches them; None where this machine's store has them."""
    fetched = isinstance(pool, FarmPool) and pool.info is not None and pool.info.images == "farm"
    return pool.images if fetched and isinstance(pool, FarmPool) else None
