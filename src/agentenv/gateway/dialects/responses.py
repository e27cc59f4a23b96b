"""OpenAI's responses, whose history is in every request: nothing is stored. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from agentenv.agent.protocols import Message, ToolDefinition
from agentenv.gateway.canonical import (
    FREEFORM,
    Counting,
    Dialect,
    ModelRequest,
    RefusalError,
    Shown,
    ShownCall,
    Stamp,
    Usage,
    freeform_tool,
)
from agentenv.gateway.dialects.openai import chosen, error, role_of
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
    a_name,
    a_text,
    an_object,
    body_of,
    call_of,
    function_of,
    overruled,
    refused,
    result_of,
)

NOTHING_STORED: Final = "nothing is stored between requests: send the whole history in input"
OF_REQUESTS: Final[Table] = {
    "model": READ,
    "input": READ,
    "instructions": READ,
    "tools": READ,
    "tool_choice": READ,
    "max_output_tokens": READ,
    "stream": READ,
    "text": READ,
    "include": READ,
    # sampling
    "temperature": overruled(),
    "top_p": overruled(),
    "reasoning": overruled(),
    "parallel_tool_calls": overruled(True),
    "truncation": overruled("disabled"),
    "context_management": overruled(),
    # not supported
    "background": refused("background responses are not supported", False),
    "conversation": refused(NOTHING_STORED),
    "previous_response_id": refused(NOTHING_STORED),
    "prompt": refused(NOTHING_STORED),
    "top_logprobs": refused("logprobs are not returned", 0),
    # server-side tools
    "max_tool_calls": INERT,
    "moderation": DROPPED,
    # the provider's accounting and caching
    "client_metadata": INERT,
    "metadata": INERT,
    "prompt_cache_key": INERT,
    "prompt_cache_options": INERT,
    "prompt_cache_retention": INERT,
    "safety_identifier": INERT,
    "service_tier": INERT,
    "store": INERT,
    "stream_options": INERT,
    "user": INERT,
}
OF_TEXT: Final[Table] = {
    "format": refused("structured output is not supported, only text", {"type": "text"}),
    "verbosity": overruled(),
}
LOGPROBS: Final = "message.output_text.logprobs"
"""In ``include``; everything else there is about tools of the server, or storage."""
OF_MESSAGES: Final[Table] = {
    "type": READ,
    "role": READ,
    "content": READ,
    "id": INERT,
    "status": INERT,
    "phase": INERT,
}
OF_PARTS: Final[Table] = {
    "type": READ,
    "text": READ,
    "refusal": READ,
    "annotations": INERT,
    "logprobs": INERT,
    "parsed": INERT,  # added by the SDKs
    "prompt_cache_breakpoint": INERT,
}
_OF_ITEMS: Final[Table] = {"type": READ, "call_id": READ, "id": INERT, "status": INERT, "caller": INERT}
OF_CALLS: Final[Table] = {**_OF_ITEMS, "name": READ, "arguments": READ, "parsed_arguments": INERT}  # the SDKs' own
OF_FREEFORM_CALLS: Final[Table] = {**_OF_ITEMS, "name": READ, "input": READ}
OF_RESULTS: Final[Table] = {**_OF_ITEMS, "output": READ, "name": INERT}
OF_FUNCTIONS: Final[Table] = {
    "type": READ,
    "name": READ,
    "description": READ,
    "parameters": READ,
    "output_schema": DROPPED,
    "strict": overruled(False),
    "defer_loading": overruled(False),
    "allowed_callers": INERT,
}
OF_FREEFORM_TOOLS: Final[Table] = {
    "type": READ,
    "name": READ,
    "description": READ,
    "format": READ,
    "defer_loading": overruled(False),
    "allowed_callers": INERT,
}
OF_FORMATS: Final[Table] = {"type": READ, "syntax": READ, "definition": READ}

ROLES: Final = ("developer", "system", "user", "assistant")
TEXT: Final = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}


def parse(given: Any, known: Histories | None = None) -> ModelRequest:
    """A request's body. Raises: RefusalError."""
    reading = Reading()
    body = reading.fields(body_of(given, "input"), OF_REQUESTS)
    reading.fields(body.get("text") or {}, OF_TEXT, "text")
    if LOGPROBS in a_list(body.get("include") or [], "include"):
        raise RefusalError("logprobs are not returned", param="include")
    opening, asked = a_text(body.get("instructions"), "instructions", default=""), body.get("input")
    items = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
    messages = reading.history(opening, items, "input", _take, known)
    freeform: set[str] = set()
    tools = reading.tools(body.get("tools"), lambda tool, at: _tool(reading, tool, at, freeform))
    return ModelRequest(
        model=a_text(body.get("model"), "model", default=""),
        messages=messages,
        tools=chosen(reading, tools, body.get("tool_choice")),
        max_tokens=a_limit(body.get("max_output_tokens"), "max_output_tokens"),
        stream=a_flag(body.get("stream"), "stream"),
        freeform=frozenset(freeform),
        dropped=dict(reading.dropped),
        overruled=reading.overruled,
    )


