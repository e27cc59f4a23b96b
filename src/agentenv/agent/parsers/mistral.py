"""Mistral: ``[TOOL_CALLS]`` and a JSON array (tokenizers before v11), or ``[TOOL_CALLS]name{json}`` for
each call (v11 and later; with ``[CALL_ID]id`` and ``[ARGS]`` where control tokens are kept).

The first character after the mark decides which one it is. A call has no closing mark: it ends with its JSON, and
text behind it that has a ``}`` may be the rest of a call whose JSON ended too early.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, ClassVar

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

MARK = "[TOOL_CALLS]"
CALL_ID = re.compile(r"[a-zA-Z0-9]{9}\Z")
HEAD = re.compile(r"\s*+(?P<name>[^\s\[{]++)\s*+(?:\[CALL_ID\]\s*+(?P<id>\w++)\s*+)?(?:\[ARGS\]\s*+)?(?=\{)")
"""Of one call, up to its arguments."""


class MistralParser(ToolCallParser):
    """Mistral, Mixtral, Ministral, Magistral (which reasons in ``[THINK]``)."""

    name = "mistral"
    opener = re.escape(MARK)
    tail_marks = ("}",)
    reasoning_marks: ClassVar[Marks] = (*THINK, ("[THINK]", "[/THINK]"))
    end_marks = ("</s>",)

    def read(self, reading: Reading) -> None:
        """Read what follows one mark: an array of calls, or one call."""
        reading.take(MARK)
        if reading.text.startswith(("[", "{"), reading.space()):
            value = reading.json()
            for entry in value if isinstance(value, list) else [value]:
                reading.calls.append(_entry(entry, reading.where))
            if not value:
                raise Malformed(f"{MARK} is followed by no call")
        else:
            reading.calls.append(_read_named_call(reading))

    def written(self, calls: Sequence[ParsedCall]) -> str:
        """The array form."""
        entries: list[dict[str, Any]] = []
        for call in calls:
            entry: dict[str, Any] = {"name": call.name, "arguments": call.arguments}
            entries.append({**entry, "id": call.call_id} if call.call_id else entry)
        return f"{MARK} {as_json(entries)}"

    def call_id(self, step: int, number: int) -> str:
        """Nine letters and digits: Mistral's templates and validators refuse others."""
        return f"c{step % 100_000:05d}{number % 1000:03d}"


def _entry(entry: Any, where: str) -> ParsedCall:
    if not isinstance(entry, dict):
        raise Malformed(f"{where} is not a JSON object")
    name = checked_name(entry.get("name"), where)
    checked_fields(entry, where, "arguments")
    written_id = entry.get("id")
    call_id = written_id if isinstance(written_id, str) and CALL_ID.match(written_id) else None
    return ParsedCall(name, object_or_text(entry.get("arguments", {})), call_id)


def _read_named_call(reading: Reading) -> ParsedCall:
    head = reading.match(HEAD)
    if head is None:
        raise Malformed(f"{reading.where} is neither a JSON array nor NAME and a JSON object")
    name, call_id = checked_name(head["name"], reading.where), head["id"] or ""
    return ParsedCall(name, object_or_text(reading.json(strict=False)), call_id if CALL_ID.match(call_id) else None)
