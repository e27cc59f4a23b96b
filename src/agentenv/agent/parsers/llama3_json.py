"""Llama 3.1 and later with JSON calls: ``{"name": …, "parameters": {…}}``, anywhere in the text.

Every top-level object is tried. An object without a name and arguments is an answer, not a call. Nothing is run of a
message with an object that cannot be decoded and looks like a call, or is followed by one: what seems to be a call
may be a string of that object. A call has no closing mark: text behind it that has a ``}`` may be the rest of a call
whose JSON ended too early.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from agentenv.agent.parsers.base import (
    Malformed,
    ParsedCall,
    Reading,
    ToolCallParser,
    as_json,
    checked_fields,
    checked_name,
    object_or_text,
)

PYTHON_TAG = "<|python_tag|>"
OBJECT = re.compile(r'\{\s*+"(?:[^"\\]|\\.){0,256}+"\s*+:')
"""Beginning of every object with a name."""
BEFORE, BEHIND = re.compile(r"[\s\[]*+"), re.compile(r"[\s,;\]]*+")
"""What may come between the tag and an object, and what separates or ends several of them."""


class Llama3JsonParser(ToolCallParser):
    """Llama 3.1, 3.2 and 3.3."""

    name = "llama3_json"
    opener = f"{re.escape(PYTHON_TAG)}|{OBJECT.pattern}"
    tail_marks = ("}",)
    end_marks = ("<|eom_id|>", "<|eot_id|>")

    def read(self, reading: Reading) -> None:
        """Read one object, with the tag before it."""
        tagged = reading.take(PYTHON_TAG)
        if tagged:
            reading.match(BEFORE)
        begins = reading.at
        if not OBJECT.match(reading.text, begins):
            raise Malformed(f"{PYTHON_TAG} is not followed by a tool call in JSON")
        try:
            call = _call(reading.json(), reading.where)
        except Malformed:
            if tagged or reading.calls or _looks_like_call(reading.text[begins:]):
                raise
            reading.at = len(reading.text)  # no call can follow
            return
        if call is not None:
            reading.calls.append(call)
            reading.match(BEHIND)
        elif tagged:
            raise Malformed(f"{PYTHON_TAG} is not followed by a tool call in JSON")

    def written(self, calls: Sequence[ParsedCall]) -> str:
        """Objects separated by semicolons."""
        return "; ".join(as_json({"name": call.name, "parameters": call.arguments}) for call in calls)


def _call(value: Any, where: str) -> ParsedCall | None:
    if not isinstance(value, dict) or not {"arguments", "parameters"} & value.keys():
        return None
    try:
        name = checked_name(value.get("name"), where)
    except Malformed:
        return None
    arguments = "parameters" if "parameters" in value else "arguments"
    checked_fields(value, where, arguments)
    return ParsedCall(name, object_or_text(value[arguments]))


def _looks_like_call(text: str) -> bool:
    return '"name"' in text and ('"parameters"' in text or '"arguments"' in text)
