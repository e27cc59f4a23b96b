"""Common parts of tool-call parsers: what a message contains, and the place in it up to which it is read. Pure.

A parser reads one assistant message as a model of its family writes it. What the model wrote as a call is returned
exactly, or the message is Malformed and nothing of it runs: no value is guessed, cut or changed. A parser never
raises, and its time is linear in the text: it only moves forward, and stops at the first thing it cannot read.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from agentenv.agent.parsers.typed import Schemas
from agentenv.agent.protocols import ToolDefinition
from agentenv.tools.json_text import read_json_at

Marks = tuple[tuple[str, str], ...]
"""Pairs of opening and closing marks."""

THINK: Marks = (("<think>", "</think>"),)

NAME = re.compile(r"[^\s<>{}\[\]\"'`]{1,256}\Z")
"""Valid tool names; anything else means that the format was misread."""
SPACE = re.compile(r"\s*")


class Malformed(ValueError):
    """Not a call in this family's format. The text describes the problem for the model."""


@dataclass(frozen=True)
class ParsedCall:
    """One tool call. ``arguments`` is an object, or the JSON text found in its place, for which the tool session
    returns an error. ``call_id`` is the model's own id, if it wrote one."""

    name: str
    arguments: dict[str, Any] | str
    call_id: str | None = None


@dataclass(frozen=True)
class Parsed:
    """The parts of a message. ``content`` is the text outside calls and reasoning: the pieces between calls without
    surrounding space, one a line. Without calls it is the whole text but its reasoning, unchanged.

    ``problem`` describes what could not be parsed as a call, for the model to correct; there are no ``calls`` then.
    ``open_ended``: the last call, or the reasoning, was not closed, or something follows that may belong to the last
    call; so the calls must not be trusted if the generation was cut.
    """

    content: str
    calls: tuple[ParsedCall, ...] = ()
    reasoning: str = ""
    problem: str = ""
    open_ended: bool = False


