"""Mistral: ``[TOOL_CALLS]`` and a JSON array (tokenizers before v11), or ``[TOOL_CALLS]name{json}`` for
each call (v11 and later; with ``[CALL_ID]id`` and ``[ARGS]`` where control tokens are kept).

Which one it is, the first character after the mark says. In the later form broken arguments are handed
on as they are, as vLLM's parser does: the tool session says what is wrong with them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, ClassVar

from agentenv.agent.parsers.base import (
    THINK,
    Malformed,
    Marks,
    Parsed,
    ParsedCall,
    ToolCallParser,
    arguments_of,
    as_json,
    checked_name,
    object_or_text,
)
from agentenv.agent.protocols import ToolDefinition

MARK = "[TOOL_CALLS]"
CALL_ID = re.compile(r"[a-zA-Z0-9]{9}\Z")


class MistralParser(ToolCallParser):
    """Mistral, Mixtral, Ministral, Magistral (which reasons in ``[THINK]``)."""

    name = "mistral"
    openers = (MARK,)
    closer = None
    reasoning_marks: ClassVar[Marks] = (*THINK, ("[THINK]", "[/THINK]"))
    end_marks = ("</s>",)

    def read(self, answer: str, tools: Sequence[ToolDefinition]) -> Parsed:  # noqa: ARG002
        """All calls, or Malformed: a message is run whole or not at all."""
        before, *parts = answer.split(MARK)
        if not parts:
            return Parsed(answer)
        calls: list[ParsedCall] = []
        for number, part in enumerate(parts, 1):
            where = f"the text after {MARK} number {number}"
            calls.extend(_array(part, where) if part.lstrip()[:1] in ("[", "{") else [_named(part, where)])
        if not calls:
            raise Malformed(f"{MARK} is followed by no call")
        return Parsed(before.strip(), tuple(calls))

    def written(self, calls: Sequence[ParsedCall]) -> str:
        """The array form."""
        entries: list[dict[str, Any]] = []
        for call in calls:
            entry: dict[str, Any] = {"name": call.name, "arguments": call.arguments}
            entries.append({**entry, "id": call.call_id} if call.call_id else entry)
        return f"{MARK} {as_json(entries, (MARK,))}"

    def call_id(self, step: int, number: int) -> str:
        """Nine letters and digits: Mistral's templates and validators refuse others."""
        return f"c{step % 100_000:05d}{number % 1000:03d}"


def _array(part: str, where: str) -> list[ParsedCall]:
    try:
        value, _ = json.JSONDecoder().raw_decode(part.lstrip())  # text after it does not count
    except (ValueError, RecursionError) as error:
        raise Malformed(f"{where} is not a valid JSON array: {error}") from error
    return [_entry(entry, where) for entry in (value if isinstance(value, list) else [value])]


def _entry(entry: Any, where: str) -> ParsedCall:
    if not isinstance(entry, dict):
        raise Malformed(f"{where} has an entry that is not a JSON object")
    written_id = entry.get("id")
    call_id = written_id if isinstance(written_id, str) and CALL_ID.match(written_id) else None
    return ParsedCall(checked_name(entry.get("name"), where), object_or_text(entry.get("arguments", {})), call_id)


def _named(part: str, where: str) -> ParsedCall:
    head, brace, rest = part.partition("{")
    if not brace:
        raise Malformed(f"{where} has no arguments")
    name, _, call_id = head.replace("[ARGS]", "").partition("[CALL_ID]")
    call_id = call_id.strip()
    return ParsedCall(
        checked_name(name, where),
        arguments_of(brace + rest.rstrip()),
        call_id if CALL_ID.match(call_id) else None,
    )
