"""A history that was read before is read no second time, and gives what a whole reading gives."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from agentenv.gateway.canonical import ModelRequest, RefusalError
from agentenv.gateway.dialects import chat, messages, responses
from agentenv.gateway.history import MOST_KEPT, Histories, keys_of

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}


def chat_turn(n: int) -> list[Any]:
    call = {"id": f"c{n}", "type": "function", "function": {"name": "bash", "arguments": f'{{"n": {n}}}'}}
    return [
        {"role": "assistant", "content": f"turn {n}", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": f"c{n}", "content": [{"type": "text", "text": f"out {n}"}, IMAGE]},
        *([{"role": "developer", "content": "remember"}] if n % 3 == 0 else []),
    ]


def messages_turn(n: int) -> list[Any]:
    return [
        {"role": "assistant", "content": [{"type": "tool_use", "id": f"c{n}", "name": "bash", "input": {"n": n}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": f"c{n}", "content": f"out {n}"}]},
    ]


def responses_turn(n: int) -> list[Any]:
    return [
        {"type": "reasoning", "summary": []},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": f"turn {n}"}]},
        {"type": "function_call", "call_id": f"c{n}", "name": "bash", "arguments": "{}"},
        {"type": "function_call_output", "call_id": f"c{n}", "output": f"out {n}"},
        *([{"type": "computer_call"}] if n % 3 == 0 else []),
    ]


def chat_body(elements: list[Any]) -> dict[str, Any]:
    opening = [{"role": "system", "content": "one"}, {"role": "system", "content": "two"}]
    return {"model": "m", "messages": [*opening, {"role": "user", "content": "go"}, *elements]}


def messages_body(elements: list[Any]) -> dict[str, Any]:
    opening = {"role": "user", "content": "go"}
    return {"model": "m", "max_tokens": 9, "system": "one", "messages": [opening, *elements]}


def responses_body(elements: list[Any]) -> dict[str, Any]:
    return {"model": "m", "instructions": "one", "input": [{"role": "user", "content": "go"}, *elements]}


DIALECTS = {
    "chat": (chat.DIALECT, chat_turn, chat_body),
    "messages": (messages.DIALECT, messages_turn, messages_body),
    "responses": (responses.DIALECT, responses_turn, responses_body),
}


def again(body: dict[str, Any]) -> Any:
    """As it arrives: other objects."""
    return json.loads(json.dumps(body))


@pytest.mark.parametrize("name", DIALECTS)
def test_what_is_read_in_parts_is_what_is_read_at_once(name: str) -> None:
    dialect, turn, body = DIALECTS[name]
    known, drawn = Histories(), random.Random(name)
    for n in range(40):
        # the conversation so far, a part of it, or a part that goes on differently
        elements = [one for k in range(drawn.randint(0, n)) for one in turn(k if drawn.random() < 0.9 else 1000 + k)]
        read: ModelRequest = dialect.parse(again(body(elements)), known)
        assert read == dialect.parse(again(body(elements)))


@pytest.mark.parametrize("name", DIALECTS)
def test_messages_that_were_read_before_are_the_same_objects(name: str) -> None:
    dialect, turn, body = DIALECTS[name]
    known = Histories()
    elements = [one for n in range(5) for one in turn(n)]
    before = dialect.parse(again(body(elements)), known).messages
    after = dialect.parse(again(body([*elements, *turn(5)])), known).messages
    assert all(one is other for one, other in zip(before, after, strict=False))
    assert len(after) > len(before)


@pytest.mark.parametrize("name", DIALECTS)
def test_what_is_wrong_in_a_history_is_refused_whatever_was_read_before(name: str) -> None:
    dialect, turn, body = DIALECTS[name]
    known = Histories()
    dialect.parse(again(body(turn(0))), known)
    with pytest.raises(RefusalError, match="no call before it has the id"):
        dialect.parse(again(body([*turn(0), *turn(1)[-1:]] if name != "responses" else [*turn(0), turn(1)[3]])), known)
    deep: Any = "x"
    for _ in range(200):
        deep = [deep]
    with pytest.raises(RefusalError, match="nests more than"):
        dialect.parse(body([*turn(0), deep]), known)
    assert dialect.parse(again(body(turn(0))), known) == dialect.parse(again(body(turn(0))))


def test_values_that_are_equal_in_python_and_not_in_json_are_told_apart() -> None:
    values = [1, 1.0, True, "1", [1], {"a": 1}, {"a": True}, {"a": 1.0}, 0, -0.0, 0.0, False, None, 2**70]
    assert len(set(keys_of("", values))) == len(values) + 1
    assert keys_of("", again({"all": values})["all"]) == keys_of("", values)


def test_no_more_conversations_are_kept_than_are_said() -> None:
    known = Histories()
    for n in range(3 * MOST_KEPT):
        chat.DIALECT.parse(chat_body([{"role": "user", "content": str(n)}]), known)
    assert len(known._kept) == MOST_KEPT
