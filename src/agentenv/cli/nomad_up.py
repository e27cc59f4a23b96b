"""``agentenv up --backend nomad``: register or scale the job, wait until its containers answer, leave it running."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from agentenv.cli.progress import Arrival
from agentenv.config import ContainerSettings, NomadSettings
from agentenv.farm.look import look
from agentenv.farm.nomad import NomadFarm, OperatorApi
from agentenv.farm.view import as_json
from agentenv.slots.backends.base import ContainerBackend
from agentenv.slots.backends.registry import make_backend


async def bring_up(
    containers: ContainerSettings, count: int, timeout_s: float, named: Mapping[str, object]
) -> dict[str, Any]:
    """Return what ``agentenv status --json`` shows once all containers answer. ``named``: NomadSettings; None means
    the default.

    Raises SandboxUnavailableError when they do not answer in time, or cannot: the job stays, and Nomad keeps
    trying.
    """
    settings = NomadSettings.from_environment(**named, run_name="agentenv up", purge_job_on_shutdown=False)
    backend = make_backend("nomad", containers, nomad=settings, start_timeout_s=timeout_s, reshape=True)
    with Arrival(count, "asking Nomad") as arrival:
        async with backend:
            async with OperatorApi.opened(settings) as api:
                await api.keep(settings.job_id, kept=True)  # so that gc knows it was left on purpose, however up ends
            await backend.scale(count)
            arrival.describe("containers")
            reader = asyncio.create_task(_read(backend, arrival), name="events of up")
            try:
                await arrival.complete(timeout_s)
            finally:
                reader.cancel()
                await asyncio.gather(reader, return_exceptions=True)
    return as_json(await look(NomadFarm(settings)))


async def _read(backend: ContainerBackend, arrival: Arrival) -> None:
    async for event in backend.events():
        arrival.handle(event)
