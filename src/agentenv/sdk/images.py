"""The images of slots: what a reference means is looked up, fetched, or built, where the slots see it."""

from __future__ import annotations

import asyncio
from pathlib import Path

from agentenv.api.image_keeper.reach import Reach, ensured
from agentenv.config import named_registries
from agentenv.sdk.image_builds import build_image
from agentenv.sdk.roots import ImageRoot, farm_images, store_directory
from agentenv.store.reference import is_digest, parse
from agentenv.store.store import Store
from agentenv.wire.roots import RootSpec


async def stored(root: ImageRoot, pool: object = None, patience_s: float | None = None) -> RootSpec:
    """The root, its image fetched or built if it is not where the slots of ``pool`` see it: by the farm if that does
    so, else into this machine's store. ``patience_s``: how long a registry that fails is waited for, on a farm; None:
    as long as its keepers do. Raises ConfigError, DockerfileError, BuildStepError, BadImageError,
    ImageUnavailableError, SandboxUnavailableError."""
    services = {name: await _digest_of(one.image, pool, patience_s) for name, one in root.services.items()}
    return root.spec(await _digest_of(root.image, pool, patience_s), services)


class StoredImages:
    """What references mean for one run: each is looked up, fetched or built once, however many ask for it at once.
    What fails is tried again by the next who asks. ``pool``: whose slots the images are for."""

    def __init__(self, pool: object = None) -> None:
        self._pool = pool
        self._digests: dict[str, str] = {}
        self._asked: dict[str, asyncio.Lock] = {}

    async def root(self, root: ImageRoot) -> RootSpec:
        """As :func:`stored`."""
        services = {name: await self._digest_of(one.image) for name, one in root.services.items()}
        return root.spec(await self._digest_of(root.image), services)

    async def _digest_of(self, image: str) -> str:
        async with self._asked.setdefault(image, asyncio.Lock()):
            if image not in self._digests:
                self._digests[image] = await _digest_of(image, self._pool, of_task=True)
        return self._digests[image]


async def _digest_of(image: str, pool: object, patience_s: float | None = None, *, of_task: bool = False) -> str:
    """``of_task``: its registry has to be public, or named (``named_registries``): a task may be a stranger's."""
    if is_digest(image):  # of an image that was built, committed or fetched before
        return image
    wanted, farm = parse(image), farm_images(pool)
    if farm is not None:
        return (await farm.resolve(image, patience_s)).digest
    store = await asyncio.to_thread(Store.open, store_directory())
    if wanted.kind == "dockerfile":
        return (await build_image(Path(wanted.name), store)).image
    if of_task:
        return (await ensured(store, wanted, Reach(named_registries()))).digest
    return (await asyncio.to_thread(store.ensure, wanted)).digest
