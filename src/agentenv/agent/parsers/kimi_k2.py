"""Kimi K2: a section of calls, each with an id ``functions.NAME:INDEX`` that also names the tool.

Layout from the model's tool-call guide. As in vLLM, a call that is not closed, or whose id names no tool, is
skipped and the others run; unlike vLLM, the model is told.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from agentenv.agent.parsers.base import (
    Malformed,
    Parsed,
    ParsedCall,
    ToolCallParser,
    arguments_of,
    as_text,
    checked_name,
)
from agentenv.agent.protocols import ToolDefinition

SECTIONS = ("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>")
SECTION_END = "<|tool_calls_section_end|>"
CALL, ARGUMENTS, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
CALL_ID = re.compile(r"[^\s:]{1,256}:\d{1,9}\Z")


class KimiK2Parser(ToolCallParser):
    """Kimi-K2-Instruct and Kimi-K2-Thinking."""

    name = "kimi_k2"
    openers = SECTIONS
    closer = SECTION_END
    end_marks = ("<|im_end|>",)

    def read(self, answer: str, tools: Sequence[ToolDefinition]) -> Parsed:  # noqa: ARG002
        """Parse every closed call, and report the others. Raises: Malformed when none is closed."""
        begins = min((at for section in SECTIONS if (at := answer.find(section)) >= 0), default=-1)
        if begins < 0:
            return Parsed(answer)
        calls, problems = [], []
        for number, segment in enumerate(answer[begins:].split(CALL)[1:], 1):
            try:
                calls.append(_call(segment, f"tool call {number}"))
            except Malformed as problem:
                problems.append(str(problem))
        if not calls:
            raise Malformed("; ".join(problems[:3]) or f"{SECTIONS[0]} is followed by no call")
        return Parsed(answer[:begins].strip(), tuple(calls), problem="; ".join(problems[:3]))

    def written(self, calls: Sequence[ParsedCall]) -> str:
        """The whole section."""
        marks = (*SECTIONS, SECTION_END, CALL, CALL_END)
        parts = [
            f"{CALL}{call.call_id or f'functions.{call.name}:{n}'}{ARGUMENTS}{as_text(call.arguments, marks)}{CALL_END}"
            for n, call in enumerate(calls)
        ]
        return SECTIONS[0] + "".join(parts) + SECTION_END


def _call(segment: str, where: str) -> ParsedCall:
    text, ended, _ = segment.partition(CALL_END)
    if not ended:
        raise Malformed(f"{where} is not closed with {CALL_END}")
    call_id, mark, body = text.partition(ARGUMENTS)
    call_id = call_id.strip()
    if not mark or not CALL_ID.match(call_id):
        raise Malformed(f"{where} does not begin with functions.NAME:INDEX{ARGUMENTS}")
    name = call_id.rpartition(":")[0].rpartition(".")[2]
    return ParsedCall(checked_name(name, where), arguments_of(body.strip()), call_id)
