"""A program that knows nothing but HTTP, as a client of a farm service."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from agentenv.wire.server import ErrorReply
from tests.waiting import START_S


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: dict[str, Any]

    @property
    def refusal(self) -> tuple[int, str]:
        """Status and code of the error; a reply that has none fails."""
        return self.status, ErrorReply.model_validate(self.body).error

    @property
    def output(self) -> str:
        assert self.status == 200, self.body
        return str(self.body["output"])


@dataclass(frozen=True)
class PlainHttp:
    """One token's requests."""

    session: aiohttp.ClientSession
    url: str

    async def post(self, route: str, **body: Any) -> Answer:
        async with self.session.post(self.url + route, json=body, allow_redirects=False) as response:
            answer = await response.json() if response.content_type == "application/json" else {}
            return Answer(response.status, response.headers, answer)

    async def get(self, path: str) -> Answer:
        async with self.session.get(self.url + path) as response:
            return Answer(response.status, response.headers, await response.json())

    async def tool(self, trajectory: str, name: str, arguments: dict[str, Any], **more: Any) -> Answer:
        called = {"name": name, "arguments": arguments}
        return await self.post("/execute", trajectory_id=trajectory, tool=called, **more)

    async def bash(self, trajectory: str, command: str, **more: Any) -> Answer:
        return await self.tool(trajectory, "bash", {"command": command}, **more)

    async def release(self, trajectory: str, **more: Any) -> bool:
        answer = await self.post("/release", trajectory_id=trajectory, **more)
        assert answer.body["status"] == "ok"
        return bool(answer.body["released"])

    async def held(self) -> dict[str, str]:
        """State of each trajectory."""
        status = await self.get("/status")
        return {one["trajectory_id"]: one["state"] for one in status.body["trajectories"]}


@asynccontextmanager
async def plain_http(url: str, token: str) -> AsyncIterator[PlainHttp]:
    """With one token."""
    timeout = aiohttp.ClientTimeout(total=START_S)
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {token}"}, timeout=timeout) as session:
        yield PlainHttp(session, url)
