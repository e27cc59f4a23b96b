"""A relay: passes requests on to containers for clients that cannot reach them.

``/c/CONTAINER/PATH`` is ``PATH`` at the container. Bodies are streamed, streams (WebSocket) are copied frame by frame,
and the ``Authorization`` header is passed on: the container decides, the relay has no rights of its own. It keeps
nothing: a client whose relay has died reconnects through another one, and asks for its calls again by their ids.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final, Self
from urllib.parse import unquote

import aiohttp
from aiohttp import hdrs, web
from yarl import URL

from agentenv._version import __version__
from agentenv.api.door import behind_door
from agentenv.api.passing import LOST, NoHandshakeError, client_session, pass_request, pass_socket, passed_on
from agentenv.errors import (
    AgentEnvError,
    ConnectionLostError,
    ForbiddenError,
    PolicyRefusalError,
    ProtocolError,
    UnauthorizedError,
)
from agentenv.farm_client.client import FarmClient
from agentenv.listening import listen, url_of
from agentenv.wire.farm import ContainerList
from agentenv.wire.server import ErrorReply, Health

Lookup = Callable[[str], Awaitable[str | None]]
"""Base URL of a container by its id; None if there is none. Called for each request, so it should remember."""

_PATH: Final = re.compile(r"/c/([A-Za-z0-9._-]{1,200})(/[\x21-\x7e]*)")


# -- pure ------------------------------------------------------------------------------------------------


def container_and_path(raw_path: str) -> tuple[str, str] | None:
    """The container's id, and the path (with its query) there; None for anything else. No way leads up."""
    found = _PATH.fullmatch(raw_path)
    if found is None or any(unquote(step) in (".", "..") for step in found[2].partition("?")[0].split("/")):
        return None
    return found[1], found[2]


# -- the relay -------------------------------------------------------------------------------------------


class Relay:
    """The application. ``problem``: why it is not ready (empty: it is)."""

    def __init__(self, lookup: Lookup, http: aiohttp.ClientSession, problem: Callable[[], str] = str) -> None:
        self._lookup = lookup
        self._http = http
        self._problem = problem
        self._leaving = asyncio.Event()

    def application(self) -> web.Application:
        """Its routes."""
        application = web.Application()
        application.router.add_get("/health", self._health)
        application.router.add_get("/ready", self._ready)
        application.router.add_route("*", "/c/{rest:.*}", self._pass_on)
        return application

    def leave(self) -> None:
        """Refuse new requests, and end the streams so that their clients go to another relay."""
        self._leaving.set()

    async def _health(self, _: web.Request) -> web.Response:
        health = Health(status="draining" if self._leaving.is_set() else "ok", version=__version__)
        return web.json_response(text=health.model_dump_json())

    async def _ready(self, _: web.Request) -> web.Response:
        problem = "it is shutting down" if self._leaving.is_set() else self._problem()
        return _refusal(503, "the relay is not ready", problem) if problem else web.json_response({"ready": True})

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        if (asked := container_and_path(request.raw_path)) is None:
            return _refusal(404, "there is nothing here", "request /c/CONTAINER/PATH", ProtocolError.code)
        if self._leaving.is_set():
            return _refusal(503, "the relay is shutting down")
        container, path = asked
        base_url = await self._lookup(container)
        if base_url is None:
            # Not the end of a lease: the farm may have just started, and not see its containers yet.
            return _refusal(503, f"no container {container} is known here", self._problem())
        url = URL(base_url + path, encoded=True)
        try:
            if request.headers.get(hdrs.UPGRADE, "").lower() == "websocket":
                return await pass_socket(request, self._http, url, passed_on(request.headers), self._leaving)
            return await pass_request(request, self._http, url, passed_on(request.headers))
        except NoHandshakeError:
            return _refusal(400, "this is not the handshake of a WebSocket", code=ProtocolError.code)
        except aiohttp.WSServerHandshakeError as error:
            said = f"container {container} answered the handshake with HTTP {error.status}"
            if 400 <= error.status < 500:
                return _refusal(error.status, said, code=PolicyRefusalError.code)
            return _refusal(502, said)
        except LOST as error:
            return _refusal(502, f"container {container} cannot be reached: {error or type(error).__name__}")


