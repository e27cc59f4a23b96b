"""A service on loopback that answers only requests with its key, and the tool that uses it."""

from __future__ import annotations

import hmac
import random
import secrets
from types import TracebackType
from typing import Annotated, Self

import aiohttp
from aiohttp import web
from pydantic import Field

from agentenv.api.tool_server.core import ToolServer
from agentenv.api.tool_server.secrets import Secrets
from agentenv.api.tool_server.tool import ToolFailure, ToolRun, external_tool

NAMES = ("alder", "birch", "cedar", "elm", "hazel", "larch", "rowan", "willow")


class Records:
    """The service: ``GET /records/NAME`` with its key. Open as long as the tool server is."""

    def __init__(self, seed: int = 1) -> None:
        self.key = secrets.token_urlsafe(24)
        draw = random.Random(seed)
        self.codes = {name: f"{name[:2].upper()}-{draw.randrange(10**6):06d}" for name in NAMES}
        self._runner: web.AppRunner | None = None
        self._url = ""

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_get("/records/{name}", self._answer)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self._url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/records/"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def ended(self, trajectory: str) -> None:
        """Does nothing: there is no state."""

    async def _answer(self, request: web.Request) -> web.Response:
        shown = request.headers.get("Authorization", "")
        if not hmac.compare_digest(shown.encode(), f"Bearer {self.key}".encode()):
            return web.json_response({"error": f"wrong key, got {shown!r}"}, status=401)
        name = request.match_info["name"]
        if name not in self.codes:
            return web.json_response({"error": f"no record {name}"}, status=404)
        return web.json_response({"name": name, "code": self.codes[name]})

    async def record_lookup(
        self,
        name: Annotated[str, Field(pattern=r"^[a-z]{1,40}$", description="Name of the record, in lower case.")],
        *,
        run: ToolRun,
    ) -> dict[str, str]:
        """Look up a record by name; it has the code."""
        headers = {"Authorization": f"Bearer {run.secrets['records_key']}"}
        async with aiohttp.ClientSession() as session, session.get(self._url + name, headers=headers) as answer:
            told: dict[str, str] = await answer.json()
            if answer.status != 200:
                raise ToolFailure(f"HTTP {answer.status}: {told['error']}", keep=answer.status == 404)
            return told


def tool_server_of(records: Records) -> ToolServer:
    """A tool server with one tool; the key is its secret."""
    lookup = external_tool(
        records.record_lookup, timeout_s=10, per_trajectory=20, secrets=("records_key",), repeatable=True
    )
    return ToolServer([lookup], secrets=Secrets({"records_key": records.key}), resources=[records])
