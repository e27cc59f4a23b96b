"""Follows what the calls in one slot print: the client of ``GET /v1/slots/{slot}/tail``. No retries."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import aiohttp

from agentenv.containers.handle import ContainerHandle
from agentenv.containers.http import headers_for, refusal
from agentenv.deadlines import scaled
from agentenv.errors import ConnectionLostError
from agentenv.wire.tails import TAIL_BEAT_S


async def tail(
    session: aiohttp.ClientSession, handle: ContainerHandle, slot: int, epoch: int
) -> AsyncGenerator[bytes, None]:
    """The lines as they come (:mod:`agentenv.wire.tails`), in pieces of any length, until the lease of that epoch ends.

    Raises: ConnectionLostError: there was no connection, or it was cut. Otherwise the error the container named.
    """
    silence_s = scaled(5 * TAIL_BEAT_S)
    timeout = aiohttp.ClientTimeout(total=None, connect=silence_s, sock_read=silence_s)
    url = f"{handle.base_url}/v1/slots/{slot}/tail"
    try:
        async with session.get(
            url, params={"epoch": str(epoch)}, headers=headers_for(handle), timeout=timeout
        ) as response:
            if response.status != 200:
                raise refusal(handle, response.status, await response.read())
            async for piece in response.content.iter_any():
                yield piece
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise ConnectionLostError(f"container {handle.id}: GET /v1/slots/{slot}/tail: {error!r}") from error
