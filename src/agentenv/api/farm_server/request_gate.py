"""What every request passes before the application: its name, the way to the leader, and the bounds of its body."""

from __future__ import annotations

import asyncio
import re
import secrets
from typing import Final

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentenv.api.farm_server.ask_routes import AskRoutes
from agentenv.api.farm_server.farm import Farm
from agentenv.api.farm_server.replies import reply
from agentenv.errors import PoolClosedError, ProtocolError
from agentenv.wire.base import MAX_MESSAGE_BYTES

MAX_REQUEST_BYTES: Final = MAX_MESSAGE_BYTES
BODY_S: Final = 30.0
"""Longest time that a request's body may take to arrive."""
REQUEST_ID: Final = "X-Request-ID"
"""A client's name for its request, echoed in the answer; without a usable one the farm makes one."""
_USABLE_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,100}")
OF_EACH_PROCESS: Final = frozenset({"/health", "/ready", "/metrics", "/", "/page.css", "/page.js"})
"""What a standby answers itself. The page is among it: it takes its token along to the leader, which a redirection
would lose."""


class RequestGate:
    """ASGI middleware. ``asks`` answers what it serves in the application's place. ``body_s``: see ``BODY_S``."""

    def __init__(self, app: ASGIApp, farm: Farm, *, asks: AskRoutes | None = None, body_s: float = BODY_S) -> None:
        self._app = app
        self._asks = asks
        self._farm = farm
        self._body_s = body_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        name = request_id(headers.get(REQUEST_ID)).encode()

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (REQUEST_ID.lower().encode(), name)]
            await send(message)

        if (refusal := self._refusal(scope, headers)) is not None:
            await refusal(scope, receive, named)
        else:
            answering = self._asks if self._asks is not None and self._asks.serves(scope) else self._app
            await answering(scope, _Body(receive, self._body_s).receive, named)

    def _refusal(self, scope: Scope, headers: Headers) -> ASGIApp | None:
        if not self._farm.leads and scope["path"] not in OF_EACH_PROCESS:
            return self._elsewhere(scope)
        length = headers.get("content-length", "0")
        if not (length.isascii() and length.isdigit()) or int(length[:20]) > MAX_REQUEST_BYTES:
            return reply(413, _too_large())
        return None

    def _elsewhere(self, scope: Scope) -> ASGIApp:
        """The way to the farm that leads, if this one knows it."""
        if not self._farm.leader_url:
            return reply(503, elsewhere(self._farm))
        # As it came, not decoded: a decoded path could end the header.
        path, query = scope["raw_path"].partition(b"?")[0], scope["query_string"]
        response = reply(307, PoolClosedError("this farm service is a standby", next_step="use the leader (Location)"))
        location = (path if path.startswith(b"/") else b"/") + (b"?" + query if query else b"")
        response.headers["Location"] = self._farm.leader_url + location.decode("latin-1")
        return response


class _Body:
    """A request's body on its way to the application. Raises HTTPException when it is too large or too slow."""

    def __init__(self, receive: Receive, within_s: float) -> None:
        self._receive = receive
        self._within_s = within_s
        self._until_s: float | None = None
        self._bytes = 0
        self._whole = False

    async def receive(self) -> Message:
        """The next message."""
        if self._whole:  # what is still waited for is the client's going away
            return await self._receive()
        loop = asyncio.get_running_loop()
        if self._until_s is None:
            self._until_s = loop.time() + self._within_s
        try:
            async with asyncio.timeout_at(self._until_s):
                message = await self._receive()
        except TimeoutError:
            raise HTTPException(408, f"the body did not arrive within {self._within_s:g} s", _CLOSE) from None
        self._bytes += len(message.get("body", b""))
        self._whole = not message.get("more_body", False)
        if self._bytes > MAX_REQUEST_BYTES:
            raise HTTPException(413, _too_large().message, _CLOSE)
        return message


_CLOSE: Final = {"Connection": "close"}
"""What is left of the body is not read."""


def _too_large() -> ProtocolError:
    return ProtocolError(f"the request is larger than {MAX_REQUEST_BYTES} bytes")


def request_id(given: str | None) -> str:
    """The request's name: as the client gave it, if it is usable, else a new one."""
    return given if given is not None and _USABLE_ID.fullmatch(given) else secrets.token_hex(8)


def elsewhere(farm: Farm) -> PoolClosedError:
    """The error of a farm that does not lead."""
    if farm.ended.is_set():
        return PoolClosedError("the farm service is shutting down", next_step="retry: its replacement will answer")
    return PoolClosedError("the farm service is starting, or is a standby", next_step="retry")
