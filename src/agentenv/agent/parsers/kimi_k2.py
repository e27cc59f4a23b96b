"""Kimi K2: a section of calls, each with an id ``functions.NAME:INDEX`` that also names the tool.

Layout from the model's tool-call guide. A section has nothing but calls; its end may be missing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from agentenv.agent.parsers.base import (
    Malformed,
    ParsedCall,
    Reading,
    ToolCallParser,
    as_text,
    checked_name,
    object_or_text,
)

SECTIONS = ("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>")
SECTION_ENDS = ("<|tool_calls_section_end|>", "<|tool_call_section_end|>")
CALL, ARGUMENTS, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
CALL_ID = re.compile(r"[^\s:<>]{1,256}:\d{1,9}\Z")


class KimiK2Parser(ToolCallParser):
    """Kimi-K2-Instruct and Kimi-K2-Thinking."""

    name = "kimi_k2"
    opener = "|".join(map(re.escape, SECTIONS))
    inner_marks = (*SECTION_ENDS, CALL, ARGUMENTS, CALL_END)
    end_marks = ("<|im_end|>",)

    def read(self, reading: Reading) -> None:
        """Read one section."""
        any(map(reading.take, SECTIONS))
        known = len(reading.calls)
        while reading.take(CALL):
            reading.calls.append(_call(reading))
        if len(reading.calls) == known:
            raise Malformed(f"{SECTIONS[0]} is followed by no call")
        any(map(reading.take, SECTION_ENDS))

    def written(self, calls: Sequence[ParsedCall]) -> str:
        """The whole section."""
        parts = [
            f"{CALL}{call.call_id or f'functions.{call.name}:{n}'}{ARGUMENTS}{as_text(call.arguments)}{CALL_END}"
            for n, call in enumerate(calls)
        ]
        return SECTIONS[0] + "".join(parts) + SECTION_ENDS[0]


def _call(reading: Reading) -> ParsedCall:
    layout = f"does not begin with functions.NAME:INDEX{ARGUMENTS}"
    call_id = reading.until(ARGUMENTS, layout).strip()
    if not CALL_ID.match(call_id):
        raise Malformed(f"{reading.where} {layout}")
    name = checked_name(call_id.rpartition(":")[0].rpartition(".")[2], reading.where)
    arguments = object_or_text(reading.json(strict=False))
    reading.close(CALL_END)
    return ParsedCall(name, arguments, call_id)
