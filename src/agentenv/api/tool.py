"""What an external tool is: a typed coroutine function with a decorator.

    @tool(timeout_s=10, secrets=("records_key",))
    async def record_lookup(
        record: Annotated[str, Field(description="The record's number.")], *, context: ToolRun
    ) -> dict[str, str]:
        '''Look a record up.'''
        ...

The schema a model sees comes from the signature, by pydantic; the docstring is the description. A
parameter annotated :class:`ToolRun` is not the model's: it is given who asks, and the tool's secrets.
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
    """The tool did what it could and it did not work out there: a page that is gone, a host that is silent.

    Data for the model (exit code 1, the message as stderr), not a fault. ``keep``: the world's settled
    answer, to be recorded in a cassette as any result is; a passing failure (a timeout) is not kept.
    """

    def __init__(self, message: str, *, keep: bool = False) -> None:
        super().__init__(message)
        self.keep = keep


@dataclass(frozen=True)
class ToolRun:
    """What a running tool is told besides its arguments. ``secrets`` holds those its decorator names."""

    scope: CallScope
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class ExternalTool:
    """One tool of a tool server. Calling it calls the function, so a tool can be tested as one.

    ``run`` returns what JSON can say, or a pydantic model. ``concurrent`` bounds how many calls run at
    once, ``per_trajectory`` and ``per_group`` how many are made at all (None: as many as they like).
    ``stateful``: it keeps something for the trajectory (``ended`` closes it), so a result depends on
    the trajectory's earlier stateful calls. ``repeatable``: running it twice does no harm.
    ``recorded``: its results belong into cassettes. ``unavailable``: why it would refuse every call.
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
    unavailable: str = ""
    wants_run: str | None = None
    """The name of the parameter that takes the :class:`ToolRun`."""

    @property
    def name(self) -> str:
        """As the model calls it."""
        return self.spec.name

    async def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function itself."""
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
    """Make a tool of a coroutine function. ``name`` and ``description`` are the function's own by default.

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
    """As :func:`tool`, for a function (or bound method) at hand; ``fields`` are ExternalTool's."""
    called = name or getattr(function, "__name__", "")
    if not inspect.iscoroutinefunction(function):
        raise ConfigError(
            f"tool {called}",
            "is not an async function",
            next_step="write `async def`, blocking work in asyncio.to_thread",
        )
    told = description or _first_paragraph(inspect.getdoc(function) or "")
    if not told:
        raise ConfigError(f"tool {called}", "has no description", next_step="write a docstring for the model to read")
    for limit in ("concurrent", "per_trajectory", "per_group"):
        if (value := fields.get(limit)) is not None and value < 1:
            raise ConfigError(f"tool {called}", f"{limit} is {value!r}", next_step="allowed: 1 or more")
    arguments, wants_run = _arguments_of(function, called)
    timeout_s = fields.get("timeout_s", 30.0)
    spec = ToolSpec(name=called, description=told, arguments=arguments, default_timeout_s=timeout_s, kind="external")
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
        raise ConfigError(f"tool {called}", f"its signature makes no schema: {error}") from error
    return model, wants_run
