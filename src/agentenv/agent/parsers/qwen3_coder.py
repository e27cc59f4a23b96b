"""Qwen3-Coder and Qwen 3.5: ``<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>``.

Not XML: nothing is escaped, and exactly one newline on each side of a value is layout, and one behind its closing mark
(calls without any newlines are read, too). So only its place distinguishes a closing mark from text: ``</parameter>``
closes a value where ``<parameter=`` or ``</function>`` comes next. What does not fit is refused, unlike in vLLM, which
ends a value at the first mark: half of an ``rm`` command must not run.
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
    as_text,
    checked_name,
)

CALL, CALL_END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
KEY = re.compile(r"([^<>\n]{1,256})>")
VALUE_END = re.compile(rf"{PARAMETER_END}\n?(?={PARAMETER}|{FUNCTION_END})")


class Qwen3CoderParser(ToolCallParser):
    """Qwen3-Coder, Qwen 3.5. The outer tags may be missing."""

    name = "qwen3_coder"
    opener = f"{CALL}|{FUNCTION}"
    inner_marks = (CALL_END, PARAMETER)
    tail_marks = (PARAMETER_END, FUNCTION_END)
    quoted = False
    end_marks = ("<|im_end|>", "<|endoftext|>")

    def read(self, reading: Reading) -> None:
        """Read one block."""
        tagged = reading.take(CALL)
        if not reading.take(FUNCTION):
            raise Malformed(f"a {CALL} block has no <function=NAME> in it")
        call = _call(reading)
        if tagged:
            reading.close(CALL_END, or_end=True)
        elif not reading.take(CALL_END):
            reading.open_ended = True
        reading.calls.append(call)

    def written(self, calls: Sequence[ParsedCall]) -> str:
        """One block a call, every part on lines of its own."""
        return "\n".join(f"{CALL}\n{_function(call)}\n{CALL_END}" for call in calls)


def _call(reading: Reading) -> ParsedCall:
    name = checked_name(reading.until(">", f"has a {FUNCTION} that is not closed with '>'"), reading.where)
    arguments: dict[str, Any] = {}
    while reading.take(PARAMETER):
        found = reading.match(KEY)
        if found is None:
            raise Malformed(f"{reading.where} has a {PARAMETER} that is not followed by KEY>")
        key = found[1].strip()
        problem = f"has no {PARAMETER_END} and then {PARAMETER} or {FUNCTION_END} behind the value of {key!r}"
        value = _unwrapped(reading.value(VALUE_END, PARAMETER, problem), f"{reading.where}, the value of {key!r}")
        if key in arguments:
            raise Malformed(f"{reading.where} has the parameter {key!r} twice")
        arguments[key] = reading.schemas.value(name, key, value)
    reading.close(FUNCTION_END)
    return ParsedCall(name, arguments)


def _unwrapped(value: str, where: str) -> str:
    """The value without the newlines of the layout. Raises: Malformed where one of the two is missing."""
    if value.startswith("\n") and value.endswith("\n") and len(value) > 1:
        return value[1:-1]
    if value.startswith("\n") or value.endswith("\n"):
        raise Malformed(f"{where}, needs one line break behind {PARAMETER}KEY> and one before {PARAMETER_END}")
    return value


def _function(call: ParsedCall) -> str:
    arguments = call.arguments if isinstance(call.arguments, dict) else {}
    lines = [f"{PARAMETER}{key}>\n{as_text(value)}\n{PARAMETER_END}" for key, value in arguments.items()]
    return "\n".join([f"{FUNCTION}{call.name}>", *lines, FUNCTION_END])
