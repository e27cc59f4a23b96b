"""GLM 4.5 and later: ``<tool_call>NAME<arg_key>K</arg_key><arg_value>V</arg_value>…</tool_call>``.

4.5 and 4.6 put newlines between the parts, 4.7 does not; both parsers read both, as vLLM does from 0.33 on, and
differ in how they write. Strings are unquoted, other values are JSON; the tool's schema tells which is which. A
block that is not closed is skipped and the others run, but the model is told.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from agentenv.agent.parsers.base import (
    Malformed,
    Parsed,
    ParsedCall,
    ToolCallParser,
    as_text,
    blocks,
    checked_name,
)
from agentenv.agent.parsers.typed import Schemas
from agentenv.agent.protocols import ToolDefinition

CALL, CALL_END = "<tool_call>", "</tool_call>"
KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
PARTS = re.compile("|".join((KEY, KEY_END, VALUE, VALUE_END)))


class Glm47Parser(ToolCallParser):
    """GLM 4.7 and later."""

    name = "glm47"
    openers = (CALL,)
    closer = CALL_END
    end_marks = ("<|observation|>", "<|user|>", "<|endoftext|>")
    _joint = ""

    def read(self, answer: str, tools: Sequence[ToolDefinition]) -> Parsed:
        """Parse every closed call. Raises: Malformed when one is malformed, or none is closed."""
        found = blocks(answer, CALL, CALL_END)
        if not found:
            return Parsed(answer)
        schemas = Schemas(tools)
        calls = tuple(_call(text, f"tool call {n}", schemas) for n, (text, closed) in enumerate(found, 1) if closed)
        problem = "" if found[-1][1] else f"tool call {len(found)} is not closed with {CALL_END}"
        if not calls:
            raise Malformed(problem)
        return Parsed(answer[: answer.find(CALL)].strip(), calls, problem=problem)

    def written(self, calls: Sequence[ParsedCall]) -> str:
        """One block per call, each on separate lines."""
        return "\n".join(self._block(call) for call in calls)

    def _block(self, call: ParsedCall) -> str:
        arguments = call.arguments if isinstance(call.arguments, dict) else {}
        parts = [CALL + call.name]
        for key, value in arguments.items():
            parts += [f"{KEY}{key}{KEY_END}", f"{VALUE}{as_text(value)}{VALUE_END}"]
        return self._joint.join([*parts, CALL_END])


class Glm45Parser(Glm47Parser):
    """GLM 4.5 and 4.6."""

    name = "glm45"
    _joint = "\n"


def _call(text: str, where: str, schemas: Schemas) -> ParsedCall:
    marks = list(PARTS.finditer(text))
    name = checked_name(text[: marks[0].start()] if marks else text, where)
    arguments: dict[str, Any] = {}
    at = 0
    while at < len(marks):
        key, value, at = _pair(text, marks, at, where)
        types = schemas.types(name, key)
        arguments[key] = value if "string" in types else _typed(value, schemas)
    return ParsedCall(name, arguments)


def _pair(text: str, marks: Sequence[re.Match[str]], at: int, where: str) -> tuple[str, str, int]:
    """The pair that begins at mark number ``at``, and the number of the mark after it."""
    if [mark.group() for mark in marks[at : at + 3]] != [KEY, KEY_END, VALUE]:
        raise Malformed(f"{where} is not a row of {KEY}…{KEY_END}{VALUE}…{VALUE_END}")
    if text[marks[at + 1].end() : marks[at + 2].start()].replace("\\n", "").strip():
        raise Malformed(f"{where} has text between {KEY_END} and {VALUE}")
    ends = at + 3
    while ends < len(marks) and marks[ends].group() in (KEY, KEY_END):  # may occur in a value
        ends += 1
    if ends == len(marks) or marks[ends].group() != VALUE_END:
        raise Malformed(f"{where} has a value that is not closed with {VALUE_END}")
    key = text[marks[at].end() : marks[at + 1].start()].strip()
    return key, text[marks[at + 2].end() : marks[ends].start()].strip(), ends + 1


def _typed(text: str, schemas: Schemas) -> Any:
    value = schemas.json_or_literal(text)
    return value if value is not None or text == "null" else text
