"""OpenAI's responses: what is read of requests, what becomes of the rest, what answers look like."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import pytest

from agentenv.agent.assistant_messages import meaning
from agentenv.agent.protocols import Completion
from agentenv.gateway.canonical import ModelRequest, RefusalError
from agentenv.gateway.dialects.responses import DIALECT
from tests.unit.gateway.dialects.answers import ASKED, BASH, SCHEMA, STAMP, answer, called, events_of, refusal

USER = {"role": "user", "content": "go"}
TOOL = {"type": "function", "name": "bash", "description": "Run it.", "parameters": SCHEMA, "strict": False}
PATCH = {
    "type": "custom",
    "name": "patch",
    "description": "Edit.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'},
}


def body(*items: Any, **more: Any) -> dict[str, Any]:
    return {"model": "policy", "input": list(items) or [USER], **more}


def parsed(*items: Any, **more: Any) -> ModelRequest:
    return DIALECT.parse(body(*items, **more))


def call(call_id: str, command: str) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": "bash", "arguments": json.dumps({"command": command})}


def said(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


def test_a_conversation_with_tools_is_read_whole() -> None:
    request = parsed(
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Sandbox."}]},
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "one"}, {"type": "input_text", "text": "two"}],
        },
        {"type": "reasoning", "summary": [], "encrypted_content": "x"},
        {**said("I look."), "id": "msg_0", "status": "completed"},
        {**call("c1", "ls"), "id": "fc_0", "status": "completed"},
        call("c2", "pwd"),
        {"type": "function_call_output", "call_id": "c1", "output": "a"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "/"}]},
        said("Done."),
        USER,
        instructions="Be brief.",
        tools=[TOOL],
        tool_choice="auto",
        parallel_tool_calls=True,
        store=False,
        include=["reasoning.encrypted_content"],
        prompt_cache_key="k",
        max_output_tokens=900,
        stream=True,
    )
    assert request == ModelRequest(
        "policy",
        [
            {"role": "system", "content": "Be brief.\n\nSandbox."},
            {"role": "user", "content": "one\ntwo"},
            {"role": "assistant", "content": "I look.", "tool_calls": [called("c1", "ls"), called("c2", "pwd")]},
            {"role": "tool", "tool_call_id": "c1", "content": "a"},
            {"role": "tool", "tool_call_id": "c2", "content": "/"},
            {"role": "assistant", "content": "Done."},
            USER,
        ],
        [BASH],
        max_tokens=900,
        stream=True,
    )


def test_input_may_be_one_text() -> None:
    assert DIALECT.parse({"model": "policy", "input": "go"}).messages == [USER]


def test_a_tool_that_takes_text_is_shown_with_one_argument_and_its_grammar() -> None:
    text = {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "*** Begin"}
    result = {"type": "custom_tool_call_output", "call_id": "c", "output": "ok"}
    request = parsed(USER, text, result, tools=[PATCH])
    assert request.freeform == {"patch"}
    assert request.overruled == ("tools.format",)
    (tool,) = request.tools
    assert tool["function"]["parameters"]["required"] == ["input"]
    assert tool["function"]["description"] == 'Edit.\n\nThe grammar of input (lark):\nstart: "x"'
    assert request.messages[1]["tool_calls"][0]["function"]["arguments"] == '{"input": "*** Begin"}'


@pytest.mark.parametrize(
    ("written", "shown"),
    [('{"input": "*** Begin"}', "*** Begin"), ('{"patch": "x"}', '{"patch": "x"}'), ("*** Begin", "*** Begin")],
)
def test_a_call_of_such_a_tool_is_text_and_comes_back_as_the_same(written: str, shown: str) -> None:
    request = parsed(USER, tools=[PATCH])
    one = {"id": "c", "type": "function", "function": {"name": "patch", "arguments": written}}
    found = answer(Completion({"role": "assistant", "content": "", "tool_calls": [one]}), request=request)
    (item,) = DIALECT.whole(request, found, STAMP)["output"]
    assert item == {"type": "custom_tool_call", "id": "ctc_3_0", "call_id": "c", "name": "patch", "input": shown}
    assert meaning(parsed(USER, item).messages[-1]) == meaning(found.message)
    names = [name for name, _ in events_of(DIALECT.events(request, found, STAMP))]
    assert names[3:5] == ["response.custom_tool_call_input.delta", "response.custom_tool_call_input.done"]


def test_settings_of_the_environment_are_noted_and_tools_of_the_server_counted() -> None:
    request = parsed(
        temperature=1,
        reasoning={"effort": "high"},
        text={"verbosity": "low", "format": {"type": "text"}},
        truncation="auto",
        tool_choice={"type": "function", "name": "bash"},
        tools=[TOOL, {"type": "web_search"}, {"type": "namespace", "name": "n", "tools": []}, {"type": "local_shell"}],
        novelty=1,
    )
    assert set(request.overruled) == {"temperature", "reasoning", "text.verbosity", "truncation", "tool_choice"}
    assert request.tools == [BASH]
    assert request.dropped == {"tool web_search": 1, "tool namespace": 1, "tool local_shell": 1, "novelty": 1}


def test_what_models_do_not_read_is_left_out_and_counted() -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA", "detail": "auto"}
    request = parsed(
        {"role": "user", "content": [{"type": "input_text", "text": "Look:"}, image]},
        {"type": "web_search_call", "id": "i", "status": "completed"},
        call("c", "ls"),
        {"type": "function_call_output", "call_id": "c", "output": [image, {"type": "input_file", "file_id": "f"}]},
    )
    assert [one["content"] for one in request.messages] == [
        "Look:\n[image (image/png) is not shown]",
        "",
        "[image (image/png) is not shown]\n[file is not shown]",
    ]
    assert request.dropped == {"content input_image": 2, "content input_file": 1, "item web_search_call": 1}


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "i"}]}, "input[0]"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].id"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [TOOL, {**PATCH, "name": "bash"}]}, "tools[1]"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(more: dict[str, Any], param: str) -> None:
    found = refusal(DIALECT, body(**more))
    assert found.param == param
    assert DIALECT.error(found)["error"]["param"] == param


# -- answers ------------------------------------------------------------------------------------------


def test_an_answer_as_one_body() -> None:
    found = DIALECT.whole(ASKED, answer(reasoning=True), STAMP)
    assert found["id"] == "resp_3"
    assert found["status"] == "completed"
    assert found["output"] == [
        {
            "type": "reasoning",
            "id": "rs_3",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Where am I?"}],
        },
        {
            "type": "message",
            "id": "msg_3",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}],
        },
        {**called_item("c1", "ls ü"), "id": "fc_3_0", "status": "completed"},
        {**called_item("c2", "pwd"), "id": "fc_3_1", "status": "completed"},
    ]
    assert found["usage"]["total_tokens"] == 77


def called_item(call_id: str, command: str) -> dict[str, Any]:
    arguments = called(call_id, command)["function"]["arguments"]
    return {"type": "function_call", "call_id": call_id, "name": "bash", "arguments": arguments}


def test_a_stream_is_the_same_answer() -> None:
    events = events_of(DIALECT.events(ASKED, answer(reasoning=True), STAMP))
    assert all(name == data["type"] for name, data in events)
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    whole = DIALECT.whole(ASKED, answer(reasoning=True), STAMP)
    assert events[-1] == (
        "response.completed",
        {"type": "response.completed", "sequence_number": len(events) - 1, "response": whole},
    )
    begun: list[dict[str, Any]] = []
    ended: list[dict[str, Any]] = []
    texts: dict[str, str] = defaultdict(str)
    for name, data in events:
        if name == "response.output_item.added":
            begun.append(data["item"])
        elif name == "response.output_item.done":
            ended.append(data["item"])
        elif name.endswith(".delta"):
            texts[data["item_id"]] += data["delta"]
    assert ended == whole["output"]
    assert [item["id"] for item in begun] == [item["id"] for item in ended]
    assert all(not item.get("content") and not item.get("arguments") for item in begun)
    assert list(texts.values()) == [
        "Where am I?",
        "I look.",
        *(item["arguments"] for item in ended if item["type"] == "function_call"),
    ]


@pytest.mark.parametrize(
    ("done", "status", "why"),
    [
        (Completion({"role": "assistant", "content": "Done."}), "completed", None),
        (Completion({"role": "assistant", "content": "Do"}, "length"), "incomplete", "max_output_tokens"),
        (Completion({"role": "assistant", "content": ""}, "content_filter"), "incomplete", "content_filter"),
    ],
)
def test_how_answers_end(done: Completion, status: str, why: str | None) -> None:
    found = DIALECT.whole(ASKED, answer(done), STAMP)
    assert found["status"] == status
    assert found["incomplete_details"] == (why and {"reason": why})
    assert found["usage"]["total_tokens"] == 0
    assert events_of(DIALECT.events(ASKED, answer(done), STAMP))[-1][0] == f"response.{status}"


def test_what_is_sent_back_means_what_was_sent() -> None:
    items = DIALECT.whole(ASKED, answer(reasoning=True), STAMP)["output"]
    assert meaning(parsed(USER, *items).messages[-1]) == meaning(answer().message)


def test_a_stream_that_fails_says_so() -> None:
    failure = RefusalError("prompt is too long", code="context_length_exceeded")
    begun, failed = events_of(DIALECT.failed(ASKED, failure, STAMP))
    assert begun[0] == "response.created"
    assert failed[0] == "response.failed"
    assert failed[1]["response"]["status"] == "failed"
    assert failed[1]["response"]["error"] == {"code": "context_length_exceeded", "message": "prompt is too long"}
