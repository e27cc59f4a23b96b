"""Ports of this machine that lead into a slot."""

from __future__ import annotations

import asyncio
import socket

from agentenv.sdk.forwards import listening


async def test_small_pieces_are_sent_at_once() -> None:
    """Else the second of two waits until the first is acknowledged, which the other side delays for 40 ms."""
    at_once: asyncio.Queue[int] = asyncio.Queue()

    def accepted(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        at_once.put_nowait(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    with listening(0, None) as (sock, url):
        server = await asyncio.start_server(accepted, sock=sock)
        async with server:
            _, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
            assert await asyncio.wait_for(at_once.get(), 60)
            writer.close()
            await writer.wait_closed()
