"""Opens a farm for one verb: backend, pool and executor, closed in reverse order."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

from agentenv.config import ContainerSettings, PoolSettings, no_such_setting, setting_names
from agentenv.containers.control import ContainerControl
from agentenv.deadlines import START_TIMEOUT_S
from agentenv.errors import ConfigError, SandboxUnavailableError
from agentenv.executor.session import ToolSession
from agentenv.executor.tool_executor import ToolExecutor
from agentenv.farm.access import access_to
from agentenv.farm.look import containers_seen
from agentenv.farm.view import Census
from agentenv.farm_client.access import FarmAccess, farm_access
from agentenv.farm_client.pool import FarmPool
from agentenv.slots.backends.attached import AttachedBackend
from agentenv.slots.backends.registry import Backend, make_backend
from agentenv.slots.pool import SlotPool
from agentenv.tools.catalog import ToolCatalog
from agentenv.wire.leases import Tags
from agentenv.wire.server import ServerInfo
from agentenv.wire.spec import SlotLimits
from agentenv.wire.states import SlotState

_OF_CONTAINER = "--own, --network, --isolation, --memory, --storage, --set"
_ATTACHED_MOST = 4
"""Maximum number of a farm's containers that one command uses: enough for one slot, whatever fails."""


def named_settings(assignments: Iterable[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fields of ContainerSettings and of PoolSettings from what ``--set`` was given: ``NAME=VALUE`` with a TOML value,
    where quotes of text may be left out; ``limits.NAME`` is a limit. Raises ConfigError."""
    limits = [f"limits.{limit.name}" for limit in dataclasses.fields(SlotLimits)]
    container: dict[str, Any] = {}
    pool: dict[str, Any] = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals:
            raise ConfigError("--set", f"got {assignment!r}", next_step="allowed: NAME=VALUE")
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text
        if name in PoolSettings.model_fields:
            pool[name] = value
        elif name in limits:
            container.setdefault("limits", {})[name.removeprefix("limits.")] = value
        elif name in ContainerSettings.model_fields and name != "limits":
            container[name] = value
        else:
            raise no_such_setting(name, [*setting_names(ContainerSettings), *setting_names(PoolSettings)])
    return container, pool


@asynccontextmanager
async def open_farm(
    container: ContainerSettings,
    backend: Backend,
    *,
    own: bool,
    job: str | None = None,
    service: bool = False,
    guest: bool = False,
    start_timeout_s: float = START_TIMEOUT_S,
) -> AsyncIterator[ToolExecutor]:
    """Slots of the running farm (``agentenv up``, or a Nomad job); otherwise, or with ``own``, of one container
    started for this command, within ``start_timeout_s``; with ``service``, of the farm service that
    :func:`farm_access` finds. ``guest``: whoever controls a job's containers, beside it. Leaving never stops a farm's
    containers.

    Raises SandboxUnavailableError (cause and cure named), ConfigError when ``own`` is used with Nomad.
    """
    if service:
        if own:
            raise ConfigError(_OF_CONTAINER, "cannot be set with --farm", next_step="leave out --farm")
        async with _of_service(farm_access()) as executor:
            yield executor
        return
    if backend is Backend.nomad and own:
        raise ConfigError(
            _OF_CONTAINER,
            "cannot be changed for a running Nomad farm",
            next_step="without --backend nomad the container runs on this machine; a farm with network is "
            "`agentenv up --backend nomad --network`",
        )
    if not own:
        census = await access_to(backend, job).census()
        if census.exists:
            taken = _of_service(census.service) if census.service is not None else _attached(census, guest=guest)
            async with taken as executor:
                yield executor
            return
        if backend is Backend.nomad:
            raise SandboxUnavailableError(f"{census.where}: no farm is running there", next_step=census.next_step)
    async with open_executor(container, backend, start_timeout_s=start_timeout_s) as executor:
        yield executor


@asynccontextmanager
async def _of_service(access: FarmAccess) -> AsyncIterator[ToolExecutor]:
    """Tools in slots that a farm service grants."""
    async with (
        FarmPool(access, tags=Tags(environment="agentenv exec")) as pool,
        ToolExecutor(pool, ToolCatalog.builtin()) as executor,
    ):
        yield executor


@asynccontextmanager
async def _attached(census: Census, *, guest: bool) -> AsyncIterator[ToolExecutor]:
    """Tools in slots of an existing farm, using the few containers with the most free slots."""
    seen = [container for container in await containers_seen(census) if container.answers]
    seen.sort(key=lambda container: -container.count(SlotState.free))
    handles = [
        dataclasses.replace(container.place.handle, slots=len(container.slots))
        for container in seen[:_ATTACHED_MOST]
        if container.place.handle is not None
    ]
    if not handles:
        why = "; ".join(census.waiting_for) or "none of its containers responds"
        raise SandboxUnavailableError(f"{census.where}: {why}", next_step="see `agentenv status`")
    fixed = PoolSettings(min_containers=len(handles), max_containers=len(handles))
    async with (
        SlotPool(AttachedBackend(handles), fixed, guest=guest) as pool,
        ToolExecutor(pool, ToolCatalog.builtin()) as executor,
    ):
        yield executor


@asynccontextmanager
async def open_executor(
    container: ContainerSettings, backend: Backend = Backend.local, *, start_timeout_s: float = START_TIMEOUT_S
) -> AsyncIterator[ToolExecutor]:
    """One container on this machine, started within ``start_timeout_s``, with an executor for tool calls. Leaving stops
    everything it started.

    Raises SandboxUnavailableError (cause and cure named) when no container can serve here.
    """
    source = make_backend(backend.value, container, field="--backend", start_timeout_s=start_timeout_s)
    one = PoolSettings(min_containers=1, max_containers=1, start_timeout_s=start_timeout_s)
    async with (
        SlotPool(source, one) as pool,  # it opens and closes its backend
        ToolExecutor(pool, ToolCatalog.builtin()) as executor,
    ):
        yield executor


async def describe(session: ToolSession) -> ServerInfo:
    """The isolation of the session's container, where it is weaker, and its proofs."""
    async with ContainerControl(session.lease.container) as control:
        return await control.info()
