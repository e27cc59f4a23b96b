"""Common parts of tool-call parsers: result, splitting off reasoning, strict JSON. Pure.

A parser reads one assistant message as a model of its family writes it. A parser never raises, and its time is
linear in the text: scans only go forward, and no pattern can backtrack.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from agentenv.agent.protocols import ToolDefinition

Marks = tuple[tuple[str, str], ...]
"""Pairs of opening and closing marks."""

THINK: Marks = (("<think>", "</think>"),)

NAME = re.compile(r"[^\s<>{}\[\]\"'`]{1,256}\Z")
"""Valid tool names; anything else means that the format was misread."""


class Malformed(ValueError):
    """Not a call in this family's format. The text describes the problem for the model."""


@dataclass(frozen=True)
class ParsedCall:
    """One tool call. ``arguments`` is an object, or the text found in its place, for which the tool session returns
    an error. ``call_id`` is the model's own id, if it wrote one."""

    name: str
    arguments: dict[str, Any] | str
    call_id: str | None = None


@dataclass(frozen=True)
class Parsed:
    """The parts of a message. ``content`` is the text before the first call, without reasoning; the whole text when
    there is no call.

    ``problem`` describes what could not be parsed as a call, for the model to correct; calls returned with it were
    well formed and are to be run. ``open_ended``: the markup of the last call, or of the reasoning, was never
    closed, so the call must not be trusted if the generation was cut.
    """

    content: str
    calls: tuple[ParsedCall, ...] = ()
    reasoning: str = ""
    problem: str = ""
    open_ended: bool = False


class ToolCallParser(ABC):
    """One family's format: how calls are parsed, and how they are written in prompts."""

    name: ClassVar[str]
    openers: ClassVar[tuple[str, ...]]
    """Marks that open a call, or a section of calls."""
    closer: ClassVar[str | None]
    """Mark that closes it; None if there is none."""
    reasoning_marks: ClassVar[Marks] = THINK
    end_marks: ClassVar[tuple[str, ...]] = ()
    """End-of-turn marks of such models; removed from the end of a text before it is parsed."""

    def parse(self, text: str, tools: Sequence[ToolDefinition] = (), *, reasoning_open: bool = False) -> Parsed:
        """Parse one message. Never raises. ``tools`` give types to untyped values; ``reasoning_open``: the prompt
        ended inside a reasoning block."""
        thought, answer, open_ended = self.split_reasoning(without_end(text, self.end_marks), reasoning_open)
        try:
            parsed = self.read(answer, tools)
        except Malformed as problem:
            parsed = Parsed(answer, problem=str(problem))
        return replace(parsed, reasoning=thought.strip(), open_ended=parsed.open_ended or open_ended)

    @abstractmethod
    def read(self, answer: str, tools: Sequence[ToolDefinition]) -> Parsed:
        """Parse a message without reasoning. Raises: Malformed when none of it may be run."""

    @abstractmethod
    def written(self, calls: Sequence[ParsedCall]) -> str:
        """The calls as a model of this family writes them."""

    def example(self) -> str:
        """An example call, for messages to the model."""
        return self.written([ParsedCall("TOOL_NAME", {"ARGUMENT": "VALUE"})])

    def call_id(self, step: int, number: int) -> str:
        """Id for a call without one; deterministic by its place in the conversation."""
        return f"call_{step}_{number}"

    def split_reasoning(self, text: str, opened: bool) -> tuple[str, str, bool]:
        """Return (reasoning, the rest, whether reasoning was left open)."""
        return split_reasoning(text, self.reasoning_marks, self.openers, self.closer, opened)


def without_end(text: str, marks: Sequence[str]) -> str:
    """``text`` without end-of-turn marks at its end."""
    ends = len(text)
    while found := next((mark for mark in marks if mark and text.endswith(mark, 0, ends)), None):
        ends -= len(found)
    return text[:ends]


