"""Images of checkpoints: their layers are fetched from the container, as tars."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Final

from agentenv.containers.handle import ContainerHandle
from agentenv.containers.transfer import download_layers
from agentenv.store.addition import Runtime
from agentenv.store.manifest import StoredImage
from agentenv.store.store import Store

_EMPTY_TAR_BYTES: Final = 1024
"""A layer in which nothing is."""


async def image_above(
    store: Store, base: StoredImage, container: ContainerHandle, checkpoint: str, runtime: Runtime, *, first: int = 0
) -> tuple[StoredImage, int]:
    """Store the image of ``base``'s layers and a checkpoint's above them, without the ``first`` lowest of these;
    returns how many these were. Raises CheckpointError, ConnectionLostError, BadImageError, ImageUnavailableError."""
    with tempfile.TemporaryDirectory(prefix="agentenv-layers-") as directory:
        tars = await download_layers(container, checkpoint, Path(directory), first=first)
        written = [tar for tar in tars if tar.stat().st_size > _EMPTY_TAR_BYTES]
        return await asyncio.to_thread(store.add, base, written, runtime), len(tars)
