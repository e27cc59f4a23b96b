"""The slots of an environment: a pool of its own, or with ``tool_pool_mode="farm"`` those of a farm service.

The farm then configures the containers, and the run's share limits the slots.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from agentenv.agent.hooks import outside_rollouts
from agentenv.agent.protocols import SessionOpener
from agentenv.env.config import AgentFields
from agentenv.errors import ConfigError, SandboxUnavailableError
from agentenv.farm_client.access import farm_access
from agentenv.farm_client.pool import FarmPool
from agentenv.sdk.tool_context import ToolContext
from agentenv.slots.backends.base import ContainerBackend
from agentenv.slots.pool import SlotPool
from agentenv.wire.farm import FarmInfo
from agentenv.wire.leases import Tags, short_tag
from agentenv.wire.spec import Bind

logger = logging.getLogger(__name__)


def check_farm(info: FarmInfo, config: AgentFields) -> None:
    """Raises ConfigError when the farm's containers are not as the environment needs them, SandboxUnavailableError when
    there are none, and none can be started."""
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
    if info.problem and not info.load.slots:
        raise SandboxUnavailableError(f"farm {info.farm!r} has no slots: {info.problem}")


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
        "this farm's slots miss binds or variables that the environment needs",
        next_step=f"set binds = [{paths}] and env = {{ {values} }} in [containers] of its file; running containers "
        "do not change",
    )


def slots_of(info: FarmInfo, config: AgentFields) -> int:
    """How many slots the environment may hold at once. Raises SandboxUnavailableError when that is none."""
    caps = [info.max_slots, config.farm_max_slots, info.run.share.cap if info.run is not None else None]
    most = min(cap for cap in caps if cap is not None)
    if most <= config.hook_slots:
        raise SandboxUnavailableError(
            f"hook_slots={config.hook_slots} leaves no slot: the run's cap on farm {info.farm!r} is {most}",
            next_step="lower hook_slots, or raise the cap",
        )
    return most


@asynccontextmanager
async def farm_pool(config: AgentFields, environment: str) -> AsyncIterator[FarmPool]:
    """An open pool of the farm that the config names. Raises FarmUnreachableError, or ConfigError when the farm refuses
    the token or is not as the environment needs it."""
    access = farm_access(config.farm_url, config.farm_token, config.farm_run, config.farm_route, run_here=environment)
    tags = Tags(environment=short_tag(environment))
    async with FarmPool(access, tags=tags, settings=config.pool_settings()) as pool:
        assert pool.info is not None
        check_farm(pool.info, config)
        yield pool


async def open_pool(
    stack: AsyncExitStack, config: AgentFields, environment: str, build: Callable[[], ContainerBackend], *, own: bool
) -> tuple[SlotPool | FarmPool, int, float | None]:
    """An open pool, how many slots there are for rollouts, and how long to wait for one. Of a pool of our own a slot
    has worked; on a farm all may be in use. ``build``: the hook ``build_backend``, which is the environment's ``own``
    or not."""
    if config.tool_pool_mode == "farm":
        if own:
            logger.warning("on a farm build_backend() is not called: the farm's file configures the containers")
        shared = await stack.enter_async_context(farm_pool(config, environment))
        assert shared.info is not None
        # A full farm is no failure: its pool knows when waiting is in vain.
        return shared, slots_of(shared.info, config), None
    with outside_rollouts("build_backend"):
        backend = build()
    pool = await stack.enter_async_context(SlotPool(backend, config.pool_settings()))
    async with await pool.lease("setup", timeout_s=config.start_timeout_s):
        pass
    return pool, config.max_containers * config.slots_per_container, config.acquire_timeout_s