def _take(reading: Reading, given: Any, at: str, messages: list[Message]) -> None:
    """Add an item to the messages. An answer's items, which follow one another, are one message of the assistant."""
    item = an_object(given, at)
    kind = a_text(item.get("type"), f"{at}.type", default="message")
    if kind == "message":
        reading.fields(item, OF_MESSAGES, at)
        role = role_of(item.get("role"), at, *ROLES)
        if role == "assistant":
            _said(messages)["content"] += reading.text(item.get("content"), f"{at}.content", TEXT, OF_PARTS, between="")
        else:
            text = reading.text(item.get("content"), f"{at}.content", TEXT, OF_PARTS)
            messages.append({"role": role, "content": text})
    elif kind == "function_call":
        call = reading.fields(item, OF_CALLS, at)
        _call(messages, call, call.get("arguments"), at)
    elif kind == "custom_tool_call":
        call = reading.fields(item, OF_FREEFORM_CALLS, at)
        _call(messages, call, {FREEFORM: a_text(call.get("input"), f"{at}.input")}, at)
    elif kind in ("function_call_output", "custom_tool_call_output"):
        result = reading.fields(item, OF_RESULTS, at)
        text = reading.text(result.get("output"), f"{at}.output", TEXT, OF_PARTS)
        messages.append(result_of(result.get("call_id"), text, f"{at}.call_id"))
    elif kind == "item_reference":
        raise RefusalError(f"{NOTHING_STORED} (clients that refer to items do not with store=false)", param=at)
    elif kind != "reasoning":  # what the model wrote is known
        reading.drop(f"item {kind}")


def _call(messages: list[Message], call: dict[str, Any], arguments: Any, at: str) -> None:
    _said(messages).setdefault("tool_calls", []).append(call_of(call.get("call_id"), call.get("name"), arguments, at))


def _said(messages: list[Message]) -> Message:
    """The assistant's message that is being put together."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _tool(reading: Reading, given: dict[str, Any], at: str, freeform: set[str]) -> ToolDefinition | None:
    """The definition of a tool. Server-side tools are left out: nothing runs them."""
    kind = a_text(given.get("type"), f"{at}.type")
    if kind == "function":
        tool = reading.fields(given, OF_FUNCTIONS, at)
        return function_of(tool, at, "parameters")
    if kind == "custom":
        tool = reading.fields(given, OF_FREEFORM_TOOLS, at)
        name, text = (
            a_name(tool.get("name"), f"{at}.name"),
            a_text(tool.get("description"), f"{at}.description", default=""),
        )
        freeform.add(name)
        return freeform_tool(
            name, "\n\n".join(filter(None, (text, _grammar(reading, tool.get("format"), f"{at}.format"))))
        )
    reading.drop(f"tool {kind}")
    return None


def _grammar(reading: Reading, given: Any, at: str) -> str:
    """The grammar of a tool's text, for its description: nothing holds the model to it."""
    form = reading.fields(given or {}, OF_FORMATS, at)
    if form.get("type", "text") != "grammar":
        return ""
    reading.overrule(at)
    syntax = a_text(form.get("syntax"), f"{at}.syntax")
    return f"The grammar of {FREEFORM} ({syntax}):\n{a_text(form.get('definition'), f'{at}.definition')}"


# -- answers ------------------------------------------------------------------------------------------

_CUT: Final = {"length": "max_output_tokens", "filtered": "content_filter"}


def whole(request: ModelRequest, answer: Shown, stamp: Stamp) -> dict[str, Any]:
    """The answer as one body."""
    return _response(request, answer, stamp, _items(answer, stamp))


def events(request: ModelRequest, answer: Shown, stamp: Stamp) -> Iterator[bytes]:
    """The answer as a stream."""
    for number, (kind, data) in enumerate(_events(request, answer, stamp)):
        yield _event(kind, number, data)


def failed(request: ModelRequest, refusal: RefusalError, stamp: Stamp) -> Iterator[bytes]:
    """The end of a stream that has begun, and has no answer."""
    begun = _begun(_response(request, Shown(""), stamp, []))
    kind = "invalid_prompt" if refusal.status < 500 else "server_error"
    why: dict[str, Any] = {"code": refusal.code or kind, "message": refusal.message}
    yield _event("response.created", 0, {"response": begun})
    yield _event("response.failed", 1, {"response": {**begun, "status": "failed", "error": why}})


