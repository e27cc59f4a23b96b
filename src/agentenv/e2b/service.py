"""The E2B API beside a farm service: listening, and whose requests they are."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from agentenv.api.door import behind_door
from agentenv.api.farm_server.tokens import Right
from agentenv.api.passing import client_session
from agentenv.deadlines import START_TIMEOUT_S
from agentenv.e2b.builds import Builds, Uploads
from agentenv.e2b.envd import Envd
from agentenv.e2b.routes import Routes
from agentenv.e2b.sandboxes import LONGEST_S, Sandboxes, Tenant
from agentenv.e2b.templates import TemplateBook
from agentenv.errors import ForbiddenError
from agentenv.farm_client.access import FarmAccess
from agentenv.listening import listen, url_of
from agentenv.sdk.async_sandbox import AsyncFarm
from agentenv.wire.roots import RootSpec
from agentenv.wire.spec import MIB, SlotLimits

RUN = "e2b"
"""The run of sandboxes whose token is for several."""
_DRAIN_S = 2.0


@dataclass(frozen=True)
class Where:
    """Where it listens, and where the farm is, as it reaches it. ``directory``: for what it keeps."""

    host: str
    port: int
    farm_url: str
    directory: Path


class Tenants:
    """The runs that use it, each token with a connection to the farm of its own. An async context manager."""

    def __init__(self, farm_url: str, right_of: Callable[[str], Right]) -> None:
        """``right_of`` verifies a token of the farm; it raises UnauthorizedError."""
        self._farm_url = farm_url
        self._right_of = right_of
        self._open: dict[str, Tenant] = {}
        self._opening = asyncio.Lock()
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Tenants:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def of(self, token: str) -> Tenant:
        """Whose token it is. Raises UnauthorizedError; ForbiddenError when it may not lease slots."""
        right = self._right_of(token)
        if right.scope not in ("run", "admin"):
            raise ForbiddenError(
                "api_key", f"a token of scope {right.scope!r} has no sandboxes", next_step="use one of scope 'run'"
            )
        if (known := self._open.get(token)) is not None:
            return known
        async with self._opening:
            if (known := self._open.get(token)) is None:
                run = right.only_run or right.run.removesuffix("*") + RUN
                access = FarmAccess((self._farm_url,), token, run)
                farm = AsyncFarm("farm", farm=access, timeout_s=LONGEST_S, start_timeout_s=START_TIMEOUT_S)
                known = self._open[token] = Tenant(run, await self._stack.enter_async_context(farm))
        return known


@asynccontextmanager
async def serve_e2b(
    where: Where, program: Path, templates: Mapping[str, str], right_of: Callable[[str], Right], limits: SlotLimits
) -> AsyncIterator[str]:
    """Serve E2B's API of a farm; yields its URL. ``program``: envd. ``templates``: images by the names that clients
    use. ``limits``: of the farm's slots. Leaving it ends the sandboxes. Raises ConfigError when it cannot listen,
    or ``program`` is not envd."""
    of_slots = {
        "memory_mib": limits.memory_bytes // MIB,
        "disk_mib": RootSpec.writable_bytes // MIB,
        "cpus": os.cpu_count() or 1,
    }
    envd = await Envd.at(program)
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(client_session())
        book = TemplateBook(dict(templates), where.directory / "templates.json")
        tenants = await stack.enter_async_context(Tenants(where.farm_url, right_of))
        sandboxes = await stack.enter_async_context(Sandboxes(envd, book, http))
        uploads = Uploads(where.directory / "files")
        builds = await stack.enter_async_context(Builds(sandboxes, book, uploads, where.directory / "builds"))
        routes = Routes(tenants.of, sandboxes, book, builds, envd.version, of_slots)
        listening = listen(where.host, where.port)
        await stack.enter_async_context(
            behind_door(routes.application(), listening, drain_s=_DRAIN_S, auto_decompress=False)
        )
        yield url_of(listening, where.host)
