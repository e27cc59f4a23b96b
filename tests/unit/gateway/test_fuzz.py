"""Random requests: whatever a program sends, it is answered, or refused in the form of its dialect."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from agentenv.agent.parsers.qwen3_coder import Qwen3CoderParser
from agentenv.agent.protocols import Completion
from agentenv.gateway.canonical import ModelRequest, RefusalError, Shown, shown
from agentenv.gateway.server import Gateway
from tests.unit.gateway.dialects.wire import PROGRAMS, Program

REQUESTS = 200
"""Of each dialect."""
TYPED = "<tool_call><function=bash><parameter=command>ls</parameter></function></tool_call>"
"""A call whose reading depends on the tool's schema."""
ATOMS: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1.5,
    10**30,
    "",
    "go",
    "assistant",
    "tool",
    "model",
    "none",
    "text",
    "function",
    "bash",
    "c",
    "\ud800",
    "a\x00\u2028",
    "x" * 100,
    [],
    {},
    [[]],
    {"": ""},
    {"type": "image"},
    {"type": "text", "text": 7},
]


def call(call_id: Any, name: Any, arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


ANSWERS = [
    Completion({"role": "assistant", "content": "Done."}),
    Completion({"role": "assistant", "content": None, "tool_calls": [call("c", "bash", '{"command": "ls"}')]}),
    Completion({"role": "assistant", "tool_calls": [call(None, "", "x"), call(7, None, {"a": [1]}), "no call"]}),
    Completion({"role": "assistant", "content": "\ud800"}, "length", {"prompt_tokens": 1}, problem="bad", raw="\ud800"),
]


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every place in lists and objects: what holds it, and its key or index."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, entry in inner for place in ((value, key), *places(entry))]


def mutated(body: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """A body with some places changed, doubled, moved or taken out."""
    body = copy.deepcopy(body)
    for _ in range(chance.randint(1, 4)):
        if not (found := places(body)):
            break
        holder, key = chance.choice(found)
        match chance.choice(("change", "change", "take out", "double", "rename", "move")):
            case "change":
                holder[key] = copy.deepcopy(chance.choice(ATOMS))
            case "take out":
                del holder[key]
            case "double" if isinstance(holder, list):
                holder.insert(key, copy.deepcopy(holder[key]))
            case "rename" if isinstance(holder, dict):
                holder[chance.choice(("", "novelty", "id", "\ud800"))] = holder.pop(key)
            case _:
                other, at = chance.choice(found)
                if at in other if isinstance(other, dict) else at < len(other):
                    holder[key] = copy.deepcopy(other[at])
    return body


class Policy:
    """Looks at each request as a model does, and gives any answer."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    async def generate(self, request: ModelRequest, number: int) -> Shown:
        json.dumps([request.messages, request.tools], ensure_ascii=False, allow_nan=False).encode()
        assert all(isinstance(message["content"], str) for message in request.messages)
        assert Qwen3CoderParser().parse(TYPED, request.tools).calls
        return shown(request, self._chance.choice(ANSWERS), number, reasoning=True)

    def count(self, request: ModelRequest) -> int:
        return len(request.messages)

    def refuse(self, refusal: RefusalError) -> None:
        assert str(refusal)


def check_stream(program: Program, text: str) -> None:
    for event in text.removesuffix("\n\n").split("\n\n"):
        data = event.split("\n")[-1].removeprefix("data: ")
        assert data == "[DONE]" or "error" not in json.loads(data) or program.path == "/v1/responses", text


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
async def test_a_random_request_is_answered_or_refused_in_its_dialect(program: Program) -> None:
    chance = random.Random(program.path)
    shape = set(program.dialect.error(RefusalError("x"))["error"])
    statuses: set[int] = set()

    async with TestClient(TestServer(Gateway(Policy(chance)).application())) as client:
        for n in range(REQUESTS):
            body = mutated(program.full, chance)
            async with client.post(program.path, data=json.dumps(body).encode()) as reply:
                text = await reply.text()
                assert reply.status == 200 or 400 <= reply.status < 500, (n, body, text)
                statuses.add(reply.status)
                if reply.content_type == "text/event-stream":
                    check_stream(program, text)
                    continue
                found = json.loads(text)
                assert set(found.get("error") or ()) == (set() if reply.status == 200 else shape), (n, body, text)
    assert statuses == {200, 400}
