"""Which tools a slot has, and what their arguments must be.

Clients check arguments by the same models before they send a call. So arguments that do not fit here are a failure of
the client or of the wire, never the mistake of who made the call.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pydantic import ValidationError
from pydantic_core import from_json

from agentenv.errors import ProtocolError, UnknownToolError
from agentenv.sandbox.server.inbox import Attached
from agentenv.wire.base import WireModel, carried_as
from agentenv.wire.sessions import SLOT_TOOLS
from agentenv.wire.tools import SlotTool

_ROWS: Final = {one.name: one for one in SLOT_TOOLS}
MAX_VALUE_BYTES = 16 * 1024 * 1024
"""Largest attachment that is read into a value."""
MAX_JSON_BYTES = 4 * 1024 * 1024
"""Largest that is parsed: twice what Linux gives the arguments and the environment of a program."""
_MAX_PROBLEMS = 3
_MAX_SHOWN = 80


def with_attached(tool: str, arguments: dict[str, Any], attached: Mapping[str, Attached]) -> dict[str, Any]:
    """The arguments with those that were attached: in full, or empty where the tool reads the attachment itself
    (:attr:`agentenv.wire.tools.SlotTool.streamed`). Raises InvalidArgumentsError when one is too large, ProtocolError
    when one is given twice, or is not what its field carries (:func:`agentenv.wire.base.carried_as`).
    """
    if not attached:
        return arguments
    if twice := attached.keys() & arguments.keys():
        raise ProtocolError(f"{tool}: {', '.join(sorted(twice))} is given twice")
    if (row := _ROWS.get(tool)) is None:
        return arguments
    in_full = {field: _value(row, field, one) for field, one in attached.items()}
    return {**arguments, **in_full}


def _value(row: SlotTool, field: str, attached: Attached) -> Any:
    carried = carried_as(row.arguments, field)
    if field in row.streamed:
        return b"" if carried == "bytes" else ""
    content = attached.content(field, MAX_JSON_BYTES if carried == "json" else MAX_VALUE_BYTES)
    if carried == "bytes":
        return content
    try:
        return content.decode() if carried == "text" else from_json(content)
    except ValueError as error:
        raise ProtocolError(f"{field}: is not {'UTF-8' if carried == 'text' else 'JSON'}: {error}") from error


def parse_arguments(tool: str, arguments: dict[str, Any]) -> WireModel:
    """The arguments of a call of ``tool``, checked.

    Raises:
        UnknownToolError: a slot has no such tool.
        ProtocolError: they do not fit.
    """
    row = _ROWS.get(tool)
    if row is None:
        raise UnknownToolError(f"unknown tool {tool!r}", next_step=f"use one of: {', '.join(_ROWS)}")
    try:
        return row.arguments.model_validate(arguments)
    except ValidationError as error:
        raise ProtocolError(f"{tool}: {_problems(error)}") from error


def _problems(error: ValidationError) -> str:
    described = []
    for problem in error.errors(include_url=False, include_context=False)[:_MAX_PROBLEMS]:
        where = ".".join(str(part) for part in problem["loc"]) or "arguments"
        shown = repr(problem["input"])
        got = "" if problem["type"] == "missing" or len(shown) > _MAX_SHOWN else f" (got {shown})"
        described.append(f"{where}: {problem['msg']}{got}")
    return "; ".join(described)
