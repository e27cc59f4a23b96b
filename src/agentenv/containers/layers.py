"""Fetches the layers of a checkpoint from a container, as tars."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import aiohttp

from agentenv.containers.handle import ContainerHandle
from agentenv.containers.http import headers_for, refusal
from agentenv.errors import CheckpointError, ConnectionLostError
from agentenv.wire.leases import LAYERS_HEADER

_PIECE_BYTES: Final = 1024 * 1024
_SILENCE_S: Final = 60.0


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
            return int(response.headers.get(LAYERS_HEADER, "1"))
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ConnectionLostError(f"container {handle.id}: a layer of a checkpoint: {error!r}") from error
