"""GLM 4.5 and later: ``<tool_call>NAME<arg_key>K</arg_key><arg_value>V</arg_value>…</tool_call>``.

4.5 and 4.6 put newlines between the parts, 4.7 does not; both parsers read both, as vLLM does from 0.33 on, and
differ in how they write. Strings are unquoted and are in their marks exactly as they are, other values are JSON; the
tool's schema decides which. Only its place distinguishes a closing mark from text: ``</arg_value>`` closes a value
where ``<arg_key>`` or ``</tool_call>`` comes next.
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
KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
NAME_END = re.compile(f"(?={KEY}|{CALL_END})")
BEFORE_VALUE = re.compile(rf"{KEY}([^<\n]{{1,256}}){KEY_END}(?:\n|\\n)?{VALUE}")
"""Some models write a backslash and an n for the line break."""
BEHIND_VALUE = re.compile(rf"{VALUE_END}\n?(?={KEY}|{CALL_END})")


class Glm47Parser(ToolCallParser):
    """GLM 4.7 and later."""

    name = "glm47"
    opener = CALL
    inner_marks = (CALL_END, KEY, KEY_END, VALUE, VALUE_END)
    quoted = False
    end_marks = ("<|observation|>", "<|user|>", "<|endoftext|>")
    _joint = ""

    def read(self, reading: Reading) -> None:
        """Read one block."""
        reading.take(CALL)
        name = checked_name(reading.value(NAME_END, VALUE, f"is not closed with {CALL_END}"), reading.where)
        arguments: dict[str, Any] = {}
        while found := reading.match(BEFORE_VALUE):
            key = found[1].strip()
            problem = f"has no {VALUE_END} and then {KEY} or {CALL_END} behind the value of {key!r}"
            text = reading.value(BEHIND_VALUE, VALUE, problem)
            if key in arguments:
                raise Malformed(f"{reading.where} has the key {key!r} twice")
            arguments[key] = reading.schemas.value(name, key, text, unknown_is_json=True)
        if not reading.take(CALL_END):
            raise Malformed(f"{reading.where} is not a row of {KEY}…{KEY_END}{VALUE}…{VALUE_END}")
        reading.calls.append(ParsedCall(name, arguments))

    def written(self, calls: Sequence[ParsedCall]) -> str:
        """One block per call; 4.7 puts nothing between them, as within them."""
        return self._joint.join(self._block(call) for call in calls)

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
