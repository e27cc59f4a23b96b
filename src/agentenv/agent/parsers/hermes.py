"""Hermes and Qwen: a JSON object in tags, ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``.

Layout from the chat templates of Hermes 2 Pro, Qwen 2.5 and Qwen 3; read as vLLM's hermes parser does:
a last block that is never closed counts when its JSON is complete, and one bad block drops them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from agentenv.agent.parsers.base import (
    THINK,
    Malformed,
    Marks,
    Parsed,
    ParsedCall,
    ToolCallParser,
    as_json,
    blocks,
    checked_name,
    decoded,
    object_or_text,
)
from agentenv.agent.protocols import ToolDefinition


class TaggedJsonParser(ToolCallParser):
    """JSON objects between a pair of tags."""

    opener: ClassVar[str]
    closer: ClassVar[str]
    between: ClassVar[str] = "\n"
    """Text between two calls."""

    def read(self, answer: str, tools: Sequence[ToolDefinition]) -> Parsed:  # noqa: ARG002
        """Parse all calls. Raises: Malformed; a message is run completely or not at all."""
        found = blocks(answer, self.opener, self.closer)
        if not found:
            return Parsed(answer)
        calls = tuple(self._call(text, f"tool call {n}") for n, (text, _) in enumerate(found, 1))
        return Parsed(answer[: answer.find(self.opener)].strip(), calls, open_ended=not found[-1][1])

    def _call(self, text: str, where: str) -> ParsedCall:
        value = decoded(text.strip(), where)
        if not isinstance(value, dict):
            raise Malformed(f"{where} is not a JSON object")
        return ParsedCall(checked_name(value.get("name"), where), object_or_text(self._arguments(value, where)))

    def _arguments(self, value: dict[str, Any], where: str) -> Any:
        if "arguments" not in value and "parameters" in value:
            raise Malformed(f'{where} must name its arguments "arguments", not "parameters"')
        return value.get("arguments", {})

    def written(self, calls: Sequence[ParsedCall]) -> str:
        """One block per call."""
        marks = (self.opener, self.closer)
        objects = [as_json({"name": call.name, "arguments": call.arguments}, marks) for call in calls]
        return self.between.join(f"{self.opener}\n{text}\n{self.closer}" for text in objects)


class HermesParser(TaggedJsonParser):
    """Hermes 2 Pro and 3. Hermes 3 may reason in ``<scratch_pad>``."""

    name = "hermes"
    opener = "<tool_call>"
    closer = "</tool_call>"
    openers = (opener,)
    reasoning_marks: ClassVar[Marks] = (*THINK, ("<scratch_pad>", "</scratch_pad>"))
    end_marks = ("<|im_end|>", "<|eot_id|>")


class QwenParser(HermesParser):
    """Qwen 2.5 and Qwen 3: the same format."""

    name = "qwen"
    reasoning_marks = THINK
    end_marks = ("<|im_end|>", "<|endoftext|>")
