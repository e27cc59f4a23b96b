"""Settings of an environment whose slots belong to a farm service, and those that are the farm's to say."""

from __future__ import annotations

from typing import Final, Literal

from pydantic import BaseModel, Field

from agentenv.errors import ConfigError

OF_THE_FARM: Final = (
    "isolation", "slots_per_container", "min_containers", "max_containers", "target_idle_slots",
    "scale_cooldown_s", "slot_processes", "slot_memory_mib", "slot_workspace_mib", "checkpoint_mib",
    "allowed_capabilities", "allow_nested_namespaces",
    "sandbox_binds", "sandbox_env", "nomad_address", "sandbox_job_id", "sandbox_image", "driver",
)  # fmt: skip
"""Settings that say what a farm's containers are like, and how many there are."""


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
        default=None, ge=1, description="Most slots to hold at once; by default what the run may have"
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
                raise ConfigError(field, "is set without tool_pool_mode='farm'", next_step="set that, or unset this")
        return
    for field in OF_THE_FARM:  # the command line sets every field, most of them to their defaults
        default = type(config).model_fields[field].get_default(call_default_factory=True)
        if field in config.model_fields_set and getattr(config, field) != default:
            raise ConfigError(
                field, "is the farm's to say with tool_pool_mode='farm'", next_step="unset it; `GET /v1/farm` shows it"
            )
