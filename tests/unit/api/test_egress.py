"""The proxy that judges what is connected to: of tunnels, how long they may be silent."""

from __future__ import annotations

import asyncio
import base64

import pytest

from agentenv.api.web import egress
from agentenv.api.web.egress import EgressProxy

PIECES = 8


class Anywhere:
    async def addresses(self, host: str, port: int) -> list[str]:
        return [host]


async def tunnelled(pause_s: float) -> bytes:
    """What a server sends, a byte after each pause, to a client that only listens."""

    served: list[asyncio.StreamWriter] = []

    async def drip(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.append(writer)
        for _ in range(PIECES):
            writer.write(b"x")
            await asyncio.sleep(pause_s)
        writer.close()

    server = await asyncio.start_server(drip, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, EgressProxy(Anywhere()) as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(proxy.url.rpartition(":")[2]))
        basic = base64.b64encode(f"{proxy.username}:{proxy.password}".encode()).decode()
        head = f"CONNECT 127.0.0.1:{port} HTTP/1.1\r\nProxy-Authorization: Basic {basic}\r\n\r\n"
        writer.write(head.encode())
        await reader.readuntil(b"\r\n\r\n")
        found = await reader.read()
        for each in (writer, *served):
            each.close()
        await asyncio.sleep(0)
    return found


async def test_a_tunnel_in_which_one_side_sends_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(egress, "_IDLE_S", 10.0)
    assert await tunnelled(1.5) == b"x" * PIECES  # in all more than it may be silent


async def test_a_tunnel_that_is_silent_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(egress, "_IDLE_S", 1.0)
    assert await tunnelled(30.0) == b"x"
