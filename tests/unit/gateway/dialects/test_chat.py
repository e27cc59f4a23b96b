"""OpenAI's chat completions: what is read of requests, what becomes of the rest, what answers look like."""

from __future__ import annotations

from typing import Any

import pytest

from agentenv.agent.assistant_messages import meaning
from agentenv.agent.protocols import Completion
from agentenv.gateway.canonical import ModelRequest, RefusalError
from agentenv.gateway.dialects.chat import DIALECT
from tests.unit.gateway.dialects.answers import ASKED, BASH, STAMP, answer, called, events_of, refusal

USER = {"role": "user", "content": "go"}


def body(*messages: Any, **more: Any) -> dict[str, Any]:
    return {"model": "policy", "messages": list(messages) or [USER], **more}


def parsed(*messages: Any, **more: Any) -> ModelRequest:
    return DIALECT.parse(body(*messages, **more))


def test_a_conversation_with_tools_is_read_whole() -> None:
    request = parsed(
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": None, "tool_calls": [called("c1", "ls"), called("c2", "pwd")]},
        {"role": "tool", "tool_call_id": "c2", "content": "/"},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "do"}, {"type": "text", "text": "ne"}]},
        USER,
        tools=[{**BASH, "function": {**BASH["function"], "strict": False}}],
        max_completion_tokens=900,
        max_tokens=1000,
        stream=True,
        stream_options={"include_usage": True},
    )
    assert request == ModelRequest(
        "policy",
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "one\ntwo"},
            {"role": "assistant", "content": "", "tool_calls": [called("c1", "ls"), called("c2", "pwd")]},
            {"role": "tool", "content": "/", "tool_call_id": "c2"},
            {"role": "tool", "content": "a", "tool_call_id": "c1"},
            {"role": "assistant", "content": "done"},
            USER,
        ],
        [BASH],
        max_tokens=900,
        stream=True,
    )


def test_settings_of_the_environment_are_noted_and_books_of_the_provider_are_not() -> None:
    request = parsed(
        temperature=0.0,
        seed=7,
        parallel_tool_calls=False,
        tool_choice="required",
        user="me",
        store=True,
        stop=None,
        n=1,
    )
    assert request.overruled == ("temperature", "seed", "parallel_tool_calls", "tool_choice")
    assert request.dropped == {}


def test_what_nobody_has_decided_about_is_counted_by_its_name() -> None:
    request = parsed(
        {**USER, "name": "ada"}, {**USER, "name": "bob"}, chat_template_kwargs={"x": 1}, web_search_options={"a": 1}
    )
    assert request.dropped == {"chat_template_kwargs": 1, "web_search_options": 1, "messages.name": 2}


def test_the_name_of_a_result_s_tool_is_the_call_s() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "bash", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": "c", "content": "/", "name": "bash"}
    assert not parsed(USER, {"role": "assistant", "tool_calls": [call]}, result).dropped


@pytest.mark.parametrize(
    ("part", "note"),
    [
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}, "[image (image/png) is not shown]"),
        ({"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}, "[image is not shown]"),
        ({"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}}, "[audio (wav) is not shown]"),
        (
            {"type": "file", "file": {"file_data": "data:application/pdf;base64,AA"}},
            "[file (application/pdf) is not shown]",
        ),
        ({"type": "hologram"}, "[hologram is not shown]"),
    ],
)
def test_what_models_do_not_read_is_left_out_and_counted(part: dict[str, Any], note: str) -> None:
    request = parsed(
        {"role": "user", "content": [{"type": "text", "text": "Look:"}, part]},
        {"role": "assistant", "content": "", "tool_calls": [called("c", "ls")]},
        {"role": "tool", "tool_call_id": "c", "content": [part]},
    )
    assert [one["content"] for one in request.messages] == [f"Look:\n{note}", "", note]
    assert request.dropped == {f"content {part['type']}": 2}


def test_tools_that_are_no_functions_are_not_offered_and_their_calls_are_read() -> None:
    plain = {"type": "custom", "custom": {"name": "patch", "description": "Edit."}}
    call = {"id": "c", "type": "custom", "custom": {"name": "patch", "input": "*** Begin"}}
    request = parsed(USER, {"role": "assistant", "content": None, "tool_calls": [call]}, tools=[BASH, plain])
    assert request.tools == [BASH]
    assert request.dropped == {"tool custom": 1}
    assert request.messages[-1]["tool_calls"][0]["function"] == {"name": "patch", "arguments": '{"input": "*** Begin"}'}


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"n": 2}, "n"),
        ({"stop": ["x"]}, "stop"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logprobs": True}, "logprobs"),
        ({"audio": {"voice": "v"}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"stream": "yes"}, "stream"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": ["go"]}, "messages[0]"),
        ({"messages": [{"role": "robot", "content": ""}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "function_call": {"name": "f"}}]}, "messages[0].function_call"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "c"}]}]}, "messages[0].tool_calls[0].function"),
        ({"messages": [USER, {"role": "tool", "content": "x"}]}, "messages[1].tool_call_id"),
        ({"tools": [{"function": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        ({"tools": [BASH, BASH]}, "tools[1]"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(more: dict[str, Any], param: str) -> None:
    found = refusal(DIALECT, body(**more))
    assert found.param == param
    told = DIALECT.error(found)["error"]
    assert told["type"] == "invalid_request_error"
    assert told["param"] == param
    assert told["message"].startswith(f"{param}: ")


@pytest.mark.parametrize("given", [None, [], "x", {}])
def test_a_body_that_is_no_request_is_refused(given: Any) -> None:
    refusal(DIALECT, given)


def test_a_result_that_no_call_asked_for_is_refused() -> None:
    found = refusal(DIALECT, body(USER, {"role": "tool", "tool_call_id": "gone", "content": "x"}))
    assert "'gone'" in found.message


def test_too_deep_a_request_is_refused() -> None:
    deep: Any = {}
    for _ in range(200):
        deep = {"a": deep}
    assert "levels" in refusal(DIALECT, body(metadata=deep)).message


def test_system_messages_are_one_and_later_ones_are_the_users() -> None:
    request = parsed(
        {"role": "system", "content": "a"},
        {"role": "developer", "content": "b"},
        USER,
        {"role": "system", "content": "c"},
    )
    assert request.messages == [{"role": "system", "content": "a\n\nb"}, USER, {"role": "user", "content": "c"}]
    assert request.dropped == {"role of a later system message": 1}


def test_tools_are_not_shown_to_a_model_that_is_not_to_call_them() -> None:
    assert parsed(tools=[BASH], tool_choice="none").tools == []


@pytest.mark.parametrize("sent", ["not json", "[1]", '{"a": 1e999}'])
def test_arguments_that_are_no_object_are_kept_as_text(sent: str) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "bash", "arguments": sent}}
    message = parsed(USER, {"role": "assistant", "content": "", "tool_calls": [call]}).messages[-1]
    done = Completion({"role": "assistant", "content": "", "tool_calls": [call]})
    assert answer(done).calls[0].text == sent
    assert meaning(message) == meaning(answer(done).message)


def test_text_that_cannot_be_encoded_is_escaped() -> None:
    parsed({"role": "user", "content": "\ud800"}).messages[0]["content"].encode()


# -- answers ------------------------------------------------------------------------------------------


def test_an_answer_as_one_body() -> None:
    found = DIALECT.whole(ASKED, answer(reasoning=True), STAMP)
    assert found == {
        "id": "chatcmpl-3",
        "object": "chat.completion",
        "created": 1700000000,
        "model": "policy",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": "I look.",
                    "refusal": None,
                    "reasoning_content": "Where am I?",
                    "tool_calls": [called("c1", "ls ü"), called("c2", "pwd")],
                },
                "logprobs": None,
                "finish_reason": "tool_calls",
            }
        ],
        "usage": {"prompt_tokens": 70, "completion_tokens": 7, "total_tokens": 77},
    }


