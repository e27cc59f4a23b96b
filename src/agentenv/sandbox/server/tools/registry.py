"""Which tools a slot has, and what their arguments must be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pydantic import ValidationError

from agentenv.errors import InvalidArgumentsError, UnknownToolError
from agentenv.sandbox.server.inbox import Attached
from agentenv.wire.base import WireModel
from agentenv.wire.sessions import SLOT_TOOLS

_ROWS: Final = {one.name: one for one in SLOT_TOOLS}
MAX_TEXT_BYTES = 16 * 1024 * 1024
"""Largest attachment that is made text."""
_MAX_PROBLEMS = 3
_MAX_SHOWN = 80


def with_attached(tool: str, arguments: dict[str, Any], attached: Mapping[str, Attached]) -> dict[str, Any]:
    """The arguments with those that were attached: in full, or empty where the tool reads the attachment itself
    (:attr:`agentenv.wire.tools.SlotTool.streamed`). Raises InvalidArgumentsError when one is given twice, or too large.
    """
    if not attached:
        return arguments
    if twice := attached.keys() & arguments.keys():
        raise InvalidArgumentsError(f"{tool}: {', '.join(sorted(twice))} is given twice")
    streamed = _ROWS[tool].streamed if tool in _ROWS else ()
    in_full = {field: "" if field in streamed else one.text(field, MAX_TEXT_BYTES) for field, one in attached.items()}
    return {**arguments, **in_full}


def parse_arguments(tool: str, arguments: dict[str, Any]) -> WireModel:
    """The arguments of a call of ``tool``, checked.

    Raises:
        UnknownToolError: a slot has no such tool.
        InvalidArgumentsError: they do not fit; the message tells a model what to change.
    """
    row = _ROWS.get(tool)
    if row is None:
        raise UnknownToolError(f"unknown tool {tool!r}", next_step=f"use one of: {', '.join(_ROWS)}")
    try:
        return row.arguments.model_validate(arguments)
    except ValidationError as error:
        raise InvalidArgumentsError(f"{tool}: {_problems(error)}") from error


def _problems(error: ValidationError) -> str:
    described = []
    for problem in error.errors(include_url=False, include_context=False)[:_MAX_PROBLEMS]:
        where = ".".join(str(part) for part in problem["loc"]) or "arguments"
        shown = repr(problem["input"])
        got = "" if problem["type"] == "missing" or len(shown) > _MAX_SHOWN else f" (got {shown})"
        described.append(f"{where}: {problem['msg']}{got}")
    return "; ".join(described)
