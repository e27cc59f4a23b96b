"""Google's generateContent: what is read of requests, what becomes of the rest, what answers look like."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentenv.agent.assistant_messages import meaning
from agentenv.agent.protocols import Completion
from agentenv.gateway.canonical import TOO_LONG, ModelRequest, RefusalError
from agentenv.gateway.dialects.google import DIALECT
from tests.unit.gateway.dialects.answers import ASKED, BASH, SCHEMA, STAMP, answer, called, events_of, refusal

USER = {"role": "user", "parts": [{"text": "go"}]}
FUNCTION = {"name": "bash", "description": "Run it.", "parametersJsonSchema": SCHEMA}
TOOLS = [{"functionDeclarations": [FUNCTION]}]


def body(*contents: Any, **more: Any) -> dict[str, Any]:
    return {"contents": list(contents) or [USER], **more}


def parsed(*contents: Any, **more: Any) -> ModelRequest:
    return DIALECT.parse(body(*contents, **more))


def use(call_id: str | None, command: str) -> dict[str, Any]:
    return {"functionCall": {"id": call_id, "name": "bash", "args": {"command": command}}}


def result(call_id: str | None, response: Any, **more: Any) -> dict[str, Any]:
    return {"functionResponse": {"id": call_id, "name": "bash", "response": response, **more}}


def test_a_conversation_with_tools_is_read_whole() -> None:
    request = parsed(
        {"role": "user", "parts": [{"text": "one"}, {"text": "two"}]},
        {
            "role": "model",
            "parts": [
                {"text": "hm", "thought": True, "thoughtSignature": "x"},
                {"text": "I "},
                {"text": "look.", "thoughtSignature": "x"},
                {**use("c1", "ls"), "thoughtSignature": "x"},
            ],
        },
        {"role": "model", "parts": [use("c2", "pwd")]},
        {"role": "user", "parts": [result("c2", {"output": "/"}), result("c1", {"error": "no ls"}), {"text": "go on"}]},
        systemInstruction={"parts": [{"text": "Be brief."}, {"text": "Be kind."}]},
        tools=TOOLS,
        toolConfig={"functionCallingConfig": {"mode": "AUTO"}},
        generationConfig={"maxOutputTokens": 900},
        safetySettings=[{"category": "x", "threshold": "y"}],
    )
    assert request == ModelRequest(
        "",
        [
            {"role": "system", "content": "Be brief.\nBe kind."},
            {"role": "user", "content": "one\ntwo"},
            {"role": "assistant", "content": "I look.", "tool_calls": [called("c1", "ls"), called("c2", "pwd")]},
            {"role": "tool", "tool_call_id": "c2", "content": "/"},
            {"role": "tool", "tool_call_id": "c1", "content": "error: no ls"},
            {"role": "user", "content": "go on"},
        ],
        [BASH],
        max_tokens=900,
    )


def test_results_without_ids_are_of_the_calls_of_their_name_in_order() -> None:
    other = {"functionCall": {"name": "read", "args": {}}}
    request = parsed(
        USER,
        {"role": "model", "parts": [use(None, "ls"), other, use(None, "pwd")]},
        {
            "role": "function",
            "parts": [
                {"functionResponse": {"name": "read", "response": {"result": [1]}}},
                result(None, {"a": 1, "b": 2}),
                result("unknown", {"name": "bash", "content": "x"}),
            ],
        },
        {"role": "model", "parts": [use(None, "ls")]},
        {"role": "user", "parts": [{"text": "not yet"}]},
        {"role": "model", "parts": [use(None, "ls")]},
        {"role": "user", "parts": [result(None, {}), result(None, {"error": "late"})]},
    )
    assert [call["id"] for call in request.messages[1]["tool_calls"]] == ["call_0_0", "call_0_1", "call_0_2"]
    found = [(one["tool_call_id"], one["content"]) for one in request.messages if one["role"] == "tool"]
    assert found == [
        ("call_0_1", "[1]"),
        ("call_0_0", '{"a": 1, "b": 2}'),
        ("call_0_2", "x"),
        ("call_2_0", ""),
        ("call_1_0", "error: late"),
    ]


def test_names_of_fields_may_have_underscores_and_schemas_capital_letters() -> None:
    schema = {
        "type": "OBJECT",
        "properties": {"any_of": {"type": "ARRAY", "items": {"any_of": [{"type": "STRING"}]}}},
        "required": ["any_of"],
    }
    request = parsed(
        {"parts": [{"inline_data": {"mime_type": "image/png", "data": "AA"}}]},
        system_instruction="Be brief.",
        tools=[{"function_declarations": [{"name": "f", "parameters": schema}]}],
        generation_config={"max_output_tokens": 9},
    )
    assert request.max_tokens == 9
    assert request.messages[0] == {"role": "system", "content": "Be brief."}
    assert request.tools[0]["function"]["parameters"] == {
        "type": "object",
        "properties": {"any_of": {"type": "array", "items": {"anyOf": [{"type": "string"}]}}},
        "required": ["any_of"],
    }
    assert request.dropped == {"content inlineData": 1}


def test_settings_of_the_environment_are_noted_and_tools_of_the_server_counted() -> None:
    request = parsed(
        tools=[*TOOLS, {"googleSearch": {}}, {"codeExecution": {}}],
        toolConfig={"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["bash"]}},
        generationConfig={"temperature": 1, "topP": 0.9, "thinkingConfig": {"thinkingBudget": -1}, "candidateCount": 1},
        novelty=1,
    )
    assert request.tools == [BASH]
    assert set(request.overruled) == {
        "generationConfig.temperature",
        "generationConfig.topP",
        "generationConfig.thinkingConfig",
        "toolConfig.functionCallingConfig.mode",
        "toolConfig.functionCallingConfig.allowedFunctionNames",
    }
    assert request.dropped == {"tool googleSearch": 1, "tool codeExecution": 1, "novelty": 1}


def test_what_models_do_not_read_is_left_out_and_counted() -> None:
    image = {"inlineData": {"mimeType": "image/png", "data": "AA"}}
    request = parsed(
        {"role": "user", "parts": [{"text": "Look:"}, image, {"fileData": {"fileUri": "x"}}]},
        {"role": "model", "parts": [{"executableCode": {"code": "1", "language": "PYTHON"}}, use("c", "ls")]},
        {"role": "user", "parts": [result("c", {"output": "a"}, parts=[image])]},
    )
    assert [one["content"] for one in request.messages] == [
        "Look:\n[data (image/png) is not shown]\n[file is not shown]",
        "[executableCode is not shown]",
        "a\n[data (image/png) is not shown]",
    ]
    assert request.dropped == {"content inlineData": 2, "content fileData": 1, "content executableCode": 1}


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"contents": None}, "contents"),
        ({"contents": []}, "contents"),
        ({"contents": ["go"]}, "contents[0]"),
        ({"contents": [{"role": "system", "parts": []}]}, "contents[0].role"),
        ({"contents": [{"parts": [{"text": 7}]}]}, "contents[0].parts[0].text"),
        ({"contents": [{"role": "model", "parts": [{"functionCall": {}}]}]}, "contents[0].parts[0].functionCall.name"),
        ({"contents": [{"parts": [result(None, {})]}]}, "contents[0].parts[0].functionResponse"),
        ({"cachedContent": "c"}, "cachedContent"),
        ({"generationConfig": {"candidateCount": 2}}, "generationConfig.candidateCount"),
        ({"generationConfig": {"stopSequences": ["x"]}}, "generationConfig.stopSequences"),
        ({"generationConfig": {"responseMimeType": "application/json"}}, "generationConfig.responseMimeType"),
        ({"generationConfig": {"responseModalities": ["AUDIO"]}}, "generationConfig.responseModalities"),
        ({"generationConfig": {"maxOutputTokens": 0}}, "generationConfig.maxOutputTokens"),
        ({"tools": [{"functionDeclarations": [{}]}]}, "tools[0].name"),
        ({"tools": [*TOOLS, *TOOLS]}, "tools[1]"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(more: dict[str, Any], param: str) -> None:
    found = refusal(DIALECT, body(**more))
    assert found.param == param
    told = DIALECT.error(found)["error"]
    assert (told["code"], told["status"]) == (400, "INVALID_ARGUMENT")
    assert told["message"].startswith(f"{param}: ")


def test_tools_are_not_shown_to_a_model_that_is_not_to_call_them() -> None:
    assert parsed(tools=TOOLS, toolConfig={"functionCallingConfig": {"mode": "NONE"}}).tools == []


@pytest.mark.parametrize(
    ("url", "stream", "listed"),
    [
        ({"model": "m", "method": "generateContent"}, False, False),
        ({"model": "m", "method": "streamGenerateContent", "alt": "sse"}, True, False),
        ({"model": "m", "method": "streamGenerateContent"}, False, True),
    ],
)
def test_the_url_says_the_model_and_how_it_is_answered(url: dict[str, str], stream: bool, listed: bool) -> None:
    request = DIALECT.with_url(parsed(), url)
    assert (request.model, request.stream, request.listed) == ("m", stream, listed)
    assert isinstance(DIALECT.whole(request, answer(), STAMP), list) == listed


def test_tokens_are_counted_of_contents_and_of_whole_requests() -> None:
    assert DIALECT.counting is not None
    asked = DIALECT.counting.parse(body())
    assert (
        asked.messages == DIALECT.counting.parse({"generateContentRequest": {"model": "models/m", **body()}}).messages
    )
    assert DIALECT.counting.whole(41) == {"totalTokens": 41}


# -- answers ------------------------------------------------------------------------------------------


def test_an_answer_as_one_body() -> None:
    assert DIALECT.whole(ASKED, answer(reasoning=True), STAMP) == {
        "candidates": [
            {
                "content": {
                    "role": "model",
                    "parts": [
                        {"text": "Where am I?", "thought": True},
                        {"text": "I look."},
                        use("c1", "ls ü"),
                        use("c2", "pwd"),
                    ],
                },
                "finishReason": "STOP",
                "index": 0,
            }
        ],
        "modelVersion": "policy",
        "responseId": "3",
        "usageMetadata": {"promptTokenCount": 70, "candidatesTokenCount": 7, "totalTokenCount": 77},
    }


def test_a_stream_is_the_same_answer() -> None:
    ((_, data),) = events_of(DIALECT.events(ASKED, answer(reasoning=True), STAMP))
    assert data == DIALECT.whole(ASKED, answer(reasoning=True), STAMP)


@pytest.mark.parametrize(
    ("done", "text", "end"),
    [
        (Completion({"role": "assistant", "content": "Done."}), "Done.", "STOP"),
        (Completion({"role": "assistant", "content": ""}), "", "STOP"),
        (Completion({"role": "assistant", "content": "Do"}, "length"), "Do", "MAX_TOKENS"),
        (Completion({"role": "assistant", "content": ""}, "content_filter"), "", "SAFETY"),
    ],
)
def test_how_answers_end(done: Completion, text: str, end: str) -> None:
    found = DIALECT.whole(ASKED, answer(done), STAMP)
    assert found["candidates"][0]["content"]["parts"] == [{"text": text}]
    assert found["candidates"][0]["finishReason"] == end
    assert "usageMetadata" not in found


def test_what_is_sent_back_means_what_was_sent() -> None:
    sent = DIALECT.whole(ASKED, answer(reasoning=True), STAMP)
    back = parsed(USER, sent["candidates"][0]["content"]).messages[-1]
    assert meaning(back) == meaning(answer().message)


def test_a_stream_that_fails_ends_with_the_error_itself() -> None:
    failure = RefusalError("the model's server is gone", status=503)
    told = json.loads(b"".join(DIALECT.failed(ASKED, failure, STAMP)))
    assert told == {"error": {"code": 503, "message": "the model's server is gone", "status": "UNAVAILABLE"}}


def test_a_prompt_that_is_too_long_is_refused_in_the_providers_words() -> None:
    told = DIALECT.error(RefusalError("prompt is too long: 9 tokens", code=TOO_LONG))
    assert "input token count exceeds the maximum number of tokens allowed" in told["error"]["message"]
