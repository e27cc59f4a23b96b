"""Values that models write without quotes, given the types a tool's schema asks for. Pure."""

from __future__ import annotations

import ast
import json
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from agentenv.agent.protocols import ToolDefinition

LITERAL_BYTES = 64 * 1024
LITERALS = 64
"""Tried per message: Python's parser takes its time."""
LITERAL_DEPTH = 40
SIGNS = re.compile(r"[-+~ ]{200}")
"""Python's own parser may use up the stack on text nested deeper, by brackets or by signs."""
BRACKETS = re.compile(r"[(\[{]|[)\]}]")

NAMES = {
    "str": "string", "text": "string", "enum": "string", "int": "integer", "float": "number", "bool": "boolean",
    "dict": "object", "list": "array", "arr": "array",
}  # fmt: skip


class Schemas:
    """The schemas of the arguments of some tools, for reading one message."""

    def __init__(self, tools: Sequence[ToolDefinition]) -> None:
        self._tools: dict[str, Mapping[str, Any]] = {}
        self._literals_left = LITERALS
        for tool in tools:
            function = tool.get("function") or {}
            properties = (function.get("parameters") or {}).get("properties") or {}
            self._tools[str(function.get("name"))] = properties

    def types(self, tool: str, key: str) -> tuple[str, ...]:
        """The types the argument may have, by schema; empty when nothing is known of it."""
        schema = self._tools.get(tool, {}).get(key)
        return tuple(dict.fromkeys(_types(schema))) if isinstance(schema, Mapping) else ()

    def value(self, tool: str, key: str, text: str) -> Any:
        """``text`` as the first of the types it fits; itself when it fits none, a string may be meant,
        or nothing is known. ``null`` (any case) is None whatever the type; a boolean is true or else false.
        """
        types = self.types(tool, key)
        if text.strip().lower() == "null":
            return None
        for name in () if "string" in types else types:
            if name == "boolean":
                return text.strip().lower() == "true"
            value = self.json_or_literal(text) if name in ("object", "array") else _number(name, text)
            if value is not None:
                return value
        return text

    def json_or_literal(self, text: str) -> Any:
        """A JSON value, else a Python literal of JSON's types, else None."""
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            self._literals_left -= 1
            return _literal(text) if self._literals_left >= 0 else None


def _types(schema: Mapping[str, Any]) -> list[str]:
    given = schema.get("type")
    if given is not None:
        names = given if isinstance(given, list) else [given]
        return [NAMES.get(str(name), str(name)) for name in names]
    choices = [*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())]
    return [name for choice in choices if isinstance(choice, Mapping) for name in _types(choice)] or ["string"]


def _number(name: str, text: str) -> int | float | None:
    try:
        if name == "integer":
            return int(text)
        number = float(text) if name == "number" else math.nan
    except ValueError:
        return None
    if not math.isfinite(number):
        return None
    return int(number) if number.is_integer() and abs(number) < 2**53 else number


def _literal(text: str) -> Any:
    if len(text) > LITERAL_BYTES or _depth(text) > LITERAL_DEPTH or SIGNS.search(text):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            value = ast.literal_eval(text.strip())
        return json.loads(json.dumps(value))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


def _depth(text: str) -> int:
    deepest = depth = 0
    for found in BRACKETS.finditer(text):
        depth += 1 if found.group() in "([{" else -1
        deepest = max(deepest, depth)
    return deepest
