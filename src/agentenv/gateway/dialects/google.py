"""Google's generateContent. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from agentenv.agent.jsonable import clean_text
from agentenv.agent.parsers.base import as_json, as_text
from agentenv.agent.protocols import Message, ToolDefinition
from agentenv.gateway.canonical import (
    TOO_LONG,
    Counting,
    Dialect,
    ModelRequest,
    RefusalError,
    Shown,
    Stamp,
    Usage,
)
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

OF_REQUESTS: Final[Table] = {
    "contents": READ,
    "systemInstruction": READ,
    "tools": READ,
    "toolConfig": READ,
    "generationConfig": READ,
    # not supported
    "cachedContent": refused("nothing is stored between requests: send the whole history in contents"),
    # the provider's accounting, caching and filters
    "model": INERT,
    "labels": INERT,
    "safetySettings": INERT,
    "serviceTier": INERT,
    "store": INERT,
}
OF_GENERATION: Final[Table] = {
    "maxOutputTokens": READ,
    # sampling
    "temperature": overruled(),
    "topP": overruled(),
    "topK": overruled(),
    "seed": overruled(),
    "presencePenalty": overruled(),
    "frequencyPenalty": overruled(),
    "thinkingConfig": overruled(),
    # not supported
    "candidateCount": refused("only one answer per request is supported", 1),
    "stopSequences": refused("stop sequences are not supported"),
    "responseMimeType": refused("structured output is not supported, only text", "text/plain"),
    "responseSchema": refused("structured output is not supported, only text"),
    "responseJsonSchema": refused("structured output is not supported, only text"),
    "responseFormat": refused("structured output is not supported, only text"),
    "responseModalities": refused("only text output is supported", ["TEXT"]),
    "speechConfig": refused("only text output is supported"),
    "imageConfig": refused("only text output is supported"),
    "responseLogprobs": refused("logprobs are not returned", False),
    "logprobs": refused("logprobs are not returned", 0),
    # only about media
    "audioTimestamp": INERT,
    "mediaResolution": INERT,
}
OF_TOOL_CONFIG: Final[Table] = {
    "functionCallingConfig": READ,
    "includeServerSideToolInvocations": INERT,
    "retrievalConfig": DROPPED,
}
OF_CHOICE: Final[Table] = {"mode": READ, "allowedFunctionNames": overruled()}
OF_CONTENTS: Final[Table] = {"role": READ, "parts": READ}
_OF_PARTS: Final[Table] = {
    "thought": READ,
    "thoughtSignature": INERT,
    "partMetadata": INERT,
    "mediaResolution": INERT,
    "videoMetadata": INERT,
}
OF_PARTS: Final[Table] = {**_OF_PARTS, "text": READ, "functionCall": READ, "functionResponse": READ}
OF_CALLS: Final[Table] = {"id": READ, "name": READ, "args": READ}
OF_RESULTS: Final[Table] = {
    "id": READ,
    "name": READ,
    "response": READ,
    "parts": READ,
    "scheduling": INERT,
    "willContinue": INERT,
}
OF_FUNCTIONS: Final[Table] = {
    "name": READ,
    "description": READ,
    "parameters": READ,
    "parametersJsonSchema": READ,
    "behavior": overruled("BLOCKING"),
    "response": INERT,
    "responseJsonSchema": INERT,
}
ROLES: Final = {"user": "user", "function": "user", "model": "assistant"}
RESULTS: Final = ("output", "result", "content")
"""Fields of a response that are the result of a call, where one of them is all it has but the function's name."""
_SNAKE: Final = re.compile(r"_([a-z])")


def parse(given: Any, _: Histories | None = None) -> ModelRequest:
    """A request's body, always the whole of it: ids of calls depend on the calls before. Raises: RefusalError."""
    reading = Reading()
    body = _fields(reading, body_of(given, "contents"), OF_REQUESTS, "")
    settings = _fields(reading, body.get("generationConfig") or {}, OF_GENERATION, "generationConfig")
    calls = _Calls()
    messages = reading.history(
        _system(reading, body.get("systemInstruction")),
        body.get("contents"),
        "contents",
        lambda inner, content, at, found: _take(inner, content, at, found, calls),
        None,
    )
    return ModelRequest(
        model="",
        messages=messages,
        tools=_tools(reading, body),
        max_tokens=a_limit(settings.get("maxOutputTokens"), "generationConfig.maxOutputTokens"),
        dropped=dict(reading.dropped),
        overruled=reading.overruled,
    )


def parse_to_count(given: Any) -> ModelRequest:
    """The body of a request to count tokens: contents, or a whole request. Raises: RefusalError."""
    body = _camel(body_of(given, "contents"))
    return parse(body.get("generateContentRequest") or body)


def with_url(request: ModelRequest, url: Mapping[str, str]) -> ModelRequest:
    """The request with what its URL says: its model, and how it is answered."""
    streams = url.get("method", "").startswith("stream")
    events = url.get("alt") == "sse"
    return replace(request, model=url.get("model", ""), stream=streams and events, listed=streams and not events)


