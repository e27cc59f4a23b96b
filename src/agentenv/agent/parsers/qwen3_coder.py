"""Qwen3-Coder and Qwen 3.5: ``<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>``.

Not XML: nothing is escaped, and exactly one newline on each side of a value is layout. A value ends at
``</parameter>``, the next ``<parameter=`` or ``</function>``. One that is cut off by the end of the text
is refused, unlike in vLLM before 0.33: half of an ``rm`` command must not run.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import zip_longest
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
FUNCTION, FUNCTION_END = "<function=", "</function>"
MOST_MARKS = 2000
PARAMETER = re.compile(r"<parameter=|</parameter>")


class Qwen3CoderParser(ToolCallParser):
    """Qwen3-Coder, Qwen 3.5."""

    name = "qwen3_coder"
    openers = (CALL, FUNCTION)
    closer = CALL_END
    end_marks = ("<|im_end|>", "<|endoftext|>")

    def read(self, answer: str, tools: Sequence[ToolDefinition]) -> Parsed:
        """All calls, or Malformed: a message is run whole or not at all."""
        found = blocks(answer, CALL, CALL_END)
        begins = answer.find(CALL if found else FUNCTION)
        if begins < 0:
            return Parsed(answer)
        schemas, calls, closed = Schemas(tools), [], True
        for text, block_closed in found or [(answer[begins:], False)]:
            functions = blocks(text, FUNCTION, FUNCTION_END)
            if not functions:
                raise Malformed(f"a {CALL} block has no <function=NAME> in it")
            calls += [_call(function, ended or block_closed, schemas) for function, ended in functions]
            closed = functions[-1][1] or block_closed
        return Parsed(answer[:begins].strip(), tuple(calls), open_ended=not closed)

    def written(self, calls: Sequence[ParsedCall]) -> str:
        """One block a call, every part on lines of its own."""
        return "\n".join(f"{CALL}\n{_function(call)}\n{CALL_END}" for call in calls)


def _call(text: str, closed: bool, schemas: Schemas) -> ParsedCall:
    head, bracket, body = text.partition(">")
    if not bracket:
        raise Malformed(f"{FUNCTION} is not closed with '>'")
    name = checked_name(head, FUNCTION)
    marks = list(PARAMETER.finditer(body))
    if len(marks) > MOST_MARKS:
        raise Malformed(f"{name} has more than {MOST_MARKS // 2} parameters")
    arguments: dict[str, Any] = {}
    for mark, following in zip_longest(marks, marks[1:]):
        if mark.group() == "</parameter>":
            continue
        if following is None and not closed:
            raise Malformed(f"the last parameter of {name} is cut off")
        key, bracket, value = body[mark.end() : following.start() if following else len(body)].partition(">")
        if not bracket:
            raise Malformed(f"a <parameter= of {name} is not closed with '>'")
        arguments[key.strip()] = schemas.value(name, key.strip(), _unwrapped(value))
    return ParsedCall(name, arguments)


def _unwrapped(value: str) -> str:
    return value.removeprefix("\n").removesuffix("\n")


def _function(call: ParsedCall) -> str:
    arguments = call.arguments if isinstance(call.arguments, dict) else {}
    lines = [f"<parameter={key}>\n{as_text(value)}\n</parameter>" for key, value in arguments.items()]
    return "\n".join([f"{FUNCTION}{call.name}>", *lines, FUNCTION_END])
