"""Anthropic's messages. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from agentenv.agent.jsonable import clean_text
from agentenv.agent.protocols import Message, ToolDefinition
from agentenv.gateway.canonical import Counting, Dialect, ModelRequest, RefusalError, Shown, Stamp, Usage
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

SIGNATURE: Final = "agentenv"
"""Signature of thinking blocks. It is not verified."""

OF_REQUESTS: Final[Table] = {
    "model": READ,
    "messages": READ,
    "system": READ,
    "tools": READ,
    "tool_choice": READ,
    "max_tokens": READ,
    "stream": READ,
    # sampling
    "temperature": overruled(),
    "top_p": overruled(),
    "top_k": overruled(),
    "thinking": overruled({"type": "disabled"}),
    "output_config": READ,
    "context_management": overruled(),
    # not supported
    "stop_sequences": refused("stop sequences are not supported"),
    "container": refused("containers are not supported"),
    "output_format": refused("structured output is not supported, only text"),
    # server-side tools
    "mcp_servers": DROPPED,
    # the provider's accounting and caching
    "betas": INERT,
    "billing_policy": INERT,
    "compaction": overruled(),
    "fallback_credit_token": INERT,
    "fallbacks": INERT,
    "thread": refused("nothing is stored between requests: send the whole history in messages"),
    "cache_control": INERT,
    "diagnostics": INERT,
    "inference_geo": INERT,
    "metadata": INERT,
    "service_tier": INERT,
    "speed": INERT,
    "user_profile_id": INERT,
    "workspace_id": INERT,
}
OF_OUTPUT_CONFIG: Final[Table] = {
    "effort": overruled(),
    "format": refused("structured output is not supported, only text"),
}
OF_TOOL_CHOICE: Final[Table] = {"type": READ, "name": READ, "disable_parallel_tool_use": overruled(False)}
OF_MESSAGES: Final[Table] = {"role": READ, "content": READ}
OF_TEXTS: Final[Table] = {"type": READ, "text": READ, "cache_control": INERT, "citations": DROPPED}
OF_CALLS: Final[Table] = {
    "type": READ,
    "id": READ,
    "name": READ,
    "input": READ,
    "cache_control": INERT,
    "caller": INERT,
    "toolset_name": INERT,
}
OF_RESULTS: Final[Table] = {
    "type": READ,
    "tool_use_id": READ,
    "content": READ,
    "is_error": READ,
    "cache_control": INERT,
    "toolset_name": INERT,
}
OF_TOOLS: Final[Table] = {
    "type": READ,
    "name": READ,
    "description": READ,
    "input_schema": READ,
    "strict": overruled(False),
    "defer_loading": overruled(False),
    "eager_input_streaming": INERT,
    "input_examples": DROPPED,
    "cache_control": INERT,
    "allowed_callers": INERT,
}

TEXT: Final = {"text": "text"}
THOUGHTS: Final = ("thinking", "redacted_thinking")
"""Blocks of an assistant's message that are not read: what the model wrote is known."""


def parse(given: Any, known: Histories | None = None) -> ModelRequest:
    """A request's body. Raises: RefusalError."""
    return _parse(given, known, limited=True)


def parse_to_count(given: Any) -> ModelRequest:
    """The body of a request to count tokens. Raises: RefusalError."""
    return _parse(given, None, limited=False)


def _parse(given: Any, known: Histories | None, *, limited: bool) -> ModelRequest:
    reading = Reading()
    body = reading.fields(body_of(given, "messages"), OF_REQUESTS)
    reading.fields(body.get("output_config") or {}, OF_OUTPUT_CONFIG, "output_config")
    if limited and body.get("max_tokens") is None:
        raise RefusalError("is required", param="max_tokens")
    system = reading.text(body.get("system"), "system", TEXT, OF_TEXTS)
    messages = reading.history(system, body.get("messages"), "messages", _take, known)
    if messages[-1]["role"] == "assistant":
        raise RefusalError(
            "the last one is the assistant's: no answer goes on from a given beginning", param="messages"
        )
    tools = reading.tools(body.get("tools"), lambda tool, at: _tool(reading, tool, at))
    choice = reading.fields(body.get("tool_choice") or {"type": "auto"}, OF_TOOL_CHOICE, "tool_choice")
    if choice.get("type") == "none":
        tools = []
    elif choice.get("type") != "auto":
        reading.overrule("tool_choice")
    return ModelRequest(
        model=a_text(body.get("model"), "model", default=""),
        messages=messages,
        tools=tools,
        max_tokens=a_limit(body.get("max_tokens"), "max_tokens"),
        stream=a_flag(body.get("stream"), "stream"),
        dropped=dict(reading.dropped),
        overruled=reading.overruled,
    )


def _take(reading: Reading, given: Any, at: str, messages: list[Message]) -> None:
    messages += _messages(reading, given, at)


def _messages(reading: Reading, given: Any, at: str) -> list[Message]:
    """The messages that one is made of: a user's has the results of calls too."""
    one = reading.fields(given, OF_MESSAGES, at)
    role, content, where = a_text(one.get("role"), f"{at}.role"), one.get("content"), f"{at}.content"
    if role not in ("user", "assistant", "system"):
        raise RefusalError(f"no message has the role {role!r}; there are user, assistant, system", param=f"{at}.role")
    if isinstance(content, str):
        return [{"role": role, "content": clean_text(content)}]
    blocks = [(an_object(block, f"{where}[{n}]"), f"{where}[{n}]") for n, block in enumerate(a_list(content, where))]
    if role == "assistant":
        return [_said(reading, blocks)]
    results = [_result(reading, block, at) for block, at in blocks if block.get("type") == "tool_result"]
    texts = [_text(reading, block, at) for block, at in blocks if block.get("type") != "tool_result"]
    return [*results, *([{"role": role, "content": "\n".join(texts)}] if texts else [])]


