"""Settings of an environment that are a farm's: what its containers are like, or which farm service has them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, get_origin, get_type_hints

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model
from typing_extensions import TypeAliasType

from agentenv.config import ContainerSettings, stated
from agentenv.errors import ConfigError
from agentenv.wire.spec import MIB, Bind, ContainerSpec, SlotLimits


def _split(value: object) -> object:
    """Split comma-separated text, the form in which atropos' CLI passes lists. Binds become text."""
    if isinstance(value, (list, tuple)):
        return [f"{one.source}:{one.target}" if isinstance(one, Bind) else one for one in value]
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def _parse_object(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise ValueError(f"must be a JSON object: {error}") from error


# Named types: atropos' command line copies a field's type, and loses the validators that stand beside it
Names = TypeAliasType("Names", Annotated[list[str], BeforeValidator(_split)])
JsonObject = TypeAliasType("JsonObject", Annotated[dict[str, Any], BeforeValidator(_parse_object)])
TextObject = TypeAliasType("TextObject", Annotated[dict[str, str], BeforeValidator(_parse_object)])

_OTHERWISE: Final = {"checkpoint_bytes": "checkpoint_mib", "env": "sandbox_env", "binds": "sandbox_binds"}
"""Fields of ContainerSettings that have another name here."""
CONTAINER: Final = {
    _OTHERWISE.get(name, name): name
    for name in ContainerSettings.model_fields
    if name not in ("limits", "require_sandbox")  # the former are LIMITS, the latter depends on tool_pool_mode here
}
"""Fields here → fields of ContainerSettings."""
LIMITS: Final = {f"slot_{limit.name.replace('_bytes', '_mib')}": limit.name for limit in dataclasses.fields(SlotLimits)}
"""Fields here → fields of SlotLimits."""
OF_THE_FARM: Final = (
    *(name for name in CONTAINER if name != "allow_network"), *LIMITS, "min_containers", "max_containers",
    "target_idle_slots", "scale_cooldown_s", "idle_containers_after_s",
    "nomad_address", "sandbox_job_id", "sandbox_image", "driver",
)  # fmt: skip
"""Settings that say what a farm's containers are like, and how many there are."""


def _field(kind: type, setting: str, name: str) -> tuple[Any, Any]:
    """Type and field of a setting as a command line has it: memory in MiB, lists with commas, objects as JSON."""
    hint, field = get_type_hints(kind)[setting], stated(kind, setting, MIB if name.endswith("_mib") else 1)
    if get_origin(hint) is tuple:
        return Names, Field(default_factory=lambda: list(field.default), description=field.description)
    return TextObject if get_origin(hint) is dict else hint, field


def taken_from(config: object, names: Mapping[str, str]) -> dict[str, Any]:
    """The values of these fields (``CONTAINER``, ``LIMITS``), under the names and in the units of what they are for."""
    values = {name: getattr(config, name) for name in names}
    return {names[name]: MIB * value if name.endswith("_mib") else value for name, value in values.items()}


_FIELDS: Final[dict[str, Any]] = {
    **{name: _field(ContainerSpec, one.removesuffix("_per_container"), name) for name, one in CONTAINER.items()},
    **{name: _field(SlotLimits, one, name) for name, one in LIMITS.items()},
}
if TYPE_CHECKING:

    class ContainerFields(BaseModel):
        """Of which type checkers let any field be given and read."""

        model_config = ConfigDict(extra="allow")

        def __getattr__(self, name: str) -> Any: ...
else:
    ContainerFields = create_model("ContainerFields", **_FIELDS)
    """What every container is like: the fields of ContainerSpec and of SlotLimits, flat."""


class FarmFields(BaseModel):
    """Where the slots of a shared farm are asked for."""

    farm_url: str | None = Field(
        default=None,
        description="With tool_pool_mode=farm: address of the farm service (several, separated by commas; "
        "nomad://SERVICE); by default AGENTENV_FARM_URL, else the service of this machine",
    )
    farm_token: str | None = Field(
        default=None, repr=False, description="Token of the run, as made by agentenv farm token, or file:PATH"
    )
    farm_run: str = Field(
        default="",
        description="The run, if the token is for several; at the service of this machine by default wandb_name, or "
        "the environment's name",
    )
    farm_max_slots: int | None = Field(
        default=None, ge=1, description="Most slots to hold at once; by default the run's cap"
    )
    farm_route: Literal["auto", "direct", "relay"] = Field(
        default="auto",
        description="How containers are reached; auto: directly, or through the relay",
    )


def refuse_farm_contradictions(config: FarmFields, tool_pool_mode: str) -> None:
    """Raises ConfigError for settings that contradict ``tool_pool_mode``."""
    if tool_pool_mode != "farm":
        for field in ("farm_url", "farm_token", "farm_run", "farm_max_slots"):
            if getattr(config, field):
                raise ConfigError(field, "is set without tool_pool_mode='farm'", next_step="set it, or unset this")
        return
    for field in OF_THE_FARM:  # the command line sets every field, most of them to their defaults
        default = type(config).model_fields[field].get_default(call_default_factory=True)
        if field in config.model_fields_set and getattr(config, field) != default:
            raise ConfigError(
                field, "is set by the farm service in this mode", next_step="remove it; `GET /v1/farm` shows the farm's"
            )
