"""Assistant messages: the calls in them, the form in which they are sent back, and when two mean the same. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from agentenv.agent.jsonable import DEEPEST_ARGUMENTS, clean_text, deeper_than, jsonable
from agentenv.agent.protocols import Message
from agentenv.agent.transcript import text_of
from agentenv.tools.json_text import read_json

CALL_ID_CHARS = 64
"""Longer call ids are replaced by our own: servers reject conversations that contain them, and results cannot carry
them."""
NAME_CHARS = 64
MEANINGS_KEPT = 4096
LONG_HISTORY = 500
"""Messages. What has to be done for each message of more than these is done in a thread, so that other rollouts go on:
meanings and a chat template take about 50 µs for one."""
UNSENDABLE = re.compile(r"[^A-Za-z0-9_.-]")
"""Characters that servers reject in a tool name, and with it the whole conversation."""
INVALID = "invalid"
"""The name of a call that has none."""


@dataclass(frozen=True)
class RequestedCall:
    """One tool call as read from a message. ``arguments`` is an object if it could be parsed as one, otherwise the
    text that was sent, for which the session returns an error. ``problem``: reason, for the model, why the call is
    not run at all. ``cut``: the message ended inside the call, so its arguments may be incomplete."""

    call_id: str
    tool: str
    arguments: dict[str, Any] | str
    problem: str = ""
    cut: bool = False


def requested_calls(message: Message, step: int) -> list[RequestedCall]:
    """The calls of an assistant message, in order. Never raises, however malformed the calls are."""
    raw = message.get("tool_calls") or []
    return [_requested(call, f"call_{step}_{n}") for n, call in enumerate(raw if isinstance(raw, list) else [raw])]


def _requested(call: Any, fallback_id: str) -> RequestedCall:
    call = call if isinstance(call, dict) else {}
    function = call.get("function") if isinstance(call.get("function"), dict) else {}
    call_id, tool = sendable_id(call.get("id"), fallback_id), clean_text(str(function.get("name") or ""))
    sent = function.get("arguments")
    if sent is None or sent == "":
        return RequestedCall(call_id, tool, {})
    try:
        read = read_json(sent, strict=False) if isinstance(sent, str) else sent
        if deeper_than(read, DEEPEST_ARGUMENTS):
            problem = f"not run: its arguments nest more than {DEEPEST_ARGUMENTS} levels deep"
            return RequestedCall(call_id, tool, clean_text(sent) if isinstance(sent, str) else "", problem)
        return RequestedCall(call_id, tool, read if isinstance(read, dict) else str(sent))
    except ValueError:  # the session returns the error
        return RequestedCall(call_id, tool, str(sent))


def sendable_id(given: Any, fallback: str) -> str:
    """The id of a call, or ``fallback`` where servers would refuse it."""
    found = clean_text(str(given or ""))
    return found if 0 < len(found) <= CALL_ID_CHARS else fallback


def as_history(message: Message, calls: Sequence[RequestedCall]) -> Message:
    """The assistant message as it is sent back to the model: with ids, valid names, and arguments that are valid
    JSON. Servers reject the whole conversation for one malformed call, which would let the model end its rollouts."""
    history: Message = {"role": "assistant", "content": clean_text(text_of(message.get("content")))}
    if calls:
        history["tool_calls"] = [
            {
                "id": call.call_id,
                "type": "function",
                "function": {
                    "name": UNSENDABLE.sub("_", call.tool[:NAME_CHARS]) or INVALID,
                    "arguments": json.dumps(jsonable(as_object(call.arguments))),
                },
            }
            for call in calls
        ]
    return history


def as_object(arguments: dict[str, Any] | str) -> dict[str, Any]:
    """A call's arguments as an object; text that is none is its one value."""
    return arguments if isinstance(arguments, dict) else {"unparsable": arguments}


def meaning(message: Message) -> str:
    """A key that two forms of a message share if they mean the same.

    An assistant's message means its text without surrounding white space, and the ids, names and parsed arguments of
    its calls, all as :func:`as_history` keeps them: programs write arguments anew, in another order, and strip text.
    Other messages, which nobody but the caller wrote, are compared as they are. Fields that no prompt shows, such as
    reasoning, mean nothing.
    """
    role = message.get("role")
    if role != "assistant":
        return json.dumps([role, message.get("content") or "", message.get("tool_call_id") or ""], default=repr)
    history = as_history(message, requested_calls(message, 0))
    calls = [
        [call["id"], call["function"]["name"], _without_forms_of_numbers(json.loads(call["function"]["arguments"]))]
        for call in history.get("tool_calls") or ()
    ]
    return json.dumps([role, history["content"].strip(), calls], sort_keys=True)


class Meanings:
    """Meanings of messages, each computed once: a conversation is compared anew with every turn, and most of its
    messages are the same objects as before."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Message, Message, str]] = {}
        """By id of the message: itself, so that no other has this id; as it was; its meaning."""

    def of(self, message: Message) -> str:
        """:func:`meaning`."""
        if (known := self._known.get(id(message))) is not None and known[1] == message:
            return known[2]
        if len(self._known) >= MEANINGS_KEPT:
            del self._known[next(iter(self._known))]
        self._known[id(message)] = message, deepcopy(message), (means := meaning(message))
        return means


def _without_forms_of_numbers(value: Any) -> Any:
    """JSON has one kind of number; JavaScript writes 1.0 as 1."""
    if isinstance(value, dict):
        return {name: _without_forms_of_numbers(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_without_forms_of_numbers(entry) for entry in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