class _Splitter:
    """Cuts a text at reasoning marks. Marks inside a call are part of its arguments."""

    def __init__(self, text: str, opened: bool) -> None:
        self.text = text
        self.state: Literal["answer", "reasoning", "call"] = "reasoning" if opened else "answer"
        self.closing = ""
        self.at = 0
        self.thought: list[str] = []
        self.answer: list[str] = []

    def meet(self, found: re.Match[str], marks: dict[str, str], openers: Sequence[str], closer: str | None) -> None:
        mark = found.group()
        if self.state == "call":
            self.state = "answer" if mark == closer else "call"
        elif self.state == "reasoning":
            if mark == self.closing or (not self.closing and mark in marks.values()):
                self._cut(self.thought, found)
                self.state = "answer"
        elif mark in marks:
            self._cut(self.answer, found)
            self.state, self.closing = "reasoning", marks[mark]
        elif mark in marks.values():  # the prompt opened it: everything so far was reasoning
            self._cut(self.answer, found)
            self.thought.extend(self.answer)
            self.answer.clear()
        elif mark in openers:
            self.state = "call"

    def _cut(self, into: list[str], found: re.Match[str]) -> None:
        into.append(self.text[self.at : found.start()])
        self.at = found.end()


def split_reasoning(
    text: str, marks: Marks, openers: Sequence[str], closer: str | None, opened: bool
) -> tuple[str, str, bool]:
    """Return (reasoning, the rest, whether reasoning was left open). Linear.

    A block that is never closed ends where a call begins.
    """
    pairs = dict(marks)
    words = {*pairs, *pairs.values(), *openers, *([closer] if closer else [])}
    splitter = _Splitter(text, opened)
    for found in re.finditer("|".join(map(re.escape, sorted(words, key=len, reverse=True))), text):
        splitter.meet(found, pairs, openers, closer)
    rest = text[splitter.at :]
    if splitter.state != "reasoning":
        return "\n".join(splitter.thought), "".join([*splitter.answer, rest]), False
    begins = min((at for opener in openers if (at := rest.find(opener)) >= 0), default=len(rest))
    return "\n".join([*splitter.thought, rest[:begins]]), "".join([*splitter.answer, rest[begins:]]), True


def blocks(text: str, opener: str, closer: str) -> list[tuple[str, bool]]:
    """The text between each opener and the next closer, and whether there was one: a last block without a closer
    extends to the end."""
    found, at = [], text.find(opener)
    while at >= 0:
        begins = at + len(opener)
        ends = text.find(closer, begins)
        if ends < 0:
            found.append((text[begins:], False))
            break
        found.append((text[begins:ends], True))
        at = text.find(opener, ends + len(closer))
    return found


def checked_name(name: Any, where: str) -> str:
    """``name`` without surrounding space. Raises: Malformed when it cannot be a tool's name."""
    if not isinstance(name, str) or not NAME.match(name.strip()):
        raise Malformed(f"{where} has no readable tool name")
    return name.strip()


def decoded(text: str, where: str) -> Any:
    """The JSON value. Raises: Malformed with the problem and its position."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        what = error.msg.removesuffix(" at")  # "Unterminated string starting at"
        raise Malformed(f"{where} is not valid JSON: {what} at character {error.pos}") from error
    except (ValueError, RecursionError) as error:
        raise Malformed(f"{where} is not usable JSON: nested too deeply, or a number too long") from error


def arguments_of(text: str) -> dict[str, Any] | str:
    """Arguments as an object if they are one, else the text itself."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def object_or_text(value: Any) -> dict[str, Any] | str:
    """A decoded value as arguments: an object, or its JSON text."""
    return value if isinstance(value, dict) else as_json(value)


def as_json(value: Any, marks: Iterable[str] = ()) -> str:
    """One line of JSON; lone surrogates stay escaped, so that it can be encoded. ``marks``, which can only occur
    inside strings, are escaped, so that an argument containing one does not end its call."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        text = json.dumps(value)
    for mark in marks:
        text = text.replace(mark, f"\\u{ord(mark[0]):04x}{mark[1:]}")
    return text


def as_text(value: Any, marks: Iterable[str] = ()) -> str:
    """An argument's value in formats where strings are unquoted; ``marks`` as in :func:`as_json`."""
    return value if isinstance(value, str) else as_json(value, marks)
