"""OpenAI's chat completions. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from agentenv.agent.protocols import REASONING_FIELDS, Message, ToolDefinition
from agentenv.gateway.canonical import (
    FREEFORM,
    Dialect,
    ModelRequest,
    RefusalError,
    Shown,
    ShownCall,
    Stamp,
    Usage,
)
from agentenv.gateway.dialects.openai import ROLES, chosen, error, role_of
from agentenv.gateway.history import Histories
from agentenv.gateway.reading import (
    DROPPED,
    INERT,
    READ,
    Reading,
    Table,
    a_flag,
    a_limit,
    a_list,
    a_text,
    an_object,
    body_of,
    call_of,
    function_of,
    overruled,
    refused,
    result_of,
)

OF_REQUESTS: Final[Table] = {
    "model": READ,
    "messages": READ,
    "tools": READ,
    "max_completion_tokens": READ,
    "max_tokens": READ,
    "stream": READ,
    "stream_options": READ,
    "tool_choice": READ,
    # sampling
    "temperature": overruled(),
    "top_p": overruled(),
    "top_k": overruled(),
    "min_p": overruled(),
    "frequency_penalty": overruled(),
    "presence_penalty": overruled(),
    "repetition_penalty": overruled(),
    "logit_bias": overruled(),
    "seed": overruled(),
    "reasoning_effort": overruled(),
    "verbosity": overruled(),
    "parallel_tool_calls": overruled(True),
    # not supported
    "n": refused("only one answer per request is supported", 1),
    "stop": refused("stop sequences are not supported"),
    "response_format": refused("structured output is not supported, only text", {"type": "text"}),
    "logprobs": refused("logprobs are not returned", False),
    "top_logprobs": refused("logprobs are not returned", 0),
    "audio": refused("only text output is supported"),
    "modalities": refused("only text output is supported", ["text"]),
    "functions": refused("deprecated: use tools"),
    "function_call": refused("deprecated: use tool_choice", "none", "auto"),
    # server-side tools
    "web_search_options": DROPPED,
    "moderation": DROPPED,
    # the provider's accounting and caching
    "metadata": INERT,
    "prediction": INERT,
    "prompt_cache_key": INERT,
    "prompt_cache_options": INERT,
    "prompt_cache_retention": INERT,
    "safety_identifier": INERT,
    "service_tier": INERT,
    "store": INERT,
    "user": INERT,
}
OF_STREAM_OPTIONS: Final[Table] = {"include_usage": READ, "include_obfuscation": INERT}
OF_MESSAGES: Final[Table] = {
    "role": READ,
    "content": READ,
    "tool_calls": READ,
    "tool_call_id": READ,
    "refusal": READ,
    **dict.fromkeys(REASONING_FIELDS, INERT),  # what the model wrote is known
    "annotations": INERT,
    "parsed": INERT,  # added by the SDKs
    "audio": refused("only text output is supported"),
    "function_call": refused("deprecated: use tool_calls"),
}
OF_RESULTS: Final[Table] = {**OF_MESSAGES, "name": INERT}  # of the tool, which the call has, too
OF_PARTS: Final[Table] = {
    "type": READ,
    "text": READ,
    "refusal": READ,
    "cache_control": INERT,
    "prompt_cache_breakpoint": INERT,
}
OF_CALLS: Final[Table] = {"id": READ, "type": READ, "function": READ, "custom": READ, "index": INERT}
OF_CALLED: Final[Table] = {"name": READ, "arguments": READ, "parsed_arguments": INERT}  # the SDKs add the last
OF_FREEFORM: Final[Table] = {"name": READ, "input": READ}
OF_TOOLS: Final[Table] = {"type": READ, "function": READ, "cache_control": INERT}
OF_FUNCTIONS: Final[Table] = {"name": READ, "description": READ, "parameters": READ, "strict": overruled(False)}

TEXT: Final = {"text": "text"}
SAID: Final = {"text": "text", "refusal": "refusal"}
"""Types of an assistant's parts, and the fields that have their text."""


def parse(given: Any, known: Histories | None = None) -> ModelRequest:
    """A request's body. Raises: RefusalError."""
    reading = Reading()
    body = reading.fields(body_of(given, "messages"), OF_REQUESTS)
    messages = reading.history("", body.get("messages"), "messages", _take, known)
    tools = reading.tools(body.get("tools"), lambda tool, at: _tool(reading, tool, at))
    options = reading.fields(body.get("stream_options") or {}, OF_STREAM_OPTIONS, "stream_options")
    limits = [a_limit(body.get(name), name) for name in ("max_completion_tokens", "max_tokens")]
    return ModelRequest(
        model=a_text(body.get("model"), "model", default=""),
        messages=messages,
        tools=chosen(reading, tools, body.get("tool_choice")),
        max_tokens=min((limit for limit in limits if limit), default=None),
        stream=a_flag(body.get("stream"), "stream"),
        include_usage=a_flag(options.get("include_usage"), "stream_options.include_usage"),
        dropped=dict(reading.dropped),
        overruled=reading.overruled,
    )


