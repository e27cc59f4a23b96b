"""``tool_pool_mode="farm"``: an environment whose slots belong to a farm service.

What containers are like is then the farm's to say, and how many slots there are is the run's share.
"""

from __future__ import annotations

import shlex
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final, Literal

from pydantic import BaseModel, Field

from agentenv.agent.protocols import SessionOpener
from agentenv.errors import ConfigError, SandboxUnavailableError
from agentenv.sdk.tool_context import ToolContext
from agentenv.slots.farm_access import farm_access
from agentenv.slots.farm_pool import FarmPool
from agentenv.wire.farm import FarmInfo
from agentenv.wire.leases import Tags, short_tag
from agentenv.wire.spec import Bind

if TYPE_CHECKING:
    from agentenv.env.config import AgentFields

OF_THE_FARM: Final = (
    "isolation", "slots_per_container", "min_containers", "max_containers", "target_idle_slots",
    "scale_cooldown_s", "slot_processes", "slot_memory_mib", "slot_workspace_mib", "sandbox_binds", "sandbox_env",
    "nomad_address", "sandbox_job_id", "sandbox_image", "driver",
)  # fmt: skip
"""Settings that say what a farm's containers are like, and how many there are."""


class FarmFields(BaseModel):
    """Where the slots of a shared farm are asked for."""

    farm_url: str | None = Field(
        default=None,
        description="With tool_pool_mode=farm: address of the farm service (several, separated by commas); by default "
        "AGENTENV_FARM_URL, else the service of this machine",
    )
    farm_token: str | None = Field(
        default=None, repr=False, description="Token of the run, as made by agentenv farm token, or file:PATH"
    )
    farm_run: str = Field(default="", description="The run, if the token is for several")
    farm_max_slots: int | None = Field(
        default=None, ge=1, description="Most slots to hold at once; by default what the run may have"
    )
    farm_route: Literal["auto", "direct", "relay"] = Field(
        default="auto",
        description="How containers are reached; auto: directly, or through the relay",
    )


def refuse_farm_contradictions(config: AgentFields) -> None:
    """Raises ConfigError for settings that contradict tool_pool_mode."""
    if config.tool_pool_mode != "farm":
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


def check_farm(info: FarmInfo, config: AgentFields) -> None:
    """Raises ConfigError when the farm's containers are not as the environment needs them."""
    if config.allow_network and not info.allow_network:
        raise ConfigError(
            "allow_network", f"farm {info.farm!r} gives its slots no network", next_step="use another farm"
        )
    if config.require_sandbox is not False and not info.require_sandbox:
        raise ConfigError(
            "require_sandbox",
            f"farm {info.farm!r} accepts containers that isolate less than promised",
            next_step="accept that with require_sandbox=false, or use another farm",
        )


async def expect_in_slots(sessions: SessionOpener, binds: Sequence[Bind], env: Mapping[str, str]) -> None:
    """For an environment whose ``build_backend`` gives its own containers binds and variables: a farm's must have the
    same. Raises ConfigError with the lines that the farm's file lacks; InfraError."""
    checks = [f"[ -e {shlex.quote(bind.target)} ]" for bind in binds]
    checks += [f'[ "${name}" = {shlex.quote(value)} ]' for name, value in env.items()]
    async with sessions.open("setup") as session:
        found = await ToolContext(session).terminal(" && ".join(checks))
    if found.exit_code == 0:
        return
    paths = ", ".join(f'"{bind.source}:{bind.target}"' for bind in binds)
    values = ", ".join(f'{name} = "{value}"' for name, value in env.items())
    raise ConfigError(
        "tool_pool_mode",
        "the slots of this farm lack what the environment needs in them",
        next_step=f"let [containers] in its file have binds = [{paths}] and env = {{ {values} }}; containers that run "
        "already stay as they are",
    )


def slots_of(info: FarmInfo, config: AgentFields) -> int:
    """How many slots the environment may hold at once. Raises SandboxUnavailableError when that is none."""
    caps = [info.max_slots, config.farm_max_slots, info.run.share.cap if info.run is not None else None]
    most = min(cap for cap in caps if cap is not None)
    if most <= config.hook_slots:
        raise SandboxUnavailableError(
            f"the run may have {most} slots of farm {info.farm!r}, of which hooks have {config.hook_slots}",
            next_step="have its cap raised, or lower hook_slots",
        )
    return most


@asynccontextmanager
async def farm_pool(config: AgentFields, environment: str) -> AsyncIterator[FarmPool]:
    """An open pool of the farm that the config names. Raises FarmUnreachableError, or ConfigError when the farm refuses
    the token or is not as the environment needs it."""
    access = farm_access(config.farm_url, config.farm_token, config.farm_run, config.farm_route)
    tags = Tags(environment=short_tag(environment))
    async with FarmPool(access, tags=tags, settings=config.pool_settings()) as pool:
        assert pool.info is not None
        check_farm(pool.info, config)
        yield pool
