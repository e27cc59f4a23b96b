"""E2B's API over a stand-in for the farm: sandboxes are objects of this process, and envd is a server of it.

As a program it serves until its stdin ends, and prints its address and a key: ``python -m tests.e2b_stand_in``.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import aiohttp
from aiohttp import web

from agentenv.api.passing import client_session
from agentenv.e2b.builds import Builds, Uploads
from agentenv.e2b.envd import PORT, Envd
from agentenv.e2b.routes import Routes
from agentenv.e2b.sandboxes import Sandboxes, Tenant
from agentenv.e2b.templates import TemplateBook
from agentenv.errors import LeaseLostError, UnauthorizedError
from agentenv.sdk.async_sandbox import AsyncFarm, AsyncSandbox
from agentenv.sdk.processes import ExecResult
from agentenv.sdk.roots import ImageRoot, Network
from agentenv.wire.slot_metrics import SlotMetrics

KEYS = {"key-of-a": "a", "key-of-b": "b"}
VERSION = "0.6.13"


class StandInBox:
    """A slot: what was done to it is written down. Its ports lead to one server, which answers what it was asked."""

    def __init__(self, farm: StandInFarm, root: ImageRoot) -> None:
        self.farm = farm
        self.root = root
        self.started: list[Sequence[str]] = []
        self.network: Network = root.network
        self.lost = False

    async def __aenter__(self) -> Self:
        self.farm.open.append(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.farm.open.remove(self)

    async def start(self, argv: Sequence[str], **_: Any) -> None:
        self.started.append(argv)

    async def exec(self, argv: Sequence[str], **_: Any) -> ExecResult:
        self.farm.ran.append(argv[-1])
        return ExecResult(0, b"PATH=/bin\0GREETING=hi\0", b"")

    async def upload(self, local: Path, remote: str) -> None:
        self.farm.ran.append(f"upload {remote}")

    async def commit(self, name: str = "") -> str:
        if self.lost:
            raise LeaseLostError("the slot is gone")
        self.farm.commits.append((self.root.image, name))
        return "sha256:" + f"{len(self.farm.commits):064x}"

    async def metrics(self) -> SlotMetrics:
        return SlotMetrics(memory_bytes=5, memory_limit_bytes=50)

    async def set_network(self, network: Network) -> None:
        self.network = network

    @asynccontextmanager
    async def forward(self, port: int) -> AsyncIterator[str]:
        if self.lost:
            raise LeaseLostError("the slot is gone")
        yield f"{self.farm.url}/of/{port}"


@dataclass
class StandInFarm:
    """``url``: of the server that all ports of all slots lead to."""

    url: str = ""
    open: list[StandInBox] = field(default_factory=list)
    commits: list[tuple[str, str]] = field(default_factory=list)
    ran: list[str] = field(default_factory=list)
    inits: list[Any] = field(default_factory=list)
    """What envd was told."""

    def sandbox(self, root: ImageRoot) -> StandInBox:
        return StandInBox(self, root)


class StandInEnvd(Envd):
    """Tells the server, and does not start anything."""

    async def start(self, box: AsyncSandbox, http: aiohttp.ClientSession, url: str, told: dict[str, Any]) -> None:
        await box.start(["envd"])
        async with http.post(f"{url}/init", json=told) as reply:
            assert reply.status == 204


async def _inside(farm: StandInFarm, request: web.Request) -> web.StreamResponse:
    """The server in every slot: envd at its port, an echo at others."""
    _, _, port, path = request.path.split("/", 3)
    if request.headers.get("Upgrade") == "websocket":
        socket = web.WebSocketResponse(protocols=("chat",))
        await socket.prepare(request)
        async for message in socket:
            await socket.send_str(f"{socket.ws_protocol}: {message.data}")
        return socket
    if int(port) == PORT and path == "init":
        farm.inits.append(await request.json())
        return web.Response(status=204)
    if int(port) == PORT and path == "metrics":
        measured = {
            "cpu_count": 2,
            "cpu_used_pct": 1.5,
            "mem_used": 10,
            "mem_total": 20,
            "disk_used": 1,
            "disk_total": 2,
        }
        return web.json_response({"ts": 1_700_000_000, **measured})
    if int(port) == PORT and path == "health":
        return web.Response(status=204)
    said = {"port": int(port), "path": f"/{path}", "query": dict(request.query), "body": await request.text()}
    return web.json_response({**said, "headers": dict(request.headers)})


@dataclass(frozen=True)
class Served:
    """The API, and what is behind it."""

    url: str
    farm: StandInFarm
    sandboxes: Sandboxes
    book: TemplateBook


@asynccontextmanager
async def served(directory: Path, templates: Mapping[str, str] | None = None) -> AsyncIterator[Served]:
    """E2B's API for the two runs of ``KEYS``."""
    farm = StandInFarm()
    async with AsyncExitStack() as stack:
        inside = web.Application()
        inside.router.add_route("*", "/{rest:.*}", partial(_inside, farm))
        farm.url = await stack.enter_async_context(_listening(inside))
        http = await stack.enter_async_context(client_session())
        book = TemplateBook(dict(templates or {"base": "debian:bookworm"}), directory / "templates.json")
        envd = StandInEnvd(directory / "envd", VERSION, "0" * 64)
        sandboxes = await stack.enter_async_context(Sandboxes(envd, book, http))
        builds = await stack.enter_async_context(
            Builds(sandboxes, book, Uploads(directory / "files"), directory / "builds")
        )

        async def tenant(key: str) -> Tenant:
            if (run := KEYS.get(key)) is None:
                raise UnauthorizedError("api_key", "the token is unknown")
            return Tenant(run, cast("AsyncFarm", farm))

        of_slots = {"memory_mib": 2048, "disk_mib": 1024, "cpus": 2}
        routes = Routes(tenant, sandboxes, book, builds, VERSION, of_slots)
        url = await stack.enter_async_context(_listening(routes.application()))
        yield Served(url, farm, sandboxes, book)


@asynccontextmanager
async def _listening(application: web.Application) -> AsyncIterator[str]:
    runner = web.AppRunner(application, access_log=None, auto_decompress=False, shutdown_timeout=1.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def _main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        async with served(Path(directory)) as api:
            sys.stdout.write(json.dumps({"url": api.url, "key": next(iter(KEYS))}) + "\n")
            sys.stdout.flush()
            await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(_main())
