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
from agentenv.store.reference import committed as committed_reference
from agentenv.store.store import Store


async def committed(session: ToolSession, name: str) -> str:
    """See :meth:`agentenv.sdk.slot_tools.SlotTools.commit`."""
    named = _reference(name) if name else ""
    if session.root is None or not session.root.image:
        raise CheckpointError("a slot without an image cannot become one", next_step="lease one with an image")
    if (farm := farm_images(session.pool)) is not None:
        return await _committed_there(session, farm, named)
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
    if named:
        await asyncio.to_thread(store.name, named, image)
    return image.digest


def _reference(name: str) -> str:
    """``committed:NAME``. Raises ConfigError (``name``)."""
    try:
        return str(committed_reference(name.removeprefix("committed:")))
    except ConfigError as error:
        raise ConfigError("name", f"got {name!r}", next_step="give a name like a registry's: prepared:1") from error


async def _committed_there(session: ToolSession, farm: FarmImages, named: str) -> str:
    """Into the store of the slot's node, by its keeper."""
    checkpoint = await session.checkpoint()
    root = checkpoint.root
    try:
        return (await farm.commit(checkpoint.container, root.checkpoint, root.image, named)).digest
    finally:
        await session.drop(checkpoint)


_ELSEWHERE: Final = "images are made where the slot's own is stored: pull it here, or use a sandbox of this machine"
