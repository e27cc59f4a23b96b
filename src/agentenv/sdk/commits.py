"""Images made of what a slot has written."""

from __future__ import annotations

import asyncio
from typing import Final

from agentenv.containers.layers import image_above
from agentenv.errors import CheckpointError, ConfigError
from agentenv.executor.session import ToolSession
from agentenv.sdk.roots import farm_images, store_directory
from agentenv.slots.farm_images import FarmImages
from agentenv.store.addition import Runtime
from agentenv.store.reference import parse
from agentenv.store.store import Store


async def committed(session: ToolSession, name: str) -> str:
    """See :meth:`agentenv.sdk.slot_tools.SlotTools.commit`."""
    if name and parse(name).kind != "docker":
        raise ConfigError("name", f"got {name!r}", next_step="give a name like a registry's: prepared:1")
    if session.root is None or not session.root.image:
        raise CheckpointError("a slot without an image cannot become one", next_step="lease one with an image")
    if (farm := farm_images(session.pool)) is not None:
        return await _committed_there(session, farm, name)
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


async def _committed_there(session: ToolSession, farm: FarmImages, name: str) -> str:
    """Into the store of the slot's node, by its keeper."""
    if name:
        raise ConfigError("name", "is for this machine's store", next_step="use the digest that commit() returns")
    checkpoint = await session.checkpoint()
    try:
        return (await farm.commit(checkpoint.container, checkpoint.root.checkpoint, checkpoint.root.image)).digest
    finally:
        await session.drop(checkpoint)


_ELSEWHERE: Final = "images are made where the slot's own is stored: pull it here, or use a sandbox of this machine"
