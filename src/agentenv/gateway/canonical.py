"""Requests to a model and their answers, independent of the dialect: messages and tools as the agent's own models take
them (:mod:`agentenv.agent.protocols`). Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, Literal, Protocol

from agentenv.agent.assistant_messages import INVALID, RequestedCall, as_history, as_object, requested_calls
from agentenv.agent.jsonable import clean_text, jsonable
from agentenv.agent.parsers.base import as_json
from agentenv.agent.protocols import Completion, Message, ToolDefinition
from agentenv.agent.transcript import text_of
from agentenv.gateway.history import Histories

TOO_LONG: Final = "context_length_exceeded"
FREEFORM: Final = "input"
"""Name of the one argument of a tool that takes plain text, in the definition for the model."""


class RefusalError(Exception):
    """A request that fails with this HTTP status and its dialect's error body. ``param`` is the path of the
    field that is refused; ``code`` is OpenAI's, where it has one."""

    def __init__(self, message: str, *, status: int = 400, param: str = "", code: str = "") -> None:
        super().__init__(f"{param}: {message}" if param else message)
        self.status = status
        self.param = param
        self.code = code

    @property
    def message(self) -> str:
        """Message for the program, with the path of the field."""
        return str(self)


@dataclass(frozen=True)
class ModelRequest:
    """What a program requests of its model. ``max_tokens`` is the program's own limit of the answer. ``listed``: the
    answer, as one body, is a list with one entry. ``include_usage``: a stream has to contain the number of tokens.
    ``freeform`` are the tools whose argument is plain text; their definitions have one string argument. ``dropped``
    counts, by field, what is left out of the prompt; ``overruled`` are the settings that were given and are the
    environment's to choose."""

    model: str
    messages: list[Message]
    tools: list[ToolDefinition] = field(default_factory=list)
    max_tokens: int | None = None
    stream: bool = False
    listed: bool = False
    include_usage: bool = True
    freeform: frozenset[str] = frozenset()
    dialect: str = ""
    dropped: Mapping[str, int] = field(default_factory=dict)
    overruled: tuple[str, ...] = ()


@dataclass(frozen=True)
class ShownCall:
    """A call as it is sent to a program. ``arguments`` is always an object; ``text`` is its JSON, or what the model
    wrote if that is no object; of a freeform tool, the plain text."""

    call_id: str
    name: str
    arguments: dict[str, Any]
    text: str
    freeform: bool = False


@dataclass(frozen=True)
class Usage:
    """Numbers of tokens."""

    prompt: int
    completion: int

    @property
    def total(self) -> int:
        """Of prompt and answer."""
        return self.prompt + self.completion


@dataclass(frozen=True)
class Shown:
    """A model's answer as it is sent to a program, before it is written in a dialect. ``reasoning`` is empty where
    programs do not receive it; ``usage`` is None when the model's server reports none."""

    content: str
    calls: tuple[ShownCall, ...] = ()
    reasoning: str = ""
    ended: Literal["stop", "calls", "length", "filtered"] = "stop"
    usage: Usage | None = None

    @cached_property
    def message(self) -> Message:
        """The message as it will be in the program's next request, if the program sends it back unchanged."""
        calls = [RequestedCall(call.call_id, call.name, call.arguments) for call in self.calls]
        return as_history({"content": self.content}, calls)


@dataclass(frozen=True)
class Stamp:
    """Identity of an answer: the suffix of its ids, and its time."""

    name: str
    created_s: int


class Parse(Protocol):
    """Reads the body of a request."""

    def __call__(self, given: Any, known: Histories | None = None, /) -> ModelRequest:
        """What is known of its history is not read again. Raises: RefusalError."""


@dataclass(frozen=True)
class Counting:
    """How programs request the number of a prompt's tokens. ``whole`` is the body of the answer."""

    path: str
    parse: Callable[[Any], ModelRequest]
    whole: Callable[[int], dict[str, Any]]


@dataclass(frozen=True)
class Dialect:
    """One provider's protocol.

    ``path`` is a pattern of URLs; ``with_url`` adds the values of its placeholders and of the query to a request.
    ``whole`` and ``events`` are an answer as one body and as a stream; ``error`` is the body of a refusal, ``failed``
    the end of a stream without an answer; ``alive`` is sent while a stream waits for its answer.
    """

    name: str
    path: str
    parse: Parse
    whole: Callable[[ModelRequest, Shown, Stamp], Any]
    events: Callable[[ModelRequest, Shown, Stamp], Iterable[bytes]]
    error: Callable[[RefusalError], dict[str, Any]]
    failed: Callable[[ModelRequest, RefusalError, Stamp], Iterable[bytes]]
    alive: bytes = b": waiting\n\n"
    with_url: Callable[[ModelRequest, Mapping[str, str]], ModelRequest] = lambda request, _: request
    counting: Counting | None = None


def shown(request: ModelRequest, done: Completion, turn: int, *, reasoning: bool = False) -> Shown:
    """The answer ``done``, turn ``turn`` of its rollout, as the program receives it.

    What looked like a call and could not be parsed is sent as text: programs have formats and errors of their own.
    """
    content = clean_text(text_of(done.message.get("content")))
    calls = tuple(_shown_call(call, call.tool in request.freeform) for call in requested_calls(done.message, turn))
    if done.problem and not calls and not content:
        content = clean_text(done.raw or "")
    if done.finish_reason == "length":
        ended: Literal["stop", "calls", "length", "filtered"] = "length"
    elif done.finish_reason == "content_filter":
        ended = "filtered"
    else:
        ended = "calls" if calls else "stop"
    return Shown(content, calls, clean_text(done.reasoning) if reasoning else "", ended, _usage_of(done.usage))


def _shown_call(call: RequestedCall, freeform: bool) -> ShownCall:
    name, arguments = call.tool or INVALID, call.arguments
    if freeform:
        plain = arguments.get(FREEFORM) if isinstance(arguments, dict) and len(arguments) == 1 else None
        text = plain if isinstance(plain, str) else arguments if isinstance(arguments, str) else as_json(arguments)
        return ShownCall(call.call_id, name, {FREEFORM: clean_text(text)}, clean_text(text), freeform=True)
    text = clean_text(arguments) if isinstance(arguments, str) else as_json(arguments)
    return ShownCall(call.call_id, name, jsonable(as_object(arguments)), text)


def _usage_of(counted: Mapping[str, Any] | None) -> Usage | None:
    numbers = [(counted or {}).get(name) for name in ("prompt_tokens", "completion_tokens")]
    prompt, completion = (number if isinstance(number, int) else None for number in numbers)
    return None if prompt is None and completion is None else Usage(prompt or 0, completion or 0)


def function_tool(name: str, description: str, parameters: Mapping[str, Any] | None) -> ToolDefinition:
    """A tool's definition for the model."""
    shape = jsonable(parameters) if parameters else {"type": "object", "properties": {}}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": shape}}


def freeform_tool(name: str, description: str) -> ToolDefinition:
    """The definition, for the model, of a tool that takes plain text."""
    shape = {"type": "object", "properties": {FREEFORM: {"type": "string"}}, "required": [FREEFORM]}
    return function_tool(name, description, shape)
