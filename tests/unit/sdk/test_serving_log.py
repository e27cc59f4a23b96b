"""What a slot sends to a served application fills no log of this process; what fails here is logged."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from agentenv.sdk.serving import _application


async def _broken(_: web.Request) -> web.Response:
    raise ValueError("a defect of the application")


@pytest.mark.parametrize(
    ("sent", "status", "logged"),
    [
        (b"\0\xff\r\n\r\n", b"400", False),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n", b"400", False),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n", b"500", True),
    ],
)
async def test_what_is_no_request_is_answered_and_not_logged(
    caplog: pytest.LogCaptureFixture, sent: bytes, status: bytes, logged: bool
) -> None:
    app = web.Application()
    app.router.add_post("/", _broken)
    async with _application(app) as factory:
        server = await asyncio.get_running_loop().create_server(factory, "127.0.0.1", 0)
        async with server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            writer.write(sent)
            assert (await reader.readline()).split()[1] == status
            writer.close()
    assert ("Error handling request" in caplog.text) is logged
