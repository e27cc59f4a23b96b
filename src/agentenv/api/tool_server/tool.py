"""External tools: typed coroutine functions with a decorator.

    @tool(timeout_s=10, secrets=("records_key",))
    async def record_lookup(
        record: Annotated[str, Field(description="The record's number.")], *, context: ToolRun
    ) -> dict[str, str]:
        '''Look a record up.'''
        ...

The schema a model sees comes from the signature, by pydantic; the docstring is the description. A parameter
annotated :class:`ToolRun` is not visible to the model: it receives the caller's identity and the tool's secrets.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, get_type_hints

from pydantic import BaseModel, ConfigDict, PydanticUserError, create_model

from agentenv.errors import ConfigError
from agentenv.tools.schema import parameters_schema
from agentenv.tools.spec import ToolSpec
from agentenv.wire.toolserver import CallScope

_BY_POSITION: Final = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)


class ToolFailure(Exception):
    """The tool worked, but the outside world did not: a missing page, a silent host.

    Data for the model (exit code 1, the message as stderr), not a fault. ``keep``: record this answer in a cassette
    like any result, because it is final; a transient failure (a timeout) is not recorded.
    """

    def __init__(self, message: str, *, keep: bool = False) -> None:
        super().__init__(message)
        self.keep = keep


@dataclass(frozen=True)
class ToolRun:
    """Context of a running tool call besides its arguments. ``secrets`` holds those named by the decorator."""

    scope: CallScope
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class ExternalTool:
    """One tool of a tool server. Calling it calls the function, so it can be tested like one.

    ``run`` returns a JSON value or a pydantic model. ``concurrent`` bounds how many calls run at once,
    ``per_trajectory`` and ``per_group`` how many are made in total (None: no limit). ``stateful``: it keeps state
    for the trajectory (closed by ``ended``), so a result depends on earlier stateful calls. ``repeatable``: running
    it twice is harmless. ``recorded``: its results are recorded in cassettes. ``same``: fields of a stateful tool's
    result that a recorded call must have again when it is made up for. ``unavailable``: why it refuses every call.
    """

    spec: ToolSpec
    run: Callable[..., Awaitable[Any]]
    timeout_s: float = 30.0
    concurrent: int = 8
    per_trajectory: int | None = None
    per_group: int | None = None
    secrets: tuple[str, ...] = ()
    stateful: bool = False
    repeatable: bool = False
    recorded: bool = True
    same: tuple[str, ...] = ()
    unavailable: str = ""
    wants_run: str | None = None
    """Name of the parameter that takes the :class:`ToolRun`."""

    @property
    def name(self) -> str:
        """Its name for the model."""
        return self.spec.name

    async def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function itself."""
        return await self.run(*args, **kwargs)


def tool(
    *,
    name: str = "",
    description: str = "",
    timeout_s: float = 30.0,
    concurrent: int = 8,
    per_trajectory: int | None = None,
    per_group: int | None = None,
    secrets: tuple[str, ...] = (),
    repeatable: bool = False,
    recorded: bool = True,
) -> Callable[[Callable[..., Awaitable[Any]]], ExternalTool]:
    """Make a coroutine function a tool. ``name`` and ``description`` are the function's own by default.

    Raises:
        ConfigError: it is not ``async``, has no description, takes arguments by position only, or a
            parameter's type cannot be described as JSON schema.
    """

    def made(function: Callable[..., Awaitable[Any]]) -> ExternalTool:
        return external_tool(
            function,
            name=name,
            description=description,
            timeout_s=timeout_s,
            concurrent=concurrent,
            per_trajectory=per_trajectory,
            per_group=per_group,
            secrets=secrets,
            repeatable=repeatable,
            recorded=recorded,
        )

    return made


def external_tool(
    function: Callable[..., Awaitable[Any]], *, name: str = "", description: str = "", **fields: Any
) -> ExternalTool:
    """As :func:`tool`, for an existing function (or bound method); ``fields`` are ExternalTool's."""
    called = name or getattr(function, "__name__", "")
    if not inspect.iscoroutinefunction(function):
        raise ConfigError(
            f"tool {called}",
            "is not an async function",
            next_step="write `async def`, blocking work in asyncio.to_thread",
        )
    summary = description or _first_paragraph(inspect.getdoc(function) or "")
    if not summary:
        raise ConfigError(f"tool {called}", "has no description", next_step="write a docstring for the model to read")
    for limit in ("concurrent", "per_trajectory", "per_group"):
        if (value := fields.get(limit)) is not None and value < 1:
            raise ConfigError(f"tool {called}", f"{limit} is {value!r}", next_step="allowed: 1 or more")
    arguments, wants_run = _arguments_of(function, called)
    timeout_s = fields.get("timeout_s", 30.0)
    spec = ToolSpec(name=called, description=summary, arguments=arguments, default_timeout_s=timeout_s, kind="external")
    return ExternalTool(spec=spec, run=function, wants_run=wants_run, **fields)


def _first_paragraph(text: str) -> str:
    return re.sub(r"\s+", " ", text.split("\n\n")[0]).strip()


def _arguments_of(function: Callable[..., Any], called: str) -> tuple[type[BaseModel], str | None]:
    """The model of the parameters, and the name of the one that takes the ToolRun."""
    try:
        hints = get_type_hints(function, include_extras=True)
    except NameError as error:
        raise ConfigError(f"tool {called}", f"unknown type: {error}") from error
    fields: dict[str, Any] = {}
    wants_run: str | None = None
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in _BY_POSITION or parameter.kind is inspect.Parameter.VAR_KEYWORD:
            raise ConfigError(f"tool {called}", f"{parameter} cannot be given by name")
        hint = hints.get(parameter.name)
        if hint is ToolRun:
            wants_run = parameter.name
        elif hint is None:
            raise ConfigError(f"tool {called}", f"{parameter.name} has no type", next_step="annotate it")
        else:
            default = ... if parameter.default is inspect.Parameter.empty else parameter.default
            fields[parameter.name] = (hint, default)
    strict = ConfigDict(frozen=True, extra="forbid")
    try:
        model: type[BaseModel] = create_model(f"Arguments_{called}", __config__=strict, **fields)
        parameters_schema(model)
    except (TypeError, ValueError, NameError, PydanticUserError) as error:
        raise ConfigError(f"tool {called}", f"its signature does not translate to a schema: {error}") from error
    return model, wants_run
