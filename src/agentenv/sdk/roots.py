"""From the words of a user (an image, cores, MiB) to the root of an image slot."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from agentenv.config import cache_dir
from agentenv.errors import ConfigError
from agentenv.slots.farm_images import FarmImages
from agentenv.slots.farm_pool import FarmPool
from agentenv.store.reference import parse
from agentenv.store.store import Store
from agentenv.wire.network import NO_NETWORK, NetworkPolicy
from agentenv.wire.roots import RootSpec, Writable
from agentenv.wire.spec import MIB

_MILLIS: Final = 1000


@dataclass(frozen=True)
class ImageRoot:
    """The image of a sandbox and its limits: ``cpus`` in cores, None where the container's own limits hold.

    ``storage_mib`` bounds what the sandbox may write: in memory (it counts as the sandbox's memory) or on disk.
    ``user`` and ``workdir`` replace those of the image.
    """

    image: str
    cpus: float | None = None
    memory_mib: int | None = None
    storage_mib: int | None = None
    storage: Writable = "memory"
    user: str = ""
    workdir: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    network: NetworkPolicy = NO_NETWORK

    def __post_init__(self) -> None:
        for name in ("cpus", "memory_mib", "storage_mib"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(name, f"got {value!r}", next_step="allowed: more than 0")

    def spec(self, digest: str) -> RootSpec:
        """The root with the image of that digest."""
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
            network=self.network,
        )


def store_directory() -> Path:
    """The image store of this machine, which containers of the local backend see."""
    return cache_dir() / "store"


async def stored(root: ImageRoot, pool: object = None) -> RootSpec:
    """The root, its image fetched or built if it is not where the slots of ``pool`` see it: by the farm if that does
    so, else into this machine's store. Raises ConfigError, DockerfileError, BuildStepError, BadImageError,
    ImageUnavailableError, SandboxUnavailableError."""
    return root.spec(await _digest_of(root.image, pool))


class StoredImages:
    """What references mean for one run: each is looked up, fetched or built once, however many ask for it at once.
    What fails is tried again by the next who asks. ``pool``: whose slots the images are for."""

    def __init__(self, pool: object = None) -> None:
        self._pool = pool
        self._digests: dict[str, str] = {}
        self._asked: dict[str, asyncio.Lock] = {}

    async def root(self, root: ImageRoot) -> RootSpec:
        """As :func:`stored`."""
        async with self._asked.setdefault(root.image, asyncio.Lock()):
            if root.image not in self._digests:
                self._digests[root.image] = await _digest_of(root.image, self._pool)
        return root.spec(self._digests[root.image])


def farm_images(pool: object) -> FarmImages | None:
    """The images of a pool whose farm fetches them; None where this machine's store has them."""
    fetched = isinstance(pool, FarmPool) and pool.info is not None and pool.info.images == "farm"
    return pool.images if fetched and isinstance(pool, FarmPool) else None


async def _digest_of(image: str, pool: object) -> str:
    wanted, farm = parse(image), farm_images(pool)
    if farm is not None:
        return (await farm.resolve(image)).digest
    store = await asyncio.to_thread(Store.open, store_directory())
    if wanted.kind == "dockerfile":
        from agentenv.sdk.image_builds import build_image  # it needs sandboxes, which need this module

        return (await build_image(Path(wanted.name), store)).image
    return (await asyncio.to_thread(store.ensure, wanted)).digest