def test_a_stream_is_the_same_answer() -> None:
    *chunks, (_, last) = events_of(DIALECT.events(ASKED, answer(reasoning=True), STAMP))
    assert last == "[DONE]"
    *spoken, (_, counted) = chunks
    assert counted["choices"] == []
    assert counted["usage"]["total_tokens"] == 77
    message: dict[str, Any] = {"tool_calls": []}
    for _, chunk in spoken:
        assert chunk["usage"] is None
        delta = chunk["choices"][0]["delta"]
        message["tool_calls"] += [
            {name: value for name, value in call.items() if name != "index"} for call in delta.pop("tool_calls", [])
        ]
        for name, text in delta.items():
            message[name] = message.get(name, "") + text
    assert {**message, "refusal": None} == DIALECT.whole(ASKED, answer(reasoning=True), STAMP)["choices"][0]["message"]
    ends = [chunk["choices"][0]["finish_reason"] for _, chunk in spoken]
    assert ends == [None] * (len(ends) - 1) + ["tool_calls"]


def test_a_stream_that_was_not_asked_for_usage_has_none() -> None:
    silent = ModelRequest("policy", [USER], include_usage=False)
    assert b"usage" not in b"".join(DIALECT.events(silent, answer(), STAMP))


@pytest.mark.parametrize(
    ("done", "text", "end"),
    [
        (Completion({"role": "assistant", "content": "Done."}), "Done.", "stop"),
        (Completion({"role": "assistant", "content": ""}), "", "stop"),
        (Completion({"role": "assistant", "content": "Do"}, "length"), "Do", "length"),
        (Completion({"role": "assistant", "content": "x"}, "content_filter"), "x", "content_filter"),
        (Completion({"role": "assistant", "content": ""}, problem="bad", raw="<tool_call>{"), "<tool_call>{", "stop"),
    ],
)
def test_how_answers_end(done: Completion, text: str | None, end: str) -> None:
    found = DIALECT.whole(ASKED, answer(done), STAMP)
    assert found["choices"][0]["message"]["content"] == text
    assert found["choices"][0]["finish_reason"] == end
    assert "usage" not in found


def test_what_is_sent_back_means_what_was_sent() -> None:
    sent = DIALECT.whole(ASKED, answer(reasoning=True), STAMP)["choices"][0]["message"]
    back = parsed(USER, sent).messages[-1]
    assert meaning(back) == meaning(answer().message)
    other = {**sent, "content": [{"type": "text", "text": f"{sent['content']} \n"}]}
    assert meaning(parsed(USER, other).messages[-1]) == meaning(back)
    assert meaning(parsed(USER, {**sent, "content": "I looked."}).messages[-1]) != meaning(back)


def test_a_stream_that_fails_says_so() -> None:
    failure = RefusalError("the model's server is gone", status=503)
    (event,) = events_of(DIALECT.failed(ASKED, failure, STAMP))
    assert event[1]["error"]["type"] == "server_error"