def _response(request: ModelRequest, answer: Shown, stamp: Stamp, items: list[dict[str, Any]]) -> dict[str, Any]:
    cut = _CUT.get(answer.ended)
    return {
        "id": f"resp_{stamp.name}",
        "object": "response",
        "created_at": stamp.created_s,
        "status": "incomplete" if cut else "completed",
        "error": None,
        "incomplete_details": {"reason": cut} if cut else None,
        "instructions": None,
        "metadata": {},
        "model": request.model,
        "output": items,
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "store": False,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "usage": _usage(answer),
    }


def _begun(response: dict[str, Any]) -> dict[str, Any]:
    return {**response, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}


def _items(answer: Shown, stamp: Stamp) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if answer.reasoning:
        thought = {"type": "reasoning_text", "text": answer.reasoning}
        items.append({"type": "reasoning", "id": f"rs_{stamp.name}", "summary": [], "content": [thought]})
    if answer.content or not answer.calls:
        state = "incomplete" if answer.ended in _CUT and not answer.calls else "completed"
        part = {"type": "output_text", "text": answer.content, "annotations": [], "logprobs": []}
        items.append(
            {"type": "message", "id": f"msg_{stamp.name}", "role": "assistant", "status": state, "content": [part]}
        )
    return [*items, *(_called(call, f"{stamp.name}_{n}") for n, call in enumerate(answer.calls))]


def _called(call: ShownCall, name: str) -> dict[str, Any]:
    if call.freeform:
        return {
            "type": "custom_tool_call",
            "id": f"ctc_{name}",
            "call_id": call.call_id,
            "name": call.name,
            "input": call.text,
        }
    return {
        "type": "function_call",
        "id": f"fc_{name}",
        "call_id": call.call_id,
        "name": call.name,
        "arguments": call.text,
        "status": "completed",
    }


def _events(request: ModelRequest, answer: Shown, stamp: Stamp) -> Iterator[tuple[str, dict[str, Any]]]:
    response = whole(request, answer, stamp)
    begun = _begun(response)
    yield "response.created", {"response": begun}
    yield "response.in_progress", {"response": begun}
    for n, item in enumerate(response["output"]):
        at = {"item_id": item["id"], "output_index": n}
        yield "response.output_item.added", {"output_index": n, "item": _empty(item)}
        for kind, data in _of_item(item):
            yield kind, {**at, **data}
        yield "response.output_item.done", {"output_index": n, "item": item}
    yield f"response.{response['status']}", {"response": response}


def _empty(item: dict[str, Any]) -> dict[str, Any]:
    """An item without what the events after it bring."""
    state = {"status": "in_progress"} if "status" in item else {}
    return {**item, **{name: type(item[name])() for name in ("content", "arguments", "input") if name in item}, **state}


def _of_item(item: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """What comes between the beginning of an item and its end."""
    if item["type"] in ("message", "reasoning"):
        part, field = item["content"][0], "output_text" if item["type"] == "message" else "reasoning_text"
        more: dict[str, Any] = {"logprobs": []} if item["type"] == "message" else {}
        yield "response.content_part.added", {"content_index": 0, "part": {**part, "text": ""}}
        yield f"response.{field}.delta", {"content_index": 0, "delta": part["text"], **more}
        yield f"response.{field}.done", {"content_index": 0, "text": part["text"], **more}
        yield "response.content_part.done", {"content_index": 0, "part": part}
    elif item["type"] == "function_call":
        yield "response.function_call_arguments.delta", {"delta": item["arguments"]}
        yield "response.function_call_arguments.done", {"name": item["name"], "arguments": item["arguments"]}
    else:
        yield "response.custom_tool_call_input.delta", {"delta": item["input"]}
        yield "response.custom_tool_call_input.done", {"input": item["input"]}


def _usage(answer: Shown) -> dict[str, Any]:
    counted = answer.usage or Usage(0, 0)
    return {
        "input_tokens": counted.prompt,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": counted.completion,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counted.total,
    }


def _event(kind: str, number: int, data: dict[str, Any]) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, 'sequence_number': number, **data})}\n\n".encode()


DIALECT: Final = Dialect(
    "responses",
    "/v1/responses",
    parse,
    whole,
    events,
    error,
    failed,
    counting=Counting(
        "/v1/responses/input_tokens",
        parse,
        lambda tokens: {"object": "response.input_tokens", "input_tokens": tokens},
    ),
)
