"""Passes requests and streams (WebSocket) on to another server: bodies are streamed, frames copied one by one."""

from __future__ import annotations

import asyncio
import asyncio.trsock
import contextlib
import socket
from collections.abc import Iterable, Mapping
from typing import Final

import aiohttp
from aiohttp import WSCloseCode, WSMsgType, hdrs, web
from yarl import URL

from agentenv.deadlines import scaled
from agentenv.wire.base import MAX_MESSAGE_BYTES

CONNECT_S: Final = scaled(10.0)
_HEARTBEAT_S: Final = 60.0
"""After so much silence a stream is pinged, both ways, to notice peers that vanished. Pings of others are passed on."""
_CLOSE_S: Final = scaled(1.0)
_SEND_BUFFER_BYTES: Final = 256 * 1024
"""Bytes the kernel buffers towards the server: cancellations and pings wait behind at most this much."""
_HOP_BY_HOP: Final = frozenset(
    {
        "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
        "transfer-encoding", "upgrade", "host", "expect",
    }
)  # fmt: skip
"""Headers between two neighbours; ``expect`` is answered by the server at once."""
_OF_HANDSHAKE: Final = frozenset(
    {"sec-websocket-key", "sec-websocket-version", "sec-websocket-extensions", "sec-websocket-protocol"}
)
_FROM_AIOHTTP: Final = (hdrs.USER_AGENT, hdrs.ACCEPT, hdrs.ACCEPT_ENCODING, hdrs.CONTENT_TYPE)
_FRAMES: Final = frozenset({WSMsgType.TEXT, WSMsgType.BINARY, WSMsgType.PING, WSMsgType.PONG})
LOST: Final = (aiohttp.ClientError, OSError, TimeoutError)
"""How aiohttp says that a server cannot be reached, or went away."""

ServerSocket = web.WebSocketResponse[bool]
ClientSocket = aiohttp.ClientWebSocketResponse[bool]


class NoHandshakeError(Exception):
    """A request to upgrade that is not the handshake of a WebSocket."""


def passed_on(headers: Mapping[str, str], besides: Iterable[str] = ()) -> list[tuple[str, str]]:
    """The headers that go end to end: neither hop-by-hop ones, nor those that ``Connection`` names, nor
    ``besides``."""
    dropped = {*_HOP_BY_HOP, *besides}
    for name, value in headers.items():
        if name.lower() == "connection":
            dropped.update(each.strip() for each in value.lower().split(","))
    return [(name, value) for name, value in headers.items() if name.lower() not in dropped]


def close_code(code: int | None) -> int:
    """The code to close one side of a stream with, after the other side was closed with ``code``."""
    reserved = code is None or code in (1004, 1005, 1006, 1015) or not 1000 <= code < 5000
    return WSCloseCode.BAD_GATEWAY if code is None or reserved else code


async def pass_request(
    request: web.Request, http: aiohttp.ClientSession, url: URL, headers: Iterable[tuple[str, str]]
) -> web.StreamResponse:
    """Answer a request as the server at ``url`` does. Raises an error of ``LOST`` before anything was answered;
    afterwards it cuts the connection."""
    asked = http.request(
        request.method,
        url,
        headers=[*headers],
        data=request.content if request.body_exists else None,
        skip_auto_headers=_FROM_AIOHTTP,
        allow_redirects=False,
    )
    async with asked as answer:
        response = web.StreamResponse(status=answer.status, reason=answer.reason, headers=passed_on(answer.headers))
        try:
            await response.prepare(request)
            async for piece in answer.content.iter_any():
                await response.write(piece)
            await response.write_eof()
        except LOST:
            _abort(request.transport)
    return response


async def pass_socket(
    request: web.Request,
    http: aiohttp.ClientSession,
    url: URL,
    headers: Iterable[tuple[str, str]],
    leaving: asyncio.Event,
) -> web.StreamResponse:
    """Answer the handshake of a WebSocket as the server at ``url`` does, and copy messages both ways until one side is
    closed, or ``leaving``. Raises NoHandshakeError; an error of ``LOST``, a WSServerHandshakeError among them, before
    the client's stream is open: it is opened last, so that the client sees the server's refusal."""
    protocols = [
        word.strip() for word in request.headers.get(hdrs.SEC_WEBSOCKET_PROTOCOL, "").split(",") if word.strip()
    ]
    client: ServerSocket = web.WebSocketResponse(
        protocols=protocols,
        max_msg_size=MAX_MESSAGE_BYTES,
        compress=False,
        autoping=False,
        heartbeat=_HEARTBEAT_S,
        timeout=_CLOSE_S,
        decode_text=False,
    )
    if not client.can_prepare(request):
        raise NoHandshakeError
    server: ClientSocket = await http.ws_connect(
        url,
        protocols=protocols,
        headers=[(name, value) for name, value in headers if name.lower() not in _OF_HANDSHAKE],
        max_msg_size=MAX_MESSAGE_BYTES,
        compress=0,
        autoping=False,
        heartbeat=_HEARTBEAT_S,
        timeout=aiohttp.ClientWSTimeout(ws_close=_CLOSE_S),
        decode_text=False,
    )
    if isinstance(raw := server.get_extra_info("socket"), asyncio.trsock.TransportSocket):
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
    try:
        await client.prepare(request)
        await _copy_both(client, server, leaving)
    finally:
        left = WSCloseCode.GOING_AWAY if leaving.is_set() else None
        to_client, to_server = left or close_code(server.close_code), left or close_code(client.close_code)
        await asyncio.gather(_close(client, to_client), _close(server, to_server))
        _abort(request.transport)  # unsent bytes would keep it open for as long as the client does not read
    return client


async def _copy_both(client: ServerSocket, server: ClientSocket, leaving: asyncio.Event) -> None:
    """Copy messages both ways until one side is closed, or ``leaving``. Each way reads no further while the other
    side does not."""
    ends = (_copy(client, server), _copy(server, client), leaving.wait())
    tasks = [asyncio.ensure_future(end) for end in ends]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _copy(source: ServerSocket | ClientSocket, sink: ServerSocket | ClientSocket) -> None:
    while (message := await source.receive()).type in _FRAMES:
        await sink.send_frame(message.data, message.type)


async def _close(stream: ServerSocket | ClientSocket, code: int) -> None:
    """Close it politely, within moments."""
    with contextlib.suppress(*LOST):
        async with asyncio.timeout(2 * _CLOSE_S):
            await stream.close(code=code)


def _abort(transport: asyncio.BaseTransport | None) -> None:
    if isinstance(transport, asyncio.WriteTransport):
        transport.abort()


def client_session() -> aiohttp.ClientSession:
    """For passing requests on: nothing of one client's is kept for another, and no server leads elsewhere."""
    return aiohttp.ClientSession(
        # Shorter than a container's own, so that a connection it has just closed is hardly ever used again.
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=15.0),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
        cookie_jar=aiohttp.DummyCookieJar(),  # one client's must not be sent for another
        auto_decompress=False,
        trust_env=False,
        middlewares=(_no_redirects,),
    )


async def _no_redirects(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
    """A server must not lead us elsewhere; aiohttp would follow when it opens a WebSocket."""
    response = await handler(request)
    if hdrs.UPGRADE in request.headers and 300 <= response.status < 400:
        response.close()
        raise aiohttp.ClientConnectionError("it redirects")
    return response
