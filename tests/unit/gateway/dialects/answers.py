"""What the tests of all dialects have in common."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest

from agentenv.agent.protocols import Completion
from agentenv.gateway.canonical import Dialect, ModelRequest, RefusalError, Shown, Stamp, shown

STAMP = Stamp("3", 1700000000)
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
BASH: dict[str, Any] = {
    "type": "function",
    "function": {"name": "bash", "description": "Run it.", "parameters": SCHEMA},
}
"""A tool as models are shown it."""
CALLS = Completion(
    {
        "role": "assistant",
        "content": "I look.",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": '{"command":  "ls ü"}'}},
            {"id": "c2", "type": "function", "function": {"name": "bash", "arguments": '{"command": "pwd"}'}},
        ],
    },
    "stop",
    {"prompt_tokens": 70, "completion_tokens": 7, "total_tokens": 77},
    reasoning="Where am I?",
)
"""An answer with text, two calls at once, and reasoning."""
ASKED = ModelRequest("policy", [{"role": "user", "content": "go"}], [BASH])


def called(call_id: str, command: str) -> dict[str, Any]:
    """A call of BASH in a canonical message."""
    arguments = json.dumps({"command": command}, ensure_ascii=False)
    return {"id": call_id, "type": "function", "function": {"name": "bash", "arguments": arguments}}


def answer(done: Completion = CALLS, *, reasoning: bool = False, request: ModelRequest = ASKED) -> Shown:
    return shown(request, done, 3, reasoning=reasoning)


def refusal(dialect: Dialect, body: Any) -> RefusalError:
    with pytest.raises(RefusalError) as caught:
        dialect.parse(body)
    assert caught.value.status == 400
    return caught.value


def events_of(stream: Iterable[bytes]) -> list[tuple[str, Any]]:
    """The name and the data of each event of a stream, as the standard says it is divided."""
    found = []
    for block in b"".join(stream).decode().removesuffix("\n\n").split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.split("\n"))
        data = lines.pop("data")
        found.append((lines.pop("event", ""), data if data == "[DONE]" else json.loads(data)))
        assert not lines
    return found
