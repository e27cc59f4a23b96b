"""LongCat-Flash: as hermes, in its own tags; several calls follow one another directly."""

from __future__ import annotations

from typing import ClassVar

from agentenv.agent.parsers.base import THINK, Marks
from agentenv.agent.parsers.hermes import TaggedJsonParser


class LongcatParser(TaggedJsonParser):
    """LongCat-Flash-Chat and -Thinking, which reasons in ``<longcat_think>``."""

    name = "longcat"
    opener = "<longcat_tool_call>"
    closer = "</longcat_tool_call>"
    between = ""
    inner_marks = (closer,)
    reasoning_marks: ClassVar[Marks] = (*THINK, ("<longcat_think>", "</longcat_think>"))
    end_marks = ("</longcat_s>",)