def _take(reading: Reading, given: Any, at: str, messages: list[Message]) -> None:
    messages.append(_message(reading, given, at))


def _message(reading: Reading, given: Any, at: str) -> Message:
    one = an_object(given, at)
    one = reading.fields(one, OF_RESULTS if one.get("role") == "tool" else OF_MESSAGES, at)
    role = role_of(one.get("role"), at, *ROLES)
    if role != "assistant":
        content = reading.text(one.get("content"), f"{at}.content", TEXT, OF_PARTS)
        if role == "tool":
            return result_of(one.get("tool_call_id"), content, f"{at}.tool_call_id")
        return {"role": role, "content": content}
    text = reading.text(one.get("content"), f"{at}.content", SAID, OF_PARTS, between="")
    message: Message = {"role": role, "content": text + a_text(one.get("refusal"), f"{at}.refusal", default="")}
    calls = a_list(one.get("tool_calls") or [], f"{at}.tool_calls")
    if calls:
        message["tool_calls"] = [_call(reading, call, f"{at}.tool_calls[{n}]") for n, call in enumerate(calls)]
    return message


def _call(reading: Reading, given: Any, at: str) -> dict[str, Any]:
    call = reading.fields(given, OF_CALLS, at)
    if call.get("type") == "custom":
        plain = reading.fields(call.get("custom"), OF_FREEFORM, f"{at}.custom")
        return call_of(
            call.get("id"), plain.get("name"), {FREEFORM: a_text(plain.get("input"), f"{at}.custom.input")}, at
        )
    called = reading.fields(call.get("function"), OF_CALLED, f"{at}.function")
    return call_of(call.get("id"), called.get("name"), called.get("arguments"), at)


def _tool(reading: Reading, given: dict[str, Any], at: str) -> ToolDefinition | None:
    """The definition of a tool. Tools that are not functions are left out."""
    kind = a_text(given.get("type"), f"{at}.type")
    if kind != "function":
        reading.drop(f"tool {kind}")
        return None
    tool = reading.fields(given, OF_TOOLS, at)
    function = reading.fields(an_object(tool.get("function"), f"{at}.function"), OF_FUNCTIONS, f"{at}.function")
    return function_of(function, f"{at}.function", "parameters")


# -- answers ------------------------------------------------------------------------------------------

_ENDS: Final = {"stop": "stop", "calls": "tool_calls", "length": "length", "filtered": "content_filter"}


def whole(request: ModelRequest, answer: Shown, stamp: Stamp) -> dict[str, Any]:
    """The answer as one body."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.content, "refusal": None}
    if answer.calls and not answer.content:
        message["content"] = None
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["tool_calls"] = [_written(call) for call in answer.calls]
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _ENDS[answer.ended]}
    counted = {} if answer.usage is None else {"usage": _usage(answer.usage)}
    return {**_head(request, stamp, "chat.completion"), "choices": [choice], **counted}


def events(request: ModelRequest, answer: Shown, stamp: Stamp) -> Iterator[bytes]:
    """The answer as a stream."""
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    if answer.reasoning:
        deltas.append({"reasoning_content": answer.reasoning})
    if answer.content:
        deltas.append({"content": answer.content})
    deltas += [{"tool_calls": [{"index": n, **_written(call)}]} for n, call in enumerate(answer.calls)]
    head = _head(request, stamp, "chat.completion.chunk")
    uncounted = {"usage": None} if request.include_usage else {}
    for delta, end in [*((delta, None) for delta in deltas), ({}, _ENDS[answer.ended])]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": end}
        yield _event({**head, "choices": [choice], **uncounted})
    if request.include_usage:
        yield _event({**head, "choices": [], "usage": _usage(answer.usage or Usage(0, 0))})
    yield b"data: [DONE]\n\n"


def failed(_: ModelRequest, refusal: RefusalError, __: Stamp) -> Iterator[bytes]:
    """The end of a stream that has begun, and has no answer."""
    yield _event(error(refusal))


def _head(request: ModelRequest, stamp: Stamp, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{stamp.name}", "object": kind, "created": stamp.created_s, "model": request.model}


def _written(call: ShownCall) -> dict[str, Any]:
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.text}}


def _usage(usage: Usage) -> dict[str, int]:
    return {"prompt_tokens": usage.prompt, "completion_tokens": usage.completion, "total_tokens": usage.total}


def _event(data: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(data)}\n\n".encode()


DIALECT: Final = Dialect("chat", "/v1/chat/completions", parse, whole, events, error, failed)
