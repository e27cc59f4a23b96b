"""python -m tests.unit.gateway.record [PROGRAM…]: writes recorded/PROGRAM-DIALECT.json, the shapes of the requests that
programs send. Each mends a bug in a slot of this machine, where ``scripts/agent-programs`` has made it.

What the programs' authors have written is not kept: a text that is not of the script becomes ``text N``, the same text
the same number. Of the properties of a schema at most three are kept; tools once, since each request has the same.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from pathlib import Path
from typing import Any

from agentenv import AsyncSandbox
from agentenv.agents import RECIPES, binds
from agentenv.agents.check import MENDS, TASK, checked
from agentenv.gateway import server

RECORDED = Path(__file__).parent / "recorded"
_KEPT = 3
_OURS = {TASK, *(text for step in MENDS for text in step), "calc.py adds now.", "Done."}


class Scrubbed:
    def __init__(self, ours: set[str]) -> None:
        self._ours = ours
        self._texts: dict[str, int] = {}

    def __call__(self, given: Any, name: str = "") -> Any:
        if isinstance(given, dict):
            if name == "properties":
                given = dict(list(given.items())[:_KEPT])
            return {key: self(value, key) for key, value in given.items()}
        if isinstance(given, list):
            if name == "required":
                given = given[:_KEPT]
            return [self(each, name) for each in given]
        return self.text(given, name) if isinstance(given, str) else given

    def text(self, given: str, name: str) -> str:
        if given in self._ours:
            return given
        if name == "arguments":  # of a call of ours, as the program writes it
            return given
        if name == "description" or re.search(r"\s", given) or len(given) > 100:
            return f"text {self._texts.setdefault(given, len(self._texts))}"
        return given


async def record(name: str, api: str) -> None:
    recipe, bodies, reads = RECIPES[name], list[Any](), server._json

    def reading(raw: bytes) -> Any:
        bodies.append(reads(raw))
        return bodies[-1]

    server._json = reading
    try:
        async with AsyncSandbox(binds=binds(name)) as box:
            done = await checked(recipe, api, box)
    finally:
        server._json = reads
    assert not done.faults, done.faults
    scrubbed = Scrubbed({*_OURS, recipe.last_command})
    requests = [scrubbed(body) for body in bodies]
    tools = [request.pop("tools") for request in requests]
    assert all(each == tools[0] for each in tools)
    kept = {"program": f"{name} {recipe.version}", "dialect": api, "tools": tools[0], "requests": requests}
    (RECORDED / f"{name}-{api}.json").write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")


async def main() -> None:
    for name in sys.argv[1:] or [name for name, recipe in RECIPES.items() if recipe.status == "proved"]:
        for api in RECIPES[name].programs:
            await record(name, api)


if __name__ == "__main__":
    asyncio.run(main())
