"""The tools a trajectory may call: lookup, description for a model, and checking of arguments."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, Final, NoReturn

from pydantic import BaseModel, ValidationError

from agentenv.errors import ConfigError, InvalidArgumentsError, UnknownToolError
from agentenv.tools.json_text import read_json
from agentenv.tools.schema import as_json, closest, explain_arguments, explain_unknown, parameters_schema
from agentenv.tools.spec import ToolSpec
from agentenv.wire.base import for_code
from agentenv.wire.sessions import SLOT_TOOLS
from agentenv.wire.tools import CODE_TOOLS

BUILTIN: Final = tuple(ToolSpec(one.name, one.description, one.arguments) for one in SLOT_TOOLS)
"""The tools every slot has, from their rows in the wire vocabulary."""
UNOFFERED: Final = tuple(ToolSpec(one.name, one.description, one.arguments) for one in CODE_TOOLS)
"""What an executor runs besides, for hooks and scripts; in no catalog that is offered to a model."""
_SNIPPET_CHARS = 20

# Every pool and sandbox has a catalog, mostly of the same tools, and a schema takes milliseconds to derive. What is
# cached is never changed: openai_tools() copies it.
_schema = lru_cache(maxsize=256)(parameters_schema)


class ToolCatalog:
    """An immutable set of tools, in order.

    Raises:
        ConfigError: two specs have one name, or a spec's arguments cannot be described as JSON schema.
    """

    def __init__(self, specs: Iterable[ToolSpec]) -> None:
        self._specs: dict[str, ToolSpec] = {}
        self._schemas: dict[str, dict[str, Any]] = {}
        for spec in specs:
            if spec.name in self._specs:
                raise ConfigError("tools", f"two tools are named {spec.name!r}", next_step="rename one of them")
            self._specs[spec.name] = spec
            self._schemas[spec.name] = _schema(spec.arguments)

    @classmethod
    def builtin(cls) -> ToolCatalog:
        """The tools every slot has (:data:`BUILTIN`)."""
        return cls(BUILTIN)

    @property
    def specs(self) -> tuple[ToolSpec, ...]:
        """Every spec, in order."""
        return tuple(self._specs.values())

    @property
    def names(self) -> tuple[str, ...]:
        """Every name, in order."""
        return tuple(self._specs)

    def __contains__(self, name: object) -> bool:
        return name in self._specs

    def __len__(self) -> int:
        return len(self._specs)

    def __repr__(self) -> str:
        return f"<ToolCatalog {', '.join(self._specs) or 'empty'}>"

    def spec(self, name: str) -> ToolSpec:
        """The tool of that name.

        Raises:
            UnknownToolError: there is none; the message names the closest match and the whole list.
        """
        if (spec := self._specs.get(name)) is None:
            raise UnknownToolError(explain_unknown(name, self._specs))
        return spec

    def extended(self, *specs: ToolSpec) -> ToolCatalog:
        """A new catalog with these tools added. Raises ConfigError as the constructor does."""
        return ToolCatalog((*self.specs, *specs))

    def subset(self, names: Iterable[str]) -> ToolCatalog:
        """A new catalog of these tools only, in this catalog's order.

        Raises:
            ConfigError: a name is not in this catalog; the closest match is named.
        """
        wanted = set(names)
        for name in sorted(wanted - self._specs.keys()):
            match = closest(name, self._specs)
            hint = f"; did you mean {match!r}?" if match else ""
            raise ConfigError("tools", f"unknown tool {name!r}{hint}", next_step=f"known: {', '.join(self._specs)}")
        return ToolCatalog(spec for spec in self.specs if spec.name in wanted)

    def openai_tools(self) -> list[dict[str, Any]]:
        """The ``tools`` list of a chat completion request; the caller's own to change."""
        return [
            {
                "type": "function",
                "function": {
                    "name": spec.name,
                    "description": spec.description,
                    "parameters": copy.deepcopy(self._schemas[spec.name]),
                },
            }
            for spec in self.specs
        ]

    def validate(self, tool: str, arguments: Mapping[str, Any] | str) -> dict[str, Any]:
        """Check one call; ``arguments`` is a mapping, or JSON text as a model writes it (empty: none). Text may
        have no arguments that are for code only (:data:`agentenv.wire.base.ForCode`).

        Returns the arguments as JSON values, defaults left out. Bytes of a slot's tool stay ``bytes``, whatever
        their size: :func:`agentenv.executor.pending_call.encode_arguments` alone decides how they travel.

        Raises:
            UnknownToolError: no tool of that name.
            InvalidArgumentsError: not JSON, not an object, or not fitting the tool's schema.
            Both messages are written for the model to correct itself by.
        """
        spec = self.spec(tool)
        values = self._parsed(tool, arguments) if isinstance(arguments, str) else arguments
        if not isinstance(values, Mapping):
            self._refuse(tool, f"must be a JSON object, got {as_json(values)}")
        if isinstance(arguments, str) and (hidden := for_code(spec.arguments).intersection(values)):
            self._refuse(tool, f"unknown argument '{min(hidden)}'")
        try:
            problem = unencodable(values)
        except RecursionError as error:
            self._refuse(tool, "are nested too deeply", cause=error)
        if problem is not None:
            self._refuse(tool, problem)
        try:
            return _values(spec.arguments.model_validate(values), keep_bytes=spec.kind == "slot")
        except ValidationError as error:
            self._refuse(tool, explain_arguments(spec.arguments, self._schemas[tool], error), cause=error)

    def _parsed(self, tool: str, text: str) -> Any:
        if not text.strip():
            return {}  # what several model servers send for a call without arguments
        try:
            return read_json(text, strict=False)
        except json.JSONDecodeError as error:
            near = text[max(0, error.pos - _SNIPPET_CHARS) : error.pos + _SNIPPET_CHARS]
            problem = f"{error.msg} at line {error.lineno} column {error.colno}, near {as_json(near)}"
            self._refuse(tool, f"are not valid JSON: {problem}", cause=error)
        except ValueError as error:
            self._refuse(tool, f"are not valid JSON: {error}", cause=error)

    def _refuse(self, tool: str, problem: str, *, cause: Exception | None = None) -> NoReturn:
        schema = self._schemas[tool]
        required = ", ".join(f'"{name}": …' for name in schema.get("required", ()))
        example = f"send one JSON object: {{{required}}}" if problem.startswith(("are not", "must be")) else ""
        separator = " " if example else ": "
        raise InvalidArgumentsError(f"the arguments of {tool}{separator}{problem}", next_step=example) from cause


def _values(model: BaseModel, *, keep_bytes: bool) -> dict[str, Any]:
    fields = {name: getattr(model, name) for name in model.model_fields_set} if keep_bytes else {}
    raw = {name: value for name, value in fields.items() if isinstance(value, bytes)}
    return model.model_dump(mode="json", exclude_unset=True, exclude=set(raw)) | raw


def unencodable(value: object, path: str = "") -> str | None:
    """What of ``value`` JSON cannot carry, as a sentence with its location; None if it can."""
    if isinstance(value, str):
        where = f"argument '{path}' has half of a surrogate pair; write the whole character"
        return None if value.isascii() or _is_utf8(value) else where
    if isinstance(value, float):
        return None if math.isfinite(value) else f"argument '{path}' is {value}, which JSON has no number for"
    if isinstance(value, Mapping):
        items: Iterable[tuple[object, object]] = value.items()
        for key, item in items:
            if (found := unencodable(key, path or "a name")) is not None:
                return found
            if (found := unencodable(item, f"{path}.{key}" if path else str(key))) is not None:
                return found
    elif isinstance(value, (list, tuple)):
        return next((found for item in value if (found := unencodable(item, path)) is not None), None)
    return None


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
