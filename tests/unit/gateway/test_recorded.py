"""Requests of agent programs, as they were sent (record.py): each is read whole, and continues the one before."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from agentenv.agent.assistant_messages import meaning
from agentenv.agents import RECIPES
from agentenv.agents.check import MENDS, TASK
from agentenv.gateway.canonical import ModelRequest
from agentenv.gateway.server import DIALECTS

RECORDED = sorted((Path(__file__).parent / "recorded").glob("*.json"))
OPENINGS = {  # roles before the first answer
    "codex": ["system", "user", "user"],
    "gemini-cli": ["system", "user"],
    "mini-swe-agent": ["system", "user"],
    "opencode": ["system", "user"],
    "qwen-code": ["system", "user", "assistant", "user"],
}
OVERRULED = {
    "codex": ["reasoning"],
    "gemini-cli": [f"generationConfig.{name}" for name in ("temperature", "topP", "topK", "thinkingConfig")],
}
UNSTREAMED = {"mini-swe-agent", "gemini-cli"}  # Google's says it in its URL


def parsed(path: Path) -> tuple[str, list[ModelRequest]]:
    kept: dict[str, Any] = json.loads(path.read_text())
    (dialect,) = (each for each in DIALECTS if each.name == kept["dialect"])
    bodies = [{**body, "tools": kept["tools"]} for body in kept["requests"]]
    return kept["program"].rpartition(" ")[0], [dialect.parse(body) for body in bodies]


def test_every_dialect_of_every_recipe_that_is_proved_is_recorded() -> None:
    proved = [recipe for recipe in RECIPES.values() if recipe.status == "proved"]
    wanted = {f"{recipe.name}-{api}": f"{recipe.name} {recipe.version}" for recipe in proved for api in recipe.programs}
    assert {path.stem: json.loads(path.read_text())["program"] for path in RECORDED} == wanted


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_nothing_of_a_request_is_lost(path: Path) -> None:
    name, requests = parsed(path)
    tool, argument = RECIPES[name].command_tool
    for request in requests:
        assert (dict(request.dropped), list(request.overruled)) == ({}, OVERRULED.get(name, []))
        offered = {each["function"]["name"]: each["function"] for each in request.tools}
        assert argument in offered[tool]["parameters"]["properties"]
        assert request.stream == (name not in UNSTREAMED)


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_each_request_continues_the_one_before_it_with_the_answer_it_was_given(path: Path) -> None:
    name, requests = parsed(path)
    tool, argument = RECIPES[name].command_tool
    opening = requests[0].messages
    assert [message["role"] for message in opening] == OPENINGS[name]
    assert (TASK in opening[-1]["content"]) == (name != "mini-swe-agent")  # whose prompt has it in a text of its own
    said = [*MENDS, ("Done.", RECIPES[name].last_command)]
    for n, (request, after) in enumerate(itertools.pairwise(requests)):
        length = len(request.messages)
        assert [meaning(message) for message in after.messages[:length]] == [*map(meaning, request.messages)]
        answer, result = after.messages[length:]
        (call,) = answer["tool_calls"]
        assert (answer["role"], answer["content"].strip()) == ("assistant", said[n][0].strip())
        assert call["function"]["name"] == tool
        assert json.loads(call["function"]["arguments"])[argument] == said[n][1]
        assert (result["role"], result["tool_call_id"]) == ("tool", call["id"])
    assert len(requests) == len(MENDS) + 1
