"""Anthropic's messages: what is read of requests, what becomes of the rest, what answers look like."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentenv.agent.assistant_messages import meaning
from agentenv.agent.protocols import Completion
from agentenv.gateway.canonical import ModelRequest, RefusalError
from agentenv.gateway.dialects.messages import DIALECT, parse_to_count
from tests.unit.gateway.dialects.answers import ASKED, BASH, SCHEMA, STAMP, answer, called, events_of, refusal

USER = {"role": "user", "content": "go"}
TOOL = {"name": "bash", "description": "Run it.", "input_schema": SCHEMA}


def body(*messages: Any, **more: Any) -> dict[str, Any]:
    return {"model": "policy", "max_tokens": 900, "messages": list(messages) or [USER], **more}


def parsed(*messages: Any, **more: Any) -> ModelRequest:
    return DIALECT.parse(body(*messages, **more))


def text(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **more}


def use(call_id: str, command: str) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": "bash", "input": {"command": command}}


def test_a_conversation_with_tools_is_read_whole() -> None:
    request = parsed(
        {"role": "user", "content": [text("one", cache_control={"type": "ephemeral"}), text("two")]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                text("I "),
                text("look."),
                use("c1", "ls"),
                use("c2", "pwd"),
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": [text("a"), text("b")]},
                {"type": "tool_result", "tool_use_id": "c2", "content": "no pwd", "is_error": True},
                text("go on"),
            ],
        },
        system=[text("Be brief."), text("Be kind.")],
        tools=[{**TOOL, "cache_control": {"type": "ephemeral"}}],
        tool_choice={"type": "auto"},
        stream=True,
        metadata={"user_id": "me"},
    )
    assert request == ModelRequest(
        "policy",
        [
            {"role": "system", "content": "Be brief.\nBe kind."},
            {"role": "user", "content": "one\ntwo"},
            {"role": "assistant", "content": "I look.", "tool_calls": [called("c1", "ls"), called("c2", "pwd")]},
            {"role": "tool", "tool_call_id": "c1", "content": "a\nb"},
            {"role": "tool", "tool_call_id": "c2", "content": "error: no pwd"},
            {"role": "user", "content": "go on"},
        ],
        [BASH],
        max_tokens=900,
        stream=True,
    )


def test_settings_of_the_environment_are_noted() -> None:
    request = parsed(
        temperature=1,
        thinking={"type": "enabled", "budget_tokens": 2000},
        output_config={"effort": "high"},
        tools=[TOOL],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
    )
    assert set(request.overruled) == {
        "temperature",
        "thinking",
        "output_config.effort",
        "tool_choice",
        "tool_choice.disable_parallel_tool_use",
    }
    assert parsed(thinking={"type": "disabled"}).overruled == ()


def test_tools_of_the_server_are_counted_and_not_shown() -> None:
    request = parsed(tools=[TOOL, {"type": "web_search_20250305", "name": "web_search"}], mcp_servers=[{"url": "x"}])
    assert request.tools == [BASH]
    assert request.dropped == {"tool web_search_20250305": 1, "mcp_servers": 1}


def test_what_models_do_not_read_is_left_out_and_counted() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}
    pdf = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AA"}}
    searched = [{"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}, text("Found.")]
    request = parsed(
        {"role": "user", "content": [text("Look:"), image, pdf]},
        {"role": "assistant", "content": [*searched, use("c", "ls")]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [image]}]},
    )
    assert [one["content"] for one in request.messages] == [
        "Look:\n[image (image/png) is not shown]\n[document (application/pdf) is not shown]",
        "[server_tool_use is not shown]Found.",
        "[image (image/png) is not shown]",
    ]
    assert request.dropped == {"content image": 2, "content document": 1, "content server_tool_use": 1}


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"stop_sequences": ["x"]}, "stop_sequences"),
        ({"container": "c"}, "container"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [USER, {"role": "assistant", "content": "Sure,"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"source": {}}]}]}, "messages[0].content[0].type"),
        ({"tools": [{**TOOL, "name": None}]}, "tools[0].name"),
        ({"tools": [TOOL, TOOL]}, "tools[1]"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(more: dict[str, Any], param: str) -> None:
    found = refusal(DIALECT, body(**more))
    assert found.param == param
    told = DIALECT.error(found)
    assert told["type"] == "error"
    assert told["error"]["type"] == "invalid_request_error"
    assert told["error"]["message"].startswith(f"{param}: ")


def test_a_limit_is_not_needed_to_count() -> None:
    assert parse_to_count({"model": "policy", "messages": [USER]}).messages == [USER]


def test_tools_are_not_shown_to_a_model_that_is_not_to_call_them() -> None:
    assert parsed(tools=[TOOL], tool_choice={"type": "none"}).tools == []


# -- answers ------------------------------------------------------------------------------------------


def test_an_answer_as_one_body() -> None:
    assert DIALECT.whole(ASKED, answer(reasoning=True), STAMP) == {
        "id": "msg_3",
        "type": "message",
        "role": "assistant",
        "model": "policy",
        "content": [
            {"type": "thinking", "thinking": "Where am I?", "signature": "agentenv"},
            {"type": "text", "text": "I look."},
            use("c1", "ls ü"),
            use("c2", "pwd"),
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 70,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 7,
        },
    }


def test_a_stream_is_the_same_answer() -> None:
    events = events_of(DIALECT.events(ASKED, answer(reasoning=True), STAMP))
    assert all(name == data["type"] for name, data in events)
    assert [name for name, _ in events if "block" not in name] == ["message_start", "message_delta", "message_stop"]
    message: dict[str, Any] = events[0][1]["message"]
    blocks: list[tuple[dict[str, Any], list[dict[str, Any]]]] = []
    for name, data in events[1:]:
        if name == "content_block_start":
            assert data["index"] == len(blocks)
            blocks.append((data["content_block"], []))
        elif name == "content_block_delta":
            blocks[data["index"]][1].append(data["delta"])
        elif name == "message_delta":
            message |= {**data["delta"], "usage": data["usage"]}
    for block, deltas in blocks:
        for delta in deltas:
            (field,) = set(delta) - {"type"}
            if field == "partial_json":
                block["input"] = json.loads(delta[field])
            else:
                block[field] += delta[field]
    assert {**message, "content": [block for block, _ in blocks]} == DIALECT.whole(ASKED, answer(reasoning=True), STAMP)


@pytest.mark.parametrize(
    ("done", "content", "end"),
    [
        (Completion({"role": "assistant", "content": "Done."}), [text("Done.")], "end_turn"),
        (Completion({"role": "assistant", "content": ""}), [], "end_turn"),
        (Completion({"role": "assistant", "content": "Do"}, "length"), [text("Do")], "max_tokens"),
        (Completion({"role": "assistant", "content": ""}, "content_filter"), [], "refusal"),
    ],
)
def test_how_answers_end(done: Completion, content: list[Any], end: str) -> None:
    found = DIALECT.whole(ASKED, answer(done), STAMP)
    assert found["content"] == content
    assert found["stop_reason"] == end
    assert found["usage"]["output_tokens"] == 0


def test_arguments_that_are_no_object_are_shown_in_one() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "bash", "arguments": "[1]"}}
    found = answer(Completion({"role": "assistant", "content": "", "tool_calls": [call]}))
    sent = DIALECT.whole(ASKED, found, STAMP)["content"]
    assert sent == [{"type": "tool_use", "id": "c", "name": "bash", "input": {"unparsable": "[1]"}}]
    back = parsed(USER, {"role": "assistant", "content": sent}, USER).messages[1]
    assert meaning(back) == meaning(found.message)


def test_what_is_sent_back_means_what_was_sent() -> None:
    sent = DIALECT.whole(ASKED, answer(reasoning=True), STAMP)["content"]
    back = parsed(USER, {"role": "assistant", "content": sent}, USER).messages[1]
    assert meaning(back) == meaning(answer().message)


def test_a_stream_that_fails_says_so() -> None:
    failure = RefusalError("the model's server is gone", status=503)
    (event,) = events_of(DIALECT.failed(ASKED, failure, STAMP))
    assert event == (
        "error",
        {"type": "error", "error": {"type": "api_error", "message": "the model's server is gone"}},
    )
