"""Requests to what runs in a sandbox, envd or a server of the client's own: found by host name or header, passed on."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Mapping
from typing import Final

from aiohttp import hdrs, web
from yarl import URL

from agentenv.api.passing import LOST, NoHandshakeError, pass_request, pass_socket, passed_on
from agentenv.e2b.envd import PORT
from agentenv.e2b.replies import RefusalError, refused, sandbox_and_port, signed_for
from agentenv.e2b.sandboxes import Held, Sandboxes
from agentenv.errors import AgentEnvError, LeaseLostError

SANDBOX_HEADER: Final = "E2b-Sandbox-Id"
PORT_HEADER: Final = "E2b-Sandbox-Port"
_TRAFFIC_HEADER: Final = "E2b-Traffic-Access-Token"
_OURS: Final = frozenset(
    {"/init", "/freeze", "/unfreeze", "/fsfreeze", "/fsunfreeze", "/upgrade", "/collapse", "/handover"}
)
"""Paths of envd that are for whoever runs it."""


class Proxy:
    """Passes requests on to sandboxes."""

    def __init__(self, sandboxes: Sandboxes) -> None:
        self._sandboxes = sandboxes

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer with what the sandbox answers."""
        name, port = self._wanted(request)
        held = self._sandboxes.any(name)
        if held is not None and held.state == "paused" and held.auto_resume:
            await self._sandboxes.resume(held)
        if held is None or held.state == "paused":
            return _nothing(name, "The sandbox was not found")
        if port == PORT and request.path.rstrip("/") in _OURS:
            return refused(403, "this path of envd is the farm's own")
        if port != PORT and held.traffic_token is not None:
            given = request.headers.get(_TRAFFIC_HEADER, "")
            if not hmac.compare_digest(given.encode(), held.traffic_token.encode()):
                return refused(403, f"the sandbox has no public traffic: send {_TRAFFIC_HEADER}")
        return await self._passed(request, held, port)

    async def _passed(self, request: web.Request, held: Held, port: int) -> web.StreamResponse:
        try:
            url = URL(await held.url(port) + request.raw_path, encoded=True)
            headers = [*passed_on(request.headers), (hdrs.HOST, request.headers.get(hdrs.HOST, ""))]
            if request.headers.get(hdrs.UPGRADE, "").lower() == "websocket":
                return await pass_socket(request, self._sandboxes.http, url, headers, asyncio.Event())
            return await pass_request(request, self._sandboxes.http, url, headers)
        except NoHandshakeError:
            return refused(400, "this is not the handshake of a WebSocket")
        except LeaseLostError:
            await self._sandboxes.end(held)
            return _nothing(held.id, "The sandbox was not found")
        except (*LOST, AgentEnvError, RefusalError):
            if held.box is None:
                return _nothing(held.id, "The sandbox was not found")
            return _nothing(held.id, "The sandbox is running but port is not open", port)

    def _wanted(self, request: web.Request) -> tuple[str, int]:
        """The sandbox and port that a request is for. Raises RefusalError."""
        if (named := sandbox_and_port(request.host)) is not None:
            return named
        headers: Mapping[str, str] = request.headers
        if SANDBOX_HEADER in headers:
            port = headers.get(PORT_HEADER, str(PORT))
            if not port.isdecimal():
                raise RefusalError(400, f"{PORT_HEADER}: got {port!r}")
            return headers[SANDBOX_HEADER], int(port)
        if "signature" in request.query:  # a link to a file does not name the sandbox, where one URL is for all
            for held in self._sandboxes.all():
                if held.token is not None and signed_for(request.query, held.token):
                    return held.id, PORT
            raise RefusalError(401, "no sandbox has signed this link")
        raise RefusalError(404, f"there is nothing here: name a sandbox (host name, or {SANDBOX_HEADER})")


def _nothing(sandbox: str, message: str, port: int | None = None) -> web.Response:
    told = {"sandboxId": sandbox, "message": message, "code": 502, **({} if port is None else {"port": port})}
    return web.json_response(told, status=502)
