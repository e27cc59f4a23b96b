"""DeepSeek: a section of calls between special tokens (bars are U+FF5C, underscores U+2581).

V3 and R1-0528 write ``function<sep>NAME`` and the arguments in a ``json`` fence, V3.1 ``NAME<sep>ARGS``. Arguments
are passed on unchanged. As in vLLM, a call that is not closed is skipped and the others run; unlike vLLM, the model
is told. Layouts from the chat templates in vLLM's examples.
"""

from __future__ import annotations

from abc import abstractmethod
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

SECTION, SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
MARKS = (SECTION, SECTION_END, CALL, CALL_END)
FENCE = "```"


class _DeepSeekParser(ToolCallParser):
    openers = (SECTION,)
    closer = SECTION_END
    end_marks = ("<｜end▁of▁sentence｜>",)

    def read(self, answer: str, tools: Sequence[ToolDefinition]) -> Parsed:  # noqa: ARG002
        """Parse every closed call, and report the others. Raises: Malformed when none is closed."""
        before, mark, section = answer.partition(SECTION)
        if not mark:
            return Parsed(answer)
        calls, problems = [], []
        for number, segment in enumerate(section.split(CALL)[1:], 1):
            text, ended, _ = segment.partition(CALL_END)
            try:
                if not ended:
                    raise Malformed(f"tool call {number} is not closed with {CALL_END}")
                calls.append(self._call(text, f"tool call {number}"))
            except Malformed as problem:
                problems.append(str(problem))
        if not calls:
            raise Malformed("; ".join(problems[:3]) or f"{SECTION} is followed by no call")
        return Parsed(before.strip(), tuple(calls), problem="; ".join(problems[:3]))

    def written(self, calls: Sequence[ParsedCall]) -> str:
        """The whole section."""
        return SECTION + self._joint().join(self._written(call) for call in calls) + SECTION_END

    @abstractmethod
    def _call(self, text: str, where: str) -> ParsedCall:
        """Parse the text between a call's two marks. Raises: Malformed."""

    @abstractmethod
    def _written(self, call: ParsedCall) -> str:
        """One call with its marks."""

    def _joint(self) -> str:
        return ""


class DeepSeekV3Parser(_DeepSeekParser):
    """DeepSeek-V3, -V3-0324 and R1-0528."""

    name = "deepseek_v3"

    def _call(self, text: str, where: str) -> ParsedCall:
        _, separator, rest = text.partition(SEPARATOR)
        head, fence, body = rest.partition(FENCE + "json")
        if not separator or not fence:
            raise Malformed(f"{where} is not TYPE{SEPARATOR}NAME and a {FENCE}json block")
        body = body.strip()
        return ParsedCall(checked_name(head, where), arguments_of(body.removesuffix(FENCE).strip()))

    def _written(self, call: ParsedCall) -> str:
        return f"{CALL}function{SEPARATOR}{call.name}\n{FENCE}json\n{as_text(call.arguments, MARKS)}\n{FENCE}{CALL_END}"

    def _joint(self) -> str:
        return "\n"


class DeepSeekV31Parser(_DeepSeekParser):
    """DeepSeek-V3.1 (tool calls without thinking)."""

    name = "deepseek_v3_1"

    def _call(self, text: str, where: str) -> ParsedCall:
        head, separator, body = text.partition(SEPARATOR)
        if not separator:
            raise Malformed(f"{where} has no {SEPARATOR} between its name and its arguments")
        return ParsedCall(checked_name(head, where), arguments_of(body.strip()))

    def _written(self, call: ParsedCall) -> str:
        return f"{CALL}{call.name}{SEPARATOR}{as_text(call.arguments, MARKS)}{CALL_END}"
