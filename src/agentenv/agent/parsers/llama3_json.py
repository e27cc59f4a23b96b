"""Llama 3.1 and later with JSON calls: ``{"name": …, "parameters": {…}}``, anywhere in the text.

Every top-level object is tried. An object without a name and arguments is an answer, not a call. Text that looks
like a call but cannot be decoded is reported only if there was no valid call, because vLLM's newer parser continues
with the next one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from agentenv.agent.parsers.base import (
    Malformed,
    Parsed,
    ParsedCall,
    ToolCallParser,
    as_json,
    checked_name,
    object_or_text,
)
from agentenv.agent.protocols import ToolDefinition

PYTHON_TAG = "<|python_tag|>"
OBJECT = re.compile(r'\{\s*+"(?:[^"\\]|\\.){0,256}+"\s*+:', re.DOTALL)
"""Beginning of every object with a name."""
WINDOW_CHARS = 4096
FAILURE_CHARS = 256
"""Minimum cost charged for a failed attempt."""
DEEP_CHARS = 16384
"""Cost charged for a failure by nesting: the decoder does not report how far it got."""


class Llama3JsonParser(ToolCallParser):
    """Llama 3.1, 3.2 and 3.3. Reasoning, where a fine-tuned model has it, is a leading ``<think>`` block."""

    name = "llama3_json"
    openers = (PYTHON_TAG,)
    closer = None
    end_marks = ("<|eom_id|>", "<|eot_id|>")

    def split_reasoning(self, text: str, opened: bool) -> tuple[str, str, bool]:
        """Only a block at the beginning: later the mark would be inside some argument."""
        opener, closer = self.reasoning_marks[0]
        leading = text.lstrip().startswith(opener)
        if not opened and not leading:
            return "", text, False
        begins = text.find(opener) + len(opener) if leading else 0
        ends = text.find(closer, begins)
        if ends < 0:
            return text[begins:], "", True
        return text[begins:ends], text[ends + len(closer) :], False

    def read(self, answer: str, tools: Sequence[ToolDefinition]) -> Parsed:  # noqa: ARG002
        """Parse every call. Raises: Malformed when there is none but a failed attempt at one."""
        calls, first, broken = _calls(answer)
        if calls:
            return Parsed(answer[:first].replace(PYTHON_TAG, "").strip(), tuple(calls))
        if broken is not None and _looks_like_call(answer[broken:]):
            raise Malformed("the tool call is not valid JSON")
        if PYTHON_TAG in answer:
            raise Malformed(f"{PYTHON_TAG} is not followed by a tool call in JSON")
        return Parsed(answer)

    def written(self, calls: Sequence[ParsedCall]) -> str:
        """Objects separated by semicolons."""
        return "; ".join(as_json({"name": call.name, "parameters": call.arguments}) for call in calls)


def _calls(text: str) -> tuple[list[ParsedCall], int, int | None]:
    """(calls, where the first begins, where the first undecodable object is).

    Failed attempts may read four times the text in total; then the rest is not searched. This keeps the time
    linear, whatever is nested or left open.
    """
    decoder, calls, first, broken = json.JSONDecoder(), [], -1, None
    allowance = 4 * len(text) + 16 * DEEP_CHARS
    rest, cut, ends = text, 0, 0  # rest is text[cut:]: the cost of a decoder error depends on its position
    while allowance > 0 and (found := OBJECT.search(text, ends)):
        at = found.start()
        if at - cut > WINDOW_CHARS:
            rest, cut = text[at:], at
        try:
            value, ends = decoder.raw_decode(rest, at - cut)
            ends += cut
        except (ValueError, RecursionError) as error:
            broken = at if broken is None else broken
            read = error.pos + cut - at if isinstance(error, json.JSONDecodeError) else DEEP_CHARS
            allowance -= read + FAILURE_CHARS
            ends = at + 1
        else:
            if (call := _call(value)) is not None:
                first = at if first < 0 else first
                calls.append(call)
    return calls, first, broken


def _call(value: Any) -> ParsedCall | None:
    if not isinstance(value, dict) or not {"arguments", "parameters"} & value.keys():
        return None
    try:
        name = checked_name(value.get("name"), "")
    except Malformed:
        return None
    return ParsedCall(name, object_or_text(value["arguments"] if "arguments" in value else value["parameters"]))


def _looks_like_call(text: str) -> bool:
    named = text.find('"name"')
    return named >= 0 and ('"parameters"' in text[named:] or '"arguments"' in text[named:])
