"""A tool server in process with small tools, for tests."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentenv.api.tool_server.core import ToolServer
from agentenv.api.tool_server.settings import CassetteSettings, ToolServerSettings
from agentenv.api.tool_server.tool import ExternalTool, external_tool
from agentenv.wire.calls import CallResult
from agentenv.wire.toolserver import CallScope, ToolCallRequest
from tests.waiting import DEADLINE_S

_ids = itertools.count()


class Counted:
    """A tool ``ask(word)`` that counts its runs; ``gate`` holds them, ``act`` does what a test wants."""

    def __init__(self, act: Callable[[str], Any] | None = None) -> None:
        self.runs: list[str] = []
        self.ended = 0
        self.cancelled = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self._act = act or (lambda word: {"said": word, "run": len(self.runs)})

    async def ask(self, word: str = "hello") -> Any:
        """Say a word."""
        self.runs.append(word)
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        self.ended += 1
        return self._act(word)

    def tool(self, **fields: Any) -> ExternalTool:
        return external_tool(self.ask, **fields)


def request(server: ToolServer, tool: str = "ask", scope: CallScope | None = None, **fields: Any) -> ToolCallRequest:
    chosen: dict[str, Any] = {
        "id": f"call-{next(_ids)}",
        "scope": scope or CallScope(trajectory="t-0", group="g", item="item"),
        "tool": tool,
        "timeout_s": DEADLINE_S,
        "boot": server.boot,
        **fields,
    }
    return ToolCallRequest(**chosen)


async def ask(server: ToolServer, tool: str = "ask", scope: CallScope | None = None, **arguments: Any) -> CallResult:
    asked = request(server, tool, scope, arguments=arguments)
    while (reply := await server.call(asked)).result is None:
        """It still runs: ask again, as clients do."""
    return reply.result


def member(number: int, item: str = "item", group: str = "g") -> CallScope:
    return CallScope(trajectory=f"{group}-{number}", group=group, item=item)


def taping(directory: Path, mode: str = "record", **fields: Any) -> ToolServerSettings:
    return ToolServerSettings(cassettes=CassetteSettings(mode=mode, directory=directory), **fields)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
