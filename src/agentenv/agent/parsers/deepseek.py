"""DeepSeek: a section of calls between special tokens (bars are U+FF5C, underscores U+2581).

V3 and R1-0528 write ``function<sep>NAME`` and the arguments in a ``json`` fence, V3.1 ``NAME<sep>ARGS``. A section
has nothing but calls; its end may be missing. Layouts from the chat templates in vLLM's examples.
"""

from __future__ import annotations

from abc import abstractmethod
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

SECTION, SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
FENCE = "```"


class _DeepSeekParser(ToolCallParser):
    opener = SECTION
    inner_marks = (SECTION_END, CALL, CALL_END, SEPARATOR)
    end_marks = ("<｜end▁of▁sentence｜>",)

    def read(self, reading: Reading) -> None:
        """Read one section."""
        reading.take(SECTION)
        known = len(reading.calls)
        while reading.take(CALL):
            reading.calls.append(self._call(reading))
        if len(reading.calls) == known:
            raise Malformed(f"{SECTION} is followed by no call")
        reading.take(SECTION_END)

    def written(self, calls: Sequence[ParsedCall]) -> str:
        """The whole section."""
        return SECTION + self._joint().join(self._written(call) for call in calls) + SECTION_END

    @abstractmethod
    def _call(self, reading: Reading) -> ParsedCall:
        """Read what follows a call's opening mark, and its closing mark. Raises: Malformed."""

    @abstractmethod
    def _written(self, call: ParsedCall) -> str:
        """One call with its marks."""

    def _joint(self) -> str:
        return ""


class DeepSeekV3Parser(_DeepSeekParser):
    """DeepSeek-V3, -V3-0324 and R1-0528."""

    name = "deepseek_v3"

    def _call(self, reading: Reading) -> ParsedCall:
        layout = f"is not TYPE{SEPARATOR}NAME and a {FENCE}json block"
        checked_name(reading.until(SEPARATOR, layout), reading.where)  # the type: a word, never another call
        name = checked_name(reading.until(FENCE + "json", layout), reading.where)
        arguments = object_or_text(reading.json(strict=False))
        reading.take(FENCE)
        reading.close(CALL_END)
        return ParsedCall(name, arguments)

    def _written(self, call: ParsedCall) -> str:
        return f"{CALL}function{SEPARATOR}{call.name}\n{FENCE}json\n{as_text(call.arguments)}\n{FENCE}{CALL_END}"

    def _joint(self) -> str:
        return "\n"


class DeepSeekV31Parser(_DeepSeekParser):
    """DeepSeek-V3.1 (tool calls without thinking)."""

    name = "deepseek_v3_1"

    def _call(self, reading: Reading) -> ParsedCall:
        head = reading.until(SEPARATOR, f"has no {SEPARATOR} between name and arguments")
        name = checked_name(head, reading.where)
        arguments = object_or_text(reading.json(strict=False))
        reading.close(CALL_END)
        return ParsedCall(name, arguments)

    def _written(self, call: ParsedCall) -> str:
        return f"{CALL}{call.name}{SEPARATOR}{as_text(call.arguments)}{CALL_END}"
