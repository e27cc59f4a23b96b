"""Fetches the layers of a checkpoint from a container, as tars, and makes images of them."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Final

import aiohttp

from agentenv.containers.handle import ContainerHandle
from agentenv.containers.http import headers_for, open_session, refusal
from agentenv.deadlines import scaled
from agentenv.errors import CheckpointError, ConnectionLostError
from agentenv.store.addition import Runtime
from agentenv.store.manifest import StoredImage
from agentenv.store.store import Store
from agentenv.tar_headers import is_ended
from agentenv.wire.leases import LAYERS_HEADER

_LOG: Final = "the container's log says why"
_PIECE_BYTES: Final = 1024 * 1024
_SILENCE_S: Final = scaled(60.0)
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


async def download_layers(
    session: aiohttp.ClientSession, handle: ContainerHandle, checkpoint: str, directory: Path, *, first: int = 0
) -> list[Path]:
    """Write the layers above the image into ``directory``, the lowest first, without the ``first`` lowest.

    Raises CheckpointError; ConnectionLostError (it may be tried again); OSError."""
    paths: list[Path] = []
    while True:
        number = first + len(paths)
        path = directory / f"{number}.tar"
        count = await _download(session, handle, f"/v1/checkpoints/{checkpoint}/layers/{number}", path)
        paths.append(path)
        if number + 1 >= count:
            return paths


async def _download(session: aiohttp.ClientSession, handle: ContainerHandle, route: str, path: Path) -> int:
    timeout = aiohttp.ClientTimeout(total=None, connect=_SILENCE_S, sock_read=_SILENCE_S)
    try:
        async with session.get(handle.base_url + route, headers=headers_for(handle), timeout=timeout) as response:
            if response.status != 200:
                raise refusal(handle, response.status, await response.read(), CheckpointError)
            with path.open("wb") as file:
                async for piece in response.content.iter_chunked(_PIECE_BYTES):
                    file.write(piece)
            if not await asyncio.to_thread(is_ended, path):
                raise CheckpointError(f"container {handle.id}: a layer's tar was cut short", next_step=_LOG)
            return int(response.headers.get(LAYERS_HEADER, "1"))
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ConnectionLostError(f"container {handle.id}: a layer of a checkpoint: {error!r}") from error
