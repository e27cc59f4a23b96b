"""Images made of what a slot has written."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Final

from agentenv.containers.handle import ContainerHandle
from agentenv.containers.http import open_session
from agentenv.containers.layers import download_layers
from agentenv.errors import CheckpointError, ConfigError
from agentenv.executor.session import ToolSession
from agentenv.sdk.roots import store_directory
from agentenv.store.addition import Runtime
from agentenv.store.manifest import StoredImage
from agentenv.store.reference import parse
from agentenv.store.store import Store

_EMPTY_TAR_BYTES: Final = 1024
"""A layer in which nothing is."""


async def image_above(
    store: Store, base: StoredImage, container: ContainerHandle, checkpoint: str, runtime: Runtime, *, first: int = 0
) -> tuple[StoredImage, int]:
    """Store the image of ``base``'s layers and a checkpoint's above them, without the ``first`` lowest of these;
    returns how many these were. Raises CheckpointError, ConnectionLostError, BadImageError, ImageUnavailableError."""
    with tempfile.TemporaryDirectory(prefix="agentenv-layers-") as directory:
        async with open_session() as http:
            tars = await download_layers(http, container, checkpoint, Path(directory), first=first)
        written = [tar for tar in tars if tar.stat().st_size > _EMPTY_TAR_BYTES]
        return await asyncio.to_thread(store.add, base, written, runtime), len(tars)


async def committed(session: ToolSession, name: str) -> str:
    """See :meth:`agentenv.sdk.slot_tools.SlotTools.commit`."""
    if name and parse(name).kind != "docker":
        raise ConfigError("name", f"got {name!r}", next_step="give a name like a registry's: prepared:1")
    if session.root is None or not session.root.image:
        raise CheckpointError("a slot without an image cannot become one", next_step="lease one with an image")
    store = await asyncio.to_thread(Store.open, store_directory())
    base = await asyncio.to_thread(store.find, session.root.image)
    if base is None:
        raise ConfigError("image", f"{session.root.image} is not in {store_directory()}", next_step=_ELSEWHERE)
    checkpoint = await session.checkpoint()
    try:
        container = session.lease.container
        image, _ = await image_above(store, base, container, checkpoint.root.checkpoint, Runtime.of(base))
    finally:
        await session.drop(checkpoint)
    if name:
        await asyncio.to_thread(store.name, name, image)
    return image.digest


_ELSEWHERE: Final = "images are made where the slot's own is stored: pull it here, or use a sandbox of this machine"