class _Calls:
    """The calls of a conversation that have no result yet. Ids are optional in this protocol."""

    def __init__(self) -> None:
        self._answer = -1
        self._open: list[tuple[int, str, str]] = []

    def begin(self) -> None:
        """Another message of the model begins."""
        self._answer += 1

    def add(self, given: str, name: str, number: int) -> str:
        """The id of a call. Without one it is named after its place, as calls of the agent's own models are."""
        call_id = given or f"call_{self._answer}_{number}"
        self._open.append((self._answer, call_id, name))
        return call_id

    def take(self, given: str, name: str, at: str) -> str:
        """The id of the call that a result belongs to: the one with its id, or else the first of its name in the last
        message, or else in any. Raises: RefusalError when there is none."""
        named = [one for one in self._open if one[2] == name]
        exact = [one for one in self._open if given and one[1] == given]
        found = next(iter([*exact, *(one for one in named if one[0] == self._answer), *named]), None)
        if found is None:
            raise RefusalError(f"there is no call of {name!r} before it without a result", param=at)
        self._open.remove(found)
        return found[1]


def _camel(given: dict[str, Any]) -> dict[str, Any]:
    """An object with its fields' names in the form of the reference; the provider also takes ``snake_case``."""
    return {_SNAKE.sub(lambda letter: letter[1].upper(), name): value for name, value in given.items()}


def _fields(reading: Reading, given: Any, table: Table, at: str) -> dict[str, Any]:
    return reading.fields(_camel(an_object(given, at)), table, at)


def _parts(content: dict[str, Any], at: str) -> list[tuple[dict[str, Any], str]]:
    parts = a_list(content.get("parts") or [], f"{at}.parts")
    return [(_camel(an_object(part, f"{at}.parts[{n}]")), f"{at}.parts[{n}]") for n, part in enumerate(parts)]


def _system(reading: Reading, given: Any) -> str:
    if given is None or isinstance(given, str):
        return a_text(given, "systemInstruction", default="")
    content = _fields(reading, given, OF_CONTENTS, "systemInstruction")
    return "\n".join(_text(reading, part, at) for part, at in _parts(content, "systemInstruction"))


def _text(reading: Reading, part: dict[str, Any], at: str) -> str:
    """The text of a part, or the note in the place of something else."""
    kind = next((name for name, value in part.items() if name not in _OF_PARTS and value is not None), "")
    if kind != "text":
        return reading.leave_out(kind, part) if kind else ""
    reading.fields(part, OF_PARTS, at)
    return a_text(part["text"], f"{at}.text")


def _take(reading: Reading, given: Any, at: str, messages: list[Message], calls: _Calls) -> None:
    """Add a content to the messages: a user's has the results of calls too."""
    content = _fields(reading, given, OF_CONTENTS, at)
    role = a_text(content.get("role"), f"{at}.role", default="user")
    if role not in ROLES:
        raise RefusalError(f"no content has the role {role!r}; there are {', '.join(ROLES)}", param=f"{at}.role")
    parts = _parts(content, at)
    if ROLES[role] == "assistant":
        _said(reading, parts, messages, calls)
        return
    results = [_result(reading, part, at, calls) for part, at in parts if "functionResponse" in part]
    texts = [_text(reading, part, at) for part, at in parts if "functionResponse" not in part]
    messages += [*results, *([{"role": "user", "content": "\n".join(texts)}] if texts else [])]


def _said(reading: Reading, parts: list[tuple[dict[str, Any], str]], messages: list[Message], calls: _Calls) -> None:
    """Add what the model said; contents of it that follow one another are one message."""
    if messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
        calls.begin()
    message = messages[-1]
    for part, at in parts:
        if a_flag(part.get("thought"), f"{at}.thought"):
            continue  # what the model wrote is known
        if "functionCall" not in part:
            message["content"] += _text(reading, part, at)
            continue
        reading.fields(part, OF_PARTS, at)
        where = f"{at}.functionCall"
        call = _fields(reading, part["functionCall"], OF_CALLS, where)
        name = a_name(call.get("name"), f"{where}.name")
        given = a_text(call.get("id"), f"{where}.id", default="")
        made = message.setdefault("tool_calls", [])
        arguments = an_object(call.get("args") or {}, f"{where}.args")
        made.append(call_of(calls.add(given, name, len(made)), name, arguments, where))


def _result(reading: Reading, part: dict[str, Any], at: str, calls: _Calls) -> Message:
    """A call's result. One that is an error begins as errors do that the agent's own loop shows."""
    reading.fields(part, OF_PARTS, at)
    where = f"{at}.functionResponse"
    result = _fields(reading, part["functionResponse"], OF_RESULTS, where)
    given, name = (a_text(result.get(field), f"{where}.{field}", default="") for field in ("id", "name"))
    response = an_object(result.get("response") or {}, f"{where}.response")
    texts = [clean_text(_response(response, name)), *(_text(reading, one, at) for one, at in _parts(result, where))]
    return result_of(calls.take(given, name, where), "\n".join(texts), where)


