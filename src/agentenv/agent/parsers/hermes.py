"""Hermes and Qwen: a JSON object in tags, ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``.

Layout from the chat templates of Hermes 2 Pro, Qwen 2.5 and Qwen 3. As in vLLM's hermes parser, a last block that is
never closed counts when its JSON is complete. The JSON is read first and the closing tag expected behind it, so
that a tag inside a string is text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from agentenv.agent.parsers.base import (
    THINK,
    Malformed,
    Marks,
    ParsedCall,
    Reading,
    ToolCallParser,
    as_json,
    checked_fields,
    checked_name,
    object_or_text,
)


class TaggedJsonParser(ToolCallParser):
    """JSON objects between a pair of tags."""

    closer: ClassVar[str]
    between: ClassVar[str] = "\n"
    """Text between two calls."""

    def read(self, reading: Reading) -> None:
        """Read one block."""
        reading.take(self.opener)
        where, value = reading.where, reading.json()
        if not isinstance(value, dict):
            raise Malformed(f"{where} is not a JSON object")
        name = checked_name(value.get("name"), where)
        checked_fields(value, where, "arguments")
        reading.close(self.closer, or_end=True)
        reading.calls.append(ParsedCall(name, object_or_text(value.get("arguments", {}))))

    def written(self, calls: Sequence[ParsedCall]) -> str:
        """One block per call."""
        objects = [as_json({"name": call.name, "arguments": call.arguments}) for call in calls]
        return self.between.join(f"{self.opener}\n{text}\n{self.closer}" for text in objects)


class HermesParser(TaggedJsonParser):
    """Hermes 2 Pro and 3. Hermes 3 may reason in ``<scratch_pad>``."""

    name = "hermes"
    opener = "<tool_call>"
    closer = "</tool_call>"
    inner_marks = (closer,)
    reasoning_marks: ClassVar[Marks] = (*THINK, ("<scratch_pad>", "</scratch_pad>"))
    end_marks = ("<|im_end|>", "<|eot_id|>")


class QwenParser(HermesParser):
    """Qwen 2.5 and Qwen 3: the same format."""

    name = "qwen"
    reasoning_marks = THINK
    end_marks = ("<|im_end|>", "<|endoftext|>")
