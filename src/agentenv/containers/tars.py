"""Tars into an image slot and out of it, with owners, modes and times as they are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO, Final

import aiohttp

from agentenv.containers.http import headers_for, open_session, refusal
from agentenv.containers.transfer import TransferLease
from agentenv.errors import ConnectionLostError, InfraError
from agentenv.tar_headers import is_ended
from agentenv.wire.transfers import LEASE_HEADER, TransferReply

_PIECE_BYTES: Final = 1024 * 1024
_TIMEOUT: Final = aiohttp.ClientTimeout(total=None, sock_connect=15.0, sock_read=300.0)


async def put_tar(
    lease: TransferLease, stream: IO[bytes], directory: str, *, owner: tuple[int, int] = (0, 0), mode: int = 0o755
) -> None:
    """Unpack an uncompressed tar below a directory of the slot, which is made with its missing parents, of this owner
    and mode. Directories that exist take the owner, mode and time of their entries, files and links are replaced, and
    no link is followed. Raises OSError (with the path) for what cannot be made there, InfraError."""

    async def body() -> AsyncIterator[bytes]:
        while piece := stream.read(_PIECE_BYTES):
            yield piece

    query = {"path": directory, "uid": str(owner[0]), "gid": str(owner[1]), "mode": str(mode)}
    async with _request(lease, "PUT", query, body()) as response:
        reply = TransferReply.model_validate_json(await response.read())
    if reply.exit_code:
        raise OSError(reply.exit_code, reply.stderr.strip(), reply.path or directory)


async def get_tar(lease: TransferLease, path: str, target: Path) -> None:
    """Write a directory's content, or one file, as a tar to ``target``. Raises InfraError, OSError."""
    async with _request(lease, "GET", {"path": path}, None) as response:
        with target.open("wb") as file:
            async for piece in response.content.iter_chunked(_PIECE_BYTES):
                file.write(piece)
    if not await asyncio.to_thread(is_ended, target):
        raise InfraError(
            f"{path}: its tar was cut short", next_step="a file in it may be unreadable, or its name over 4096 bytes"
        )


@asynccontextmanager
async def _request(
    lease: TransferLease, method: str, query: dict[str, str], data: AsyncIterator[bytes] | None
) -> AsyncIterator[aiohttp.ClientResponse]:
    handle = lease.container
    headers = headers_for(handle, **{LEASE_HEADER: lease.key.model_dump_json()})
    url = f"{handle.base_url}/v1/slots/{lease.key.slot}/tar"
    try:
        async with (
            open_session() as session,
            session.request(method, url, params=query, data=data, headers=headers, timeout=_TIMEOUT) as response,
        ):
            if response.status != 200:
                raise refusal(handle, response.status, await response.read(), InfraError)
            yield response
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ConnectionLostError(f"container {handle.id}: a tar: {error!r}") from error
