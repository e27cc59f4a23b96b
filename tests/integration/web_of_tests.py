"""A small web on loopback for the tool server's tools: pages, redirects, floods, and search providers."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Self

from aiohttp import web

from agentenv.api.tool_server.settings import ToolServerSettings

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Web:
    """Serves ``pages`` (path → html text, or a handler); remembers what was asked."""

    def __init__(self, **handlers: Handler) -> None:
        self.asked: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.bodies: list[Any] = []
        self.pages: dict[str, str | Handler] = {f"/{name}": handler for name, handler in handlers.items()}
        self.port = 0
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_route("*", "/{tail:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    def url(self, path: str = "/") -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(request.path_qs)
        self.headers.append(dict(request.headers))
        self.bodies.append(await request.text())
        page = self.pages.get(request.path)
        if page is None:
            return web.Response(status=404, text="no such page")
        if isinstance(page, str):
            return web.Response(text=page, content_type="text/html")
        return await page(request)


def allowing(*webs: Web, **fields: Any) -> ToolServerSettings:
    """Settings that let the tools reach these webs."""
    network = {"allow": [{"host": "127.0.0.1", "ports": [each.port for each in webs]}], **fields.pop("network", {})}
    return ToolServerSettings.model_validate({"network": network, **fields})


def redirecting(target: str, status: int = 302) -> Handler:
    async def redirect(_: web.Request) -> web.StreamResponse:
        return web.Response(status=status, headers={"Location": target})

    return redirect


def saying(body: bytes | str, content_type: str = "text/plain", status: int = 200, **headers: str) -> Handler:
    async def say(_: web.Request) -> web.StreamResponse:
        raw = body.encode() if isinstance(body, str) else body
        return web.Response(body=raw, status=status, headers={"Content-Type": content_type, **headers})

    return say


def answering(value: Any, status: int = 200, **headers: str) -> Handler:
    return saying(json.dumps(value), "application/json", status, **headers)


async def flood(request: web.Request) -> web.StreamResponse:
    """Text without an end."""
    answer = web.StreamResponse(headers={"Content-Type": "text/plain"})
    await answer.prepare(request)
    while True:
        await answer.write(b"x" * 65_536)


async def bomb(_: web.Request) -> web.StreamResponse:
    """100 kB that become 100 MB."""
    packed = gzip.compress(b"\0" * 100_000_000)
    return web.Response(body=packed, headers={"Content-Type": "text/plain", "Content-Encoding": "gzip"})


async def silence(_: web.Request) -> web.StreamResponse:
    await asyncio.sleep(3600)
    raise AssertionError("nobody waits that long")


async def echo(request: web.Request) -> web.StreamResponse:
    return web.json_response({"headers": dict(request.headers), "method": request.method})