def _response(given: dict[str, Any], name: str) -> str:
    """The text of a result: its one field, if that is known to have it, or the whole object."""
    fields = {field: value for field, value in given.items() if (field, value) != ("name", name)}
    field, value = next(iter(fields.items())) if len(fields) == 1 else ("", None)
    if field == "error":
        return f"error: {as_text(value)}"
    return as_text(value) if field in RESULTS else as_json(given) if given else ""


def _tools(reading: Reading, body: dict[str, Any]) -> list[ToolDefinition]:
    """The functions of all tools. Server-side tools are left out: nothing runs them."""
    declared: list[Any] = []
    for n, given in enumerate(a_list(body.get("tools") or [], "tools")):
        tool = _camel(an_object(given, f"tools[{n}]"))
        declared += a_list(tool.pop("functionDeclarations", None) or [], f"tools[{n}].functionDeclarations")
        for kind in tool:
            reading.drop(f"tool {kind}")
    tools = reading.tools(declared, lambda one, at: _function(reading, one, at))
    config = _fields(reading, body.get("toolConfig") or {}, OF_TOOL_CONFIG, "toolConfig")
    at = "toolConfig.functionCallingConfig"
    mode = _fields(reading, config.get("functionCallingConfig") or {}, OF_CHOICE, at).get("mode")
    if mode == "NONE":
        return []
    if mode not in (None, "AUTO", "VALIDATED", "MODE_UNSPECIFIED"):
        reading.overrule(f"{at}.mode")
    return tools


def _function(reading: Reading, given: dict[str, Any], at: str) -> ToolDefinition:
    function = _fields(reading, given, OF_FUNCTIONS, at)
    if function.get("parametersJsonSchema") is not None:
        return function_of(function, at, "parametersJsonSchema")
    return function_of({**function, "parameters": _json_schema(function.get("parameters"))}, at, "parameters")


def _json_schema(given: Any) -> Any:
    """JSON Schema of the provider's schemas, whose types are in capital letters."""
    if isinstance(given, list):
        return [_json_schema(one) for one in given]
    if not isinstance(given, dict):
        return given
    found: dict[str, Any] = {}
    for name, value in _camel(given).items():
        if name == "type" and isinstance(value, str):
            found[name] = value.lower()
        elif name == "properties" and isinstance(value, dict):
            found[name] = {field: _json_schema(one) for field, one in value.items()}
        else:
            found[name] = _json_schema(value) if name in ("items", "anyOf") else value
    return found


# -- answers ------------------------------------------------------------------------------------------

_ENDS: Final = {"stop": "STOP", "calls": "STOP", "length": "MAX_TOKENS", "filtered": "SAFETY"}
_ERRORS: Final = {
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    429: "RESOURCE_EXHAUSTED",
    503: "UNAVAILABLE",
}


def whole(request: ModelRequest, answer: Shown, stamp: Stamp) -> dict[str, Any] | list[dict[str, Any]]:
    """The answer as one body."""
    answered = _answer(request, answer, stamp)
    return [answered] if request.listed else answered


def events(request: ModelRequest, answer: Shown, stamp: Stamp) -> Iterator[bytes]:
    """The answer as a stream: one event has all of it."""
    yield f"data: {json.dumps(_answer(request, answer, stamp))}\n\n".encode()


def error(refusal: RefusalError) -> dict[str, Any]:
    """The body of a refusal."""
    status = _ERRORS.get(refusal.status, "INVALID_ARGUMENT" if refusal.status < 500 else "INTERNAL")
    long = "The input token count exceeds the maximum number of tokens allowed: " if refusal.code == TOO_LONG else ""
    return {"error": {"code": refusal.status, "message": f"{long}{refusal.message}", "status": status}}


def failed(_: ModelRequest, refusal: RefusalError, __: Stamp) -> Iterator[bytes]:
    """The end of a stream that has begun, and has no answer: no event, but the error itself."""
    yield f"{json.dumps(error(refusal))}\n\n".encode()


def _answer(request: ModelRequest, answer: Shown, stamp: Stamp) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [{"text": answer.reasoning, "thought": True}] if answer.reasoning else []
    if answer.content or not answer.calls:
        parts.append({"text": answer.content})
    for call in answer.calls:
        parts.append({"functionCall": {"id": call.call_id, "name": call.name, "args": call.arguments}})
    content = {"role": "model", "parts": parts}
    counted = {} if answer.usage is None else {"usageMetadata": _usage(answer.usage)}
    return {
        "candidates": [{"content": content, "finishReason": _ENDS[answer.ended], "index": 0}],
        "modelVersion": request.model,
        "responseId": stamp.name,
        **counted,
    }


def _usage(usage: Usage) -> dict[str, int]:
    return {
        "promptTokenCount": usage.prompt,
        "candidatesTokenCount": usage.completion,
        "totalTokenCount": usage.total,
    }


_MODEL: Final = r"/{version:v1[a-z0-9]*}/models/{model:.+}"
DIALECT: Final = Dialect(
    "google",
    _MODEL + ":{method:generateContent|streamGenerateContent}",
    parse,
    whole,
    events,
    error,
    failed,
    alive=b"\n",  # the SDKs of Google read no comments
    with_url=with_url,
    counting=Counting(_MODEL + ":countTokens", parse_to_count, lambda tokens: {"totalTokens": tokens}),
)