def _refusal(status: int, message: str, next_step: str = "", code: str = ConnectionLostError.code) -> web.Response:
    reply = ErrorReply(error=code, message=message, next_step=next_step)
    return web.json_response(text=reply.model_dump_json(), status=status)


# -- served ----------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def serve_relay(
    lookup: Lookup,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    tls: ssl.SSLContext | None = None,
    drain_s: float = 10.0,
    problem: Callable[[], str] = str,
) -> AsyncIterator[str]:
    """Serve a relay; yields its URL. Port 0: any free one. ``problem``: why it is not ready (empty: it is).

    Leaving ends streams with code 1001, and waits up to ``drain_s`` for requests to end.

    Raises ConfigError when it cannot listen there.
    """
    listening = listen(host, port)
    async with client_session() as http:
        relay = Relay(lookup, http, problem)
        async with behind_door(relay.application(), listening, drain_s=drain_s, tls=tls, auto_decompress=False):
            try:
                yield url_of(listening, host, "https" if tls else "http")
            finally:
                relay.leave()


logger = logging.getLogger(__name__)

_EVERY_S: Final = 2.0
_AGAIN_S: Final = 0.5
"""Shortest time between two requests for a container that is not in the list."""
_KEPT_S: Final = 60.0


class Known:
    """The containers of the lists so far. Pure.

    A container stays for ``kept_s`` after the last list that had it: a farm that has just started does not see all
    of its containers yet, and they go on serving. While there are no lists, all stay.
    """

    def __init__(self, kept_s: float = _KEPT_S) -> None:
        self._kept_s = kept_s
        self._urls: dict[str, tuple[str, float]] = {}

    def __len__(self) -> int:
        return len(self._urls)

    def update(self, listed: ContainerList, now_s: float) -> None:
        """Take a list that came at this time."""
        for one in listed.containers:
            self._urls[one.id] = (one.base_url, now_s)
        for container, (_, seen_s) in tuple(self._urls.items()):
            if now_s - seen_s > self._kept_s:
                del self._urls[container]

    def url(self, container: str) -> str | None:
        """Its base URL; None for an unknown one."""
        found = self._urls.get(container)
        return None if found is None else found[0]


class FarmContainers:
    """Looks containers up in the farm's list, which is read again every other second, and at once for a container
    that is not in it. An async context manager; ``client`` stays the caller's."""

    def __init__(self, client: FarmClient, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._clock = clock
        self._known = Known()
        self._asked_s = float("-inf")
        self._asking: asyncio.Task[None] | None = None
        self._following: asyncio.Task[None] | None = None
        self.problem = "the farm's list of containers has not come yet"
        """Why the list is not up to date; empty if it is."""

    async def __aenter__(self) -> Self:
        await self._ask()
        self._following = asyncio.create_task(self._follow(), name="containers of the farm")
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = [task for task in (self._following, self._asking) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def __call__(self, container: str) -> str | None:
        """Base URL of a container; None if the farm has none of that name, as far as is known."""
        if (url := self._known.url(container)) is None and self._clock() - self._asked_s >= _AGAIN_S:
            await self._ask()
            url = self._known.url(container)
        return url

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(_EVERY_S)
            await self._ask()

    async def _ask(self) -> None:
        """Read the list; many who ask at the same time share one request."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._read(), name="list of containers")
        await asyncio.shield(self._asking)

    async def _read(self) -> None:
        try:
            listed = await self._client.containers()
        except AgentEnvError as error:
            if self.problem != str(error):
                logger.warning("no list of containers: %s", error)
            self.problem = str(error)
            if isinstance(error, (UnauthorizedError, ForbiddenError)):
                self._known = Known()
        else:
            self.problem = ""
            self._known.update(listed, self._clock())
        finally:
            self._asked_s = self._clock()

    def __repr__(self) -> str:
        return f"<FarmContainers {len(self._known)} of {self._client.url}>"