def _text(reading: Reading, block: dict[str, Any], at: str) -> str:
    kind = a_text(block.get("type"), f"{at}.type")
    if kind != "text":
        return reading.leave_out(kind, block)
    reading.fields(block, OF_TEXTS, at)
    return a_text(block.get("text"), f"{at}.text")


def _said(reading: Reading, blocks: list[tuple[dict[str, Any], str]]) -> Message:
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block, at in blocks:
        if block.get("type") == "tool_use":
            reading.fields(block, OF_CALLS, at)
            calls.append(call_of(block.get("id"), block.get("name"), an_object(block.get("input"), f"{at}.input"), at))
        elif block.get("type") not in THOUGHTS:
            texts.append(_text(reading, block, at))
    message: Message = {"role": "assistant", "content": "".join(texts)}
    return {**message, "tool_calls": calls} if calls else message


def _result(reading: Reading, block: dict[str, Any], at: str) -> Message:
    """A call's result. One that is marked as an error begins as errors do that the agent's own loop shows."""
    reading.fields(block, OF_RESULTS, at)
    text = reading.text(block.get("content"), f"{at}.content", TEXT, OF_TEXTS)
    if a_flag(block.get("is_error"), f"{at}.is_error"):
        text = f"error: {text}"
    return result_of(block.get("tool_use_id"), text, f"{at}.tool_use_id")


def _tool(reading: Reading, given: dict[str, Any], at: str) -> ToolDefinition | None:
    """The definition of a tool. Server-side tools, which have a type and no schema, are left out: nothing runs them."""
    kind = a_text(given.get("type"), f"{at}.type", default="custom")
    if kind != "custom":
        reading.drop(f"tool {kind}")
        return None
    tool = reading.fields(given, OF_TOOLS, at)
    return function_of(tool, at, "input_schema")


# -- answers ------------------------------------------------------------------------------------------

_ENDS: Final = {"stop": "end_turn", "calls": "tool_use", "length": "max_tokens", "filtered": "refusal"}
_ERRORS: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


def whole(request: ModelRequest, answer: Shown, stamp: Stamp) -> dict[str, Any]:
    """The answer as one body."""
    return {
        "id": f"msg_{stamp.name}",
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "content": _blocks(answer),
        "stop_reason": _ENDS[answer.ended],
        "stop_sequence": None,
        "usage": _usage(answer),
    }


def events(request: ModelRequest, answer: Shown, stamp: Stamp) -> Iterator[bytes]:
    """The answer as a stream."""
    message = whole(request, answer, stamp)
    begun = {**message, "content": [], "stop_reason": None, "usage": {**message["usage"], "output_tokens": 0}}
    yield _event("message_start", message=begun)
    for n, block in enumerate(message["content"]):
        empty, deltas = _in_deltas(block)
        yield _event("content_block_start", index=n, content_block=empty)
        for delta in deltas:
            yield _event("content_block_delta", index=n, delta=delta)
        yield _event("content_block_stop", index=n)
    ended = {"stop_reason": message["stop_reason"], "stop_sequence": None}
    yield _event("message_delta", delta=ended, usage=message["usage"])
    yield _event("message_stop")


def error(refusal: RefusalError) -> dict[str, Any]:
    """The body of a refusal."""
    kind = _ERRORS.get(refusal.status, "invalid_request_error" if refusal.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": refusal.message}}


def failed(_: ModelRequest, refusal: RefusalError, __: Stamp) -> Iterator[bytes]:
    """The end of a stream that has begun, and has no answer."""
    yield _event("error", error=error(refusal)["error"])


def _blocks(answer: Shown) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if answer.reasoning:
        blocks.append({"type": "thinking", "thinking": answer.reasoning, "signature": SIGNATURE})
    if answer.content:
        blocks.append({"type": "text", "text": answer.content})
    for call in answer.calls:
        blocks.append({"type": "tool_use", "id": call.call_id, "name": call.name, "input": call.arguments})
    return blocks


def _in_deltas(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A block without what its deltas bring, and these."""
    if block["type"] == "thinking":
        return {**block, "thinking": "", "signature": ""}, [
            {"type": "thinking_delta", "thinking": block["thinking"]},
            {"type": "signature_delta", "signature": block["signature"]},
        ]
    if block["type"] == "text":
        return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
    return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": json.dumps(block["input"])}]


def _usage(answer: Shown) -> dict[str, int]:
    counted = answer.usage or Usage(0, 0)
    return {
        "input_tokens": counted.prompt,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": counted.completion,
    }


def _event(kind: str, **data: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **data})}\n\n".encode()


DIALECT: Final = Dialect(
    "messages",
    "/v1/messages",
    parse,
    whole,
    events,
    error,
    failed,
    alive=b'event: ping\ndata: {"type": "ping"}\n\n',
    counting=Counting("/v1/messages/count_tokens", parse_to_count, lambda tokens: {"input_tokens": tokens}),
)
