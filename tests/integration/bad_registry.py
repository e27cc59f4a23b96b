"""A registry on loopback that misbehaves: it refuses, is slow, or cuts connections."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web

from tests.image_sources import OciLayout

_BLOB = re.compile(r"/v2/.+/blobs/(sha256:[0-9a-f]{64})")
_MANIFEST = re.compile(r"/v2/.+/manifests/(.+)")


@dataclass
class BadRegistry:
    """Serves the first image of a layout as any name and tag. Each trouble happens so many times, then no more."""

    layout: OciLayout
    refusals: list[int] = field(default_factory=list)
    """Statuses with which the next requests for manifests are refused; 429 asks for a second of patience."""
    cuts: int = 0
    """Answers with blobs that are cut in their middle."""
    drip_s: float = 0.0
    """Pause before each part of a blob."""
    leads_to: str = ""
    """Where blobs are instead."""
    asked: Counter[str] = field(default_factory=Counter)
    """Requests by digest or tag."""
    at_once: int = 0
    most_at_once: int = 0
    address: str = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            return await self._answer(request)
        finally:
            self.at_once -= 1

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/v2/":
            return web.Response()
        if found := _MANIFEST.fullmatch(request.path):
            self.asked[found[1]] += 1
            if self.refusals:
                return web.Response(status=self.refusals.pop(0), headers={"Retry-After": "1"})
            first = json.loads((self.layout.directory / "index.json").read_text())["manifests"][0]
            body = self.layout.path(first["digest"]).read_bytes()
            return web.Response(body=body, content_type=first["mediaType"])
        blob = _BLOB.fullmatch(request.path)
        if blob is None:
            return web.Response(status=404)
        self.asked[blob[1]] += 1
        if self.leads_to:
            raise web.HTTPTemporaryRedirect(self.leads_to)
        return await self._blob(request, self.layout.path(blob[1]).read_bytes())

    async def _blob(self, request: web.Request, content: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": str(len(content))})
        await response.prepare(request)
        half = max(1, len(content) // 2)
        for part in (content[:half], content[half:]):
            await asyncio.sleep(self.drip_s)
            await response.write(part)
            if self.cuts and len(content) > 1:
                self.cuts -= 1
                assert request.transport is not None
                request.transport.abort()
                break
        return response


@asynccontextmanager
async def bad_registry(layout: OciLayout) -> AsyncIterator[BadRegistry]:
    """Serve one."""
    registry = BadRegistry(layout)
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", registry.handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        registry.address = f"{host}:{port}"
        yield registry
    finally:
        await runner.cleanup()
