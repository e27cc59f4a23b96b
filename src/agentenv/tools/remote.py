"""Tools described by a tool server, as specs of the local catalog."""

from __future__ import annotations

import copy
from typing import Any

from pydantic import BaseModel, ConfigDict, create_model

from agentenv.tools.spec import ToolSpec
from agentenv.wire.toolserver import ToolDescription


class RemoteArguments(BaseModel):
    """Arguments whose schema is held by another process: any object is accepted here and checked there."""

    model_config = ConfigDict(frozen=True, extra="allow")


def remote_spec(description: ToolDescription) -> ToolSpec:
    """The described tool, of kind ``external``. Raises ConfigError when its name or a limit is not usable."""
    parameters = copy.deepcopy(description.parameters)

    def model_json_schema(*_: Any, **__: Any) -> dict[str, Any]:
        return copy.deepcopy(parameters)

    arguments = create_model(f"Arguments_{description.name}", __base__=RemoteArguments)
    arguments.model_json_schema = model_json_schema  # type: ignore[method-assign]
    return ToolSpec(
        name=description.name,
        description=description.description,
        arguments=arguments,
        default_timeout_s=description.timeout_s,
        kind="external",
    )
