"""Values that models write without quotes, given the types of a tool's schema. Pure."""

from __future__ import annotations

import ast
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from agentenv.agent.protocols import ToolDefinition
from agentenv.tools.json_text import read_json

LITERAL_BYTES = 64 * 1024
LITERALS = 64
"""Tried per message: Python's parser takes its time."""
LITERAL_DEPTH = 40
NOT_READ = re.compile(r"[-+~ ]{200}|\de-\d{3}", re.IGNORECASE)
"""Python's own parser may use up the stack on text nested deeper, by brackets or by signs, and reads numbers too small
for a double as zero."""
BRACKETS = re.compile(r"[(\[{]|[)\]}]")

WORDS = {"true": True, "false": False, "null": None, "none": None}
"""Chat templates write Python's words (``None``, ``True``) as well as JSON's."""
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

    def value(self, tool: str, key: str, text: str, *, unknown_is_json: bool = False) -> Any:
        """The value that ``text`` means: itself where the schema allows a string. Else JSON, a Python literal of
        a list or an object, or a word (``true``, ``null``, any case), if that is of a type that the schema allows, or
        null; else the text itself, which validation then refuses.

        Where nothing is known of the argument, it is the text; with ``unknown_is_json`` JSON or a literal comes first.
        ``null`` is None where null is allowed or nothing is known.
        """
        types = self.types(tool, key)
        if "string" in types or not (types or unknown_is_json):
            return None if text == "null" and ("null" in types or not types) else text
        try:
            value = self._read(text, words=bool(types))
        except ValueError:
            return text
        return value if not types or value is None or _kinds(value) & set(types) else text

    def _read(self, text: str, *, words: bool) -> Any:
        """Raises: ValueError."""
        word = text.strip().lower()
        if words and word in WORDS:
            return WORDS[word]
        try:
            return read_json(text)
        except ValueError:
            if not text.lstrip().startswith(("[", "(", "{")) or not self._literals_left:
                raise
            self._literals_left -= 1
            return _literal(text.strip())


def _types(schema: Mapping[str, Any]) -> list[str]:
    given = schema.get("type")
    if given is not None:
        names = given if isinstance(given, list) else [given]
        return [NAMES.get(str(name), str(name)) for name in names]
    choices = [*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())]
    return [name for choice in choices if isinstance(choice, Mapping) for name in _types(choice)] or ["string"]


def _kinds(value: Any) -> set[str]:
    """The JSON schema types of a value that is not null."""
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, (int, float)):
        return {"integer", "number"} if value == int(value) else {"number"}
    return {"string"} if isinstance(value, str) else {"array"} if isinstance(value, list) else {"object"}


def _literal(text: str) -> Any:
    """A Python list, tuple or dict of values that JSON has. Raises: ValueError."""
    if len(text) > LITERAL_BYTES or _depth(text) > LITERAL_DEPTH or NOT_READ.search(text):
        raise ValueError
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _plain(ast.parse(text, mode="eval").body)
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError from error


def _plain(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=None | bool() | int() | str() as value):
            return value
        case ast.Constant(value=float() as value) if math.isfinite(value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant() as operand):
            number = _plain(operand)
            if isinstance(number, (int, float)) and not isinstance(number, bool):
                return -number
        case ast.List(elts=parts) | ast.Tuple(elts=parts):
            return [_plain(part) for part in parts]
        case ast.Dict(keys=keys, values=values):
            names = [_plain(key) if key is not None else None for key in keys]
            if all(isinstance(name, str) for name in names) and len(set(names)) == len(names):
                return dict(zip(names, map(_plain, values), strict=True))
    raise ValueError


def _depth(text: str) -> int:
    deepest = depth = 0
    for found in BRACKETS.finditer(text):
        depth += 1 if found.group() in "([{" else -1
        deepest = max(deepest, depth)
    return deepest