class Reading:
    """One message while it is read: ``at`` is how far, ``calls`` what was found before. Moves only forward."""

    def __init__(self, text: str, tools: Sequence[ToolDefinition]) -> None:
        self.text = text
        self.schemas = Schemas(tools)
        self.at = 0
        self.calls: list[ParsedCall] = []
        self.open_ended = False

    @property
    def where(self) -> str:
        """Name of the call that is being read, for messages."""
        return f"tool call {len(self.calls) + 1}"

    def take(self, mark: str) -> bool:
        """Move past ``mark``, and space before it, if that is what comes next."""
        found = self.space()
        if not self.text.startswith(mark, found):
            return False
        self.at = found + len(mark)
        return True

    def space(self) -> int:
        """Where the space that comes next ends."""
        found = SPACE.match(self.text, self.at)
        return found.end() if found else self.at

    def match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Move past ``pattern``, if it is what comes next."""
        found = pattern.match(self.text, self.at)
        if found:
            self.at = found.end()
        return found

    def until(self, mark: str, problem: str) -> str:
        """The text before the next ``mark``; moves past it. Raises: Malformed (``problem``) when there is none."""
        ends = self.text.find(mark, self.at)
        if ends < 0:
            raise Malformed(f"{self.where} {problem}")
        found, self.at = self.text[self.at : ends], ends + len(mark)
        return found

    def value(self, closing: re.Pattern[str], opener: str, problem: str) -> str:
        """The unquoted text up to ``closing``; moves past it. Raises: Malformed (``problem``) when there is none, or
        when ``opener`` is in the text: then one value may have been left open, and another begun."""
        found = closing.search(self.text, self.at)
        if found is None:
            raise Malformed(f"{self.where} {problem}")
        text, self.at = self.text[self.at : found.start()], found.end()
        if opener in text:
            what = f"has {opener} inside a value, as if one was not closed; write such text in pieces, if it is meant"
            raise Malformed(f"{self.where} {what}")
        return text

    def json(self, *, strict: bool = True) -> Any:
        """The JSON value that comes next. Raises: Malformed with the problem and its position in the value."""
        begins = self.space()
        try:
            value, self.at = read_json_at(self.text, begins, strict=strict)
        except json.JSONDecodeError as error:
            what = error.msg.removesuffix(" at")  # "Unterminated string starting at"
            problem = f"{what} at character {error.pos - begins}"
            raise Malformed(f"{self.where} is not valid JSON: {problem}") from error
        except ValueError as error:
            raise Malformed(f"{self.where} is not usable JSON: {error}") from error
        return value

    def close(self, mark: str, *, or_end: bool = False) -> None:
        """Move past the mark that closes a call. ``or_end``: the text may end before it, which is noted. Raises:
        Malformed when something else comes next."""
        if self.take(mark):
            return
        if not or_end or self.space() < len(self.text):
            raise Malformed(f"{self.where} is not closed with {mark}")
        self.open_ended = True


class ToolCallParser(ABC):
    """One family's format: how calls are parsed, and how they are written in prompts."""

    name: ClassVar[str]
    opener: ClassVar[str]
    """Pattern of what opens a call, or a section of calls."""
    inner_marks: ClassVar[tuple[str, ...]] = ()
    """Marks that occur only inside calls. One outside means that a call has no beginning, or ended early."""
    tail_marks: ClassVar[tuple[str, ...]] = ()
    """Marks that are text elsewhere, but behind a call mean that it ended early."""
    quoted: ClassVar[bool] = True
    """Whether values are quoted, so that a part of a call never reads as a whole one."""
    reasoning_marks: ClassVar[Marks] = THINK
    end_marks: ClassVar[tuple[str, ...]] = ()
    """End-of-turn marks of such models; removed from the end of a text before it is parsed."""

    def parse(self, text: str, tools: Sequence[ToolDefinition] = (), *, reasoning_open: bool = False) -> Parsed:
        """Parse one message. Never raises. ``tools`` give types to untyped values; ``reasoning_open``: the prompt
        ended inside a reasoning block."""
        return _Message(self, Reading(without_end(text, self.end_marks), tools)).parsed(reasoning_open)

    @abstractmethod
    def read(self, reading: Reading) -> None:
        """Read the calls that the opener at ``reading.at`` opens, and move past them. Raises: Malformed."""

    @abstractmethod
    def written(self, calls: Sequence[ParsedCall]) -> str:
        """The calls as a model of this family writes them."""

    def example(self) -> str:
        """An example call, for messages to the model."""
        return self.written([ParsedCall("TOOL_NAME", {"ARGUMENT": "VALUE"})])

    def call_id(self, step: int, number: int) -> str:
        """Id for a call without one; deterministic by its place in the conversation."""
        return f"call_{step}_{number}"


def without_end(text: str, marks: Sequence[str]) -> str:
    """``text`` without end-of-turn marks at its end."""
    ends = len(text)
    while found := next((mark for mark in marks if mark and text.endswith(mark, 0, ends)), None):
        ends -= len(found)
    return text[:ends]


