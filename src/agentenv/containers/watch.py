"""Follows the slots of one container: the client of ``GET /v1/watch``. No retries."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Final

import aiohttp
from pydantic import ValidationError

from agentenv.containers.handle import ContainerHandle
from agentenv.containers.http import fence_headers, headers_for, refusal
from agentenv.errors import ConnectionLostError, ProtocolError
from agentenv.wire.watch import LEAST_BEAT_S, MOST_BEAT_S, WatchLine, WatchList, watch_line

MAX_LINE_BYTES: Final = 16 * 1024 * 1024
"""Longest line: the list of 10,000 slots takes a third of it."""


async def watch(
    session: aiohttp.ClientSession,
    handle: ContainerHandle,
    *,
    generation: int = 0,
    silence_s: float = 5.0,
) -> AsyncGenerator[WatchLine, None]:
    """The lines as they come, the list first; it never ends by itself, and the caller closes it. ``generation`` is
    the farm's: the container refuses earlier ones from then on. A line is asked for often enough that ``silence_s``
    without one means something.

    Raises: ConnectionLostError: there was no connection, it was cut, or nothing came for ``silence_s``.
    ProtocolError: a line violates the wire contract. Otherwise the error the container named.
    """
    headers = headers_for(handle, **fence_headers(generation))
    # aiohttp's own read timeout costs less than one per line, and takes no standstill of our own loop for silence.
    timeout = aiohttp.ClientTimeout(total=None, connect=silence_s, sock_read=silence_s)
    try:
        url = f"{handle.base_url}/v1/watch?beat_s={_beat_s(silence_s):g}"
        async with session.get(url, headers=headers, timeout=timeout) as response:
            if response.status != 200:
                raise refusal(handle, response.status, await response.read())
            unfinished, listed = b"", False
            async for piece in response.content.iter_any():
                *lines, unfinished = (unfinished + piece).split(b"\n")
                if len(unfinished) > MAX_LINE_BYTES:
                    raise ProtocolError(f"container {handle.id} sent a line above {MAX_LINE_BYTES} bytes")
                for raw in lines:
                    line = _parsed(handle, raw)
                    if isinstance(line, WatchList) is listed:
                        raise ProtocolError(f"container {handle.id}: the list must be the first line, and the only one")
                    listed = True
                    yield line
    except TimeoutError as error:
        raise _lost(handle, f"nothing came for {silence_s:g} s") from error
    except (aiohttp.ClientError, OSError) as error:
        raise _lost(handle, str(error) or repr(error)) from error
    raise _lost(handle, "it was cut")


def _beat_s(silence_s: float) -> float:
    """Each line costs the farm some 0.1 core-ms, and it follows thousands of containers."""
    return min(max(LEAST_BEAT_S, silence_s / 2.5), MOST_BEAT_S)


def _parsed(handle: ContainerHandle, line: bytes) -> WatchLine:
    try:
        return watch_line.validate_json(line)
    except ValidationError as error:
        raise ProtocolError(f"container {handle.id}: a line of the watch: {error}") from error


def _lost(handle: ContainerHandle, what: str) -> ConnectionLostError:
    return ConnectionLostError(f"container {handle.id}: GET /v1/watch: {what}")
