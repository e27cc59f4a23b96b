"""Which failures of a connection are tried again, and when."""

from __future__ import annotations

import asyncio
import math
from typing import Any
from unittest.mock import AsyncMock

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from agentenv.containers.connection import ContainerConnection, Retries
from agentenv.containers.handle import ContainerHandle
from agentenv.errors import AgentEnvError, ConnectionLostError, ProtocolError, StaleLeaseError
from agentenv.wire.server import ErrorReply

LOST = ConnectionLostError("cut")


@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        (502, b"<html>", ConnectionLostError),
        (503, b"<html>", ConnectionLostError),
        (504, b"", ConnectionLostError),
        (500, b"<html>", ProtocolError),
        (404, b"<html>", ProtocolError),
        (502, ErrorReply(error=StaleLeaseError.code, message="m").model_dump_json().encode(), StaleLeaseError),
    ],
)
async def test_a_proxy_that_did_not_reach_the_container_is_a_lost_connection(
    status: int, body: bytes, error: type[AgentEnvError]
) -> None:
    async with ContainerConnection(ContainerHandle("c", 0, "http://c", "t", 1)) as connection:
        assert type(connection.refusal(status, body)) is error


async def test_a_socket_that_is_not_opened_raises_why() -> None:
    async def refuses(_: web.Request) -> web.Response:
        return web.Response(status=409, body=ErrorReply(error=StaleLeaseError.code, message="gone").model_dump_json())

    async def answers(_: web.Request) -> web.Response:
        return web.Response(text="no socket")

    app = web.Application()
    app.router.add_get("/refuses", refuses)
    app.router.add_get("/answers", answers)
    async with TestServer(app) as server:
        handle = ContainerHandle("c", 0, str(server.make_url("")).rstrip("/"), "t", 1)
        async with ContainerConnection(handle) as connection:
            with pytest.raises(StaleLeaseError, match="gone"):
                await connection.socket("/refuses", max_message_bytes=100)
            with pytest.raises(ProtocolError, match="opens no WebSocket"):
                await connection.socket("/answers", max_message_bytes=100)
            await server.close()
            with pytest.raises(ConnectionLostError):
                await connection.socket("/refuses", max_message_bytes=100)


@pytest.mark.parametrize(
    ("options", "pauses"),
    [
        ({"attempts": 4}, [0.2, 0.4, 0.8]),
        ({"within_s": math.inf}, [0.2, 0.4, 0.8, 1.0, 1.0, 1.0, 1.0]),
    ],
)
async def test_pauses_grow_to_a_second(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], pauses: list[float]
) -> None:
    slept = AsyncMock()
    monkeypatch.setattr(asyncio, "sleep", slept)
    retries = Retries(0.2, **options)
    for least in pauses:
        await retries.after(LOST)
        assert least <= slept.await_args_list[-1].args[0] <= 1.2 * least
    if "attempts" in options:
        with pytest.raises(ConnectionLostError):
            await retries.after(LOST)


async def test_no_pause_is_longer_than_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    slept = AsyncMock()
    monkeypatch.setattr(asyncio, "sleep", slept)
    began_s = asyncio.get_running_loop().time()
    await Retries(60.0, within_s=100.0, since_s=began_s - 60.0).after(LOST)
    assert 0 < slept.await_args_list[-1].args[0] <= 40
    with pytest.raises(ConnectionLostError):
        await Retries(60.0, within_s=100.0, since_s=began_s - 100.0).after(LOST)