class _Message:
    """Divides a message into reasoning, calls and other text. Marks inside a call belong to its arguments."""

    def __init__(self, parser: ToolCallParser, reading: Reading) -> None:
        self._parser, self._reading = parser, reading
        self._pairs = dict(parser.reasoning_marks)
        self._closings = tuple(self._pairs.values())
        self._marks = re.compile("|".join([*map(re.escape, (*self._pairs, *self._closings)), parser.opener]))
        self._thoughts: list[str] = []
        self._answer: list[str] = []  # everything else, the calls included
        self._texts: list[list[str]] = [[]]  # the text before, between and behind the calls
        self._consumed = 0  # up to where the text is in one of these
        self._unclosed: set[tuple[str, ...]] = set()

    def parsed(self, reasoning_open: bool) -> Parsed:
        reading = self._reading
        try:
            self._divide(reasoning_open)
            texts = ["".join(pieces) for pieces in self._texts]
            for number, text in enumerate(texts):
                self._check(text, behind=number > 0)
        except Malformed as problem:
            content = "".join([*self._answer, reading.text[self._consumed :]])
            return Parsed(content, (), self._reasoning(), str(problem), reading.open_ended)
        if not reading.calls:
            return Parsed(texts[0], (), self._reasoning(), open_ended=reading.open_ended)
        content = "\n".join(filter(None, map(str.strip, texts)))
        goes_on = not self._parser.quoted and bool(texts[-1].strip())
        return Parsed(content, tuple(reading.calls), self._reasoning(), open_ended=reading.open_ended or goes_on)

    def _divide(self, reasoning_open: bool) -> None:
        reading = self._reading
        if reasoning_open:
            self._think(self._closings)
        while found := self._marks.search(reading.text, reading.at):
            mark = found.group()
            if mark not in self._pairs and mark not in self._closings:
                self._read_calls(found.start())
                continue
            if mark in self._closings and reading.calls:
                raise Malformed(f"{mark} closes reasoning behind a tool call, so the call may be only a thought")
            self._keep(found.start())
            reading.at = found.end()
            if mark in self._pairs:
                self._think((self._pairs[mark],))
            else:  # the prompt opened it: everything so far was reasoning
                self._thoughts += self._answer
                self._answer, self._texts, self._consumed = [], [[]], reading.at
        self._keep(len(reading.text))

    def _read_calls(self, begins: int) -> None:
        """Read what an opener opens; it stays text where the family's parser finds no call in it."""
        reading = self._reading
        known, reading.at = len(reading.calls), begins
        self._parser.read(reading)
        if len(reading.calls) > known:
            self._keep(begins)
            self._answer.append(reading.text[begins : reading.at])
            self._texts.append([])
            self._consumed = reading.at

    def _think(self, closings: tuple[str, ...]) -> None:
        """Move past reasoning. A block that is never closed ends where a call begins."""
        reading, begins = self._reading, self._reading.at
        found = None
        if closings not in self._unclosed:  # searched for once, so that the time stays linear
            found = re.compile("|".join(map(re.escape, closings))).search(reading.text, begins)
        if found is None:
            self._unclosed.add(closings)
            reading.open_ended = True
            opener = re.compile(self._parser.opener).search(reading.text, begins)
            ends = reading.at = opener.start() if opener else len(reading.text)
        else:
            ends, reading.at = found.span()
        if reading.calls:  # what seems to be reasoning may be the rest of a value
            self._check(reading.text[begins:ends], behind=True)
        self._thoughts.append(reading.text[begins:ends])
        self._consumed = reading.at

    def _keep(self, ends: int) -> None:
        piece = self._reading.text[self._consumed : ends]
        self._answer.append(piece)
        self._texts[-1].append(piece)
        self._consumed = ends

    def _reasoning(self) -> str:
        return "\n".join(self._thoughts).strip()

    def _check(self, text: str, *, behind: bool) -> None:
        """Raises: Malformed when a mark of calls occurs in ``text``, which is outside calls, or ``behind`` one."""
        marks = (*self._parser.inner_marks, *self._parser.tail_marks) if behind else self._parser.inner_marks
        if found := next((mark for mark in marks if mark in text), None):
            where = "behind a tool call, which may have ended too early" if behind else "outside a tool call"
            raise Malformed(f"{found} appears {where}")


def checked_name(name: Any, where: str) -> str:
    """``name`` without surrounding space. Raises: Malformed when it cannot be a tool's name."""
    if not isinstance(name, str) or not NAME.match(name.strip()):
        raise Malformed(f"{where} has no readable tool name")
    return name.strip()


def checked_fields(call: Mapping[str, Any], where: str, arguments: str) -> None:
    """Raises: Malformed when a call has an unknown field, such as arguments under another name than
    ``arguments``: it would run without them."""
    known = ("name", arguments, "id", "type")
    if other := next((field for field in call if field not in known), None):
        raise Malformed(f'{where} has the field {as_json(other[:80])}; put all arguments into "{arguments}"')


def object_or_text(value: Any) -> dict[str, Any] | str:
    """A decoded value as arguments: an object, or its JSON text."""
    return value if isinstance(value, dict) else as_json(value)


def as_json(value: Any) -> str:
    """One line of JSON; lone surrogates stay escaped, so that it can be encoded."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value)
    return text


def as_text(value: Any) -> str:
    """An argument's value in formats where strings are unquoted."""
    return value if isinstance(value, str) else as_json(value)
