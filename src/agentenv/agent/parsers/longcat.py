"""LongCat-Flash: as hermes, in tags of its own; several calls stand directly after one another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from agentenv.agent.parsers.base import THINK, Marks, ParsedCall, as_json
from agentenv.agent.parsers.hermes import TaggedJsonParser


class LongcatParser(TaggedJsonParser):
    """LongCat-Flash-Chat and -Thinking, which reasons in ``<longcat_think>``."""

    name = "longcat"
    opener = "<longcat_tool_call>"
    closer = "</longcat_tool_call>"
    openers = (opener,)
    reasoning_marks: ClassVar[Marks] = (*THINK, ("<longcat_think>", "</longcat_think>"))
    end_marks = ("</longcat_s>",)

    def written(self, calls: Sequence[ParsedCall]) -> str:
        """The blocks, nothing between them."""
        marks = (self.opener, self.closer)
        objects = [as_json({"name": call.name, "arguments": call.arguments}, marks) for call in calls]
        return "".join(f"{self.opener}\n{text}\n{self.closer}" for text in objects)
