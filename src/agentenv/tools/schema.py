"""Pydantic models as JSON schemas that suit a language model, and validation errors as sentences it can act on."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

from pydantic import AliasChoices, BaseModel, ValidationError

from agentenv.errors import ConfigError

_MOST_PROBLEMS = 5
_MOST_INPUT_CHARS = 80


def parameters_schema(arguments: type[BaseModel]) -> dict[str, Any]:
    """The model as a self-contained JSON schema: references resolved, titles and null branches removed.

    Raises:
        ConfigError: the model refers to itself, which cannot be written without references.
    """
    raw = arguments.model_json_schema()
    schema: dict[str, Any] = _clean(raw, raw.get("$defs", {}), ())
    schema.pop("description", None)  # the tool's own description replaces it
    schema.setdefault("properties", {})
    return schema


def _clean(node: Any, definitions: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    if isinstance(node, list):
        return [_clean(item, definitions, path) for item in node]
    if not isinstance(node, dict):
        return node
    node = _without_null_branch(node)
    if reference := node.get("$ref"):
        name = str(reference).rpartition("/")[2]
        if name in path:
            raise ConfigError("tool.arguments", f"{name} refers to itself; use a flat model")
        rest = {key: value for key, value in node.items() if key != "$ref"}
        return _clean(definitions[name] | rest, definitions, (*path, name))
    return {
        key: _clean_properties(value, definitions, path) if key == "properties" else _clean(value, definitions, path)
        for key, value in node.items()
        if key not in ("title", "$defs") and not (key == "default" and value is None)
    }


def _clean_properties(properties: dict[str, Any], definitions: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    """Like :func:`_clean`, but the keys are argument names: one may be called ``title``."""
    return {name: _clean(value, definitions, path) for name, value in properties.items()}


def _without_null_branch(node: dict[str, Any]) -> dict[str, Any]:
    """``anyOf: [X, null]`` as plain X: an optional argument is one that may be omitted."""
    branches = node.get("anyOf")
    if not isinstance(branches, list):
        return node
    real = [branch for branch in branches if branch != {"type": "null"}]
    rest = {key: value for key, value in node.items() if key != "anyOf"}
    return real[0] | rest if len(real) == 1 else rest | {"anyOf": real}


def closest(name: str, known: Iterable[str]) -> str | None:
    """The known name that ``name`` abbreviates (``cmd``) or resembles most, ignoring case; None if there is none."""
    by_folded = {candidate.casefold(): candidate for candidate in known}
    folded = name[:200].casefold()
    short_for = [full for full in by_folded if _abbreviates(folded, full)]
    matches = short_for or difflib.get_close_matches(folded, by_folded, n=1, cutoff=0.5)
    return by_folded[matches[0]] if matches else None


def explain_unknown(name: str, known: Iterable[str]) -> str:
    """Message for a model that called an unknown tool: the closest name and the whole list."""
    names = tuple(known)
    match = closest(name, names)
    hint = f"did you mean '{match}'? " if match else ""
    return f"unknown tool {as_json(name)}; {hint}available tools: {', '.join(names) or 'none'}"


def _abbreviates(short: str, full: str) -> bool:
    """Whether the letters of ``short`` occur in ``full`` in this order, starting with the same letter."""
    rest = iter(full)
    return len(short) > 1 and short[:1] == full[:1] and all(letter in rest for letter in short)


def explain_arguments(arguments: type[BaseModel], schema: Mapping[str, Any], error: ValidationError) -> str:
    """Describe the first five problems in one sentence each, naming the argument and what is allowed."""
    problems = error.errors(include_url=False)
    others = _other_names(arguments)
    sentences = [_sentence(schema, others, dict(problem)) for problem in problems[:_MOST_PROBLEMS]]
    if len(problems) > _MOST_PROBLEMS:
        sentences.append(f"and {len(problems) - _MOST_PROBLEMS} more problems")
    return "; ".join(sentences)


def _other_names(arguments: type[BaseModel]) -> dict[str, str]:
    """The names under which arguments are accepted although the schema does not show them."""
    aliases = {name: field.validation_alias for name, field in arguments.model_fields.items()}
    return {
        str(other): name
        for name, alias in aliases.items()
        if isinstance(alias, AliasChoices)
        for other in alias.choices
        if other != name
    }


def _sentence(schema: Mapping[str, Any], others: Mapping[str, str], problem: dict[str, Any]) -> str:
    where = ".".join(str(part) for part in problem["loc"])[:200]
    properties: dict[str, Any] = schema["properties"]
    if problem["type"] == "missing":
        return f"missing argument '{where}'{_purpose(properties.get(where, {}))}"
    if problem["type"] == "extra_forbidden" and where in others:  # alone it would have been accepted
        return f"'{where}' and '{others[where]}' mean the same; give only one of them"
    if problem["type"] == "extra_forbidden":
        match = closest(where, properties)
        hint = f"; did you mean '{match}'?" if match else ""
        return f"unknown argument '{where}'{hint} (allowed: {', '.join(properties) or 'none'})"
    subject = f"argument '{where}'" if where else "invalid arguments:"
    return f"{subject} {_violation(problem)} (got {as_json(problem['input'])})"


_KINDS: Final = {
    "string": "a string",
    "bytes": "a string",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "tuple": "a list",
    "list": "a list",
    "dict": "an object",
    "model": "an object",
    "mapping": "an object",
}
"""pydantic's kinds (the first word of an error's type) in the words of JSON."""


def _violation(problem: Mapping[str, Any]) -> str:
    """What the value should have been, in the words of JSON, never of Python."""
    kind, _, rest = problem["type"].partition("_")
    limits = problem.get("ctx", {})
    if kind in _KINDS and rest in ("type", "parsing", "from_float", "attributes_type"):
        return f"must be {_KINDS[kind]}"
    if problem["type"] in ("too_long", "too_short"):
        most = problem["type"] == "too_long"
        return f"must have at {'most' if most else 'least'} {limits['max_length' if most else 'min_length']} items"
    message = str(problem["msg"]).removeprefix("Value error, ").removeprefix("Input ").removeprefix("String ")
    message = f"{message[:1].lower()}{message[1:]}"
    return f"must {message.removeprefix('should ')}" if message.startswith("should ") else message


def _purpose(field: Mapping[str, Any]) -> str:
    parts = [str(field[key]) for key in ("type", "description") if key in field]
    return f" ({': '.join(parts)})" if parts else ""


def as_json(value: object) -> str:
    """``value`` as JSON, cut to a length suitable for a context window."""
    text = _dumps(value[: 2 * _MOST_INPUT_CHARS] if isinstance(value, str) else value)
    return text if len(text) <= _MOST_INPUT_CHARS else text[:_MOST_INPUT_CHARS] + "…"


def _dumps(value: object) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return type(value).__name__
