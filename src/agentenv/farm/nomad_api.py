"""Nomad requests for operators, in addition to those of the backend."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Self

import aiohttp

from agentenv.config import NomadSettings
from agentenv.slots.backends.nomad import facts
from agentenv.slots.backends.nomad.api import KEPT, VARIABLES, NomadApi
from agentenv.slots.backends.nomad.backend import checked_address
from agentenv.slots.backends.nomad.explain import NomadError, opening_error
from agentenv.slots.backends.nomad.stream import open_stream_session


@dataclass(frozen=True)
class JobVariable:
    """``items``: ``token``, and ``kept`` if the farm was left running on purpose. ``age_s``: time since it was last
    written."""

    items: Mapping[str, str]
    age_s: float

    @property
    def token(self) -> str | None:
        """The containers' bearer token."""
        return self.items.get("token")


class OperatorApi(NomadApi):
    """The requests of ``agentenv status``, ``down``, ``logs`` and ``gc``. Every method raises NomadError."""

    async def node_names(self) -> dict[str, str]:
        """Every node's name by its id; empty if the token may not read them."""
        try:
            return {raw["ID"]: raw.get("Name") or "" for raw in await self._run(lambda c: c.nodes.get_nodes())}
        except NomadError as error:
            if error.status != 403:
                raise
            return {}

    async def created_at(self) -> dict[str, float]:
        """Creation time of each allocation of the job by its id, in seconds since the epoch."""
        found = await self._run(lambda c: c.job.get_allocations(self.settings.job_id))
        return {raw["ID"]: (raw.get("CreateTime") or 0) / 1e9 for raw in found}

    async def variable(self, job_id: str) -> JobVariable | None:
        """A job's variable; None if there is none."""
        space = self.settings.namespace
        kept = await self._run(lambda c: c.variable.get_variable(VARIABLES + job_id, namespace=space), missing=True)
        if kept is None:
            return None
        items = {str(name): str(value) for name, value in (kept.get("Items") or {}).items()}
        return JobVariable(items, max(0.0, time.time() - (kept.get("ModifyTime") or 0) / 1e9))

    async def keep(self, job_id: str, *, kept: bool) -> None:
        """Set or clear the mark that the farm was left running on purpose."""
        variable = await self.variable(job_id)
        items = variable.items if variable is not None else {}
        wanted = {name: value for name, value in items.items() if name != KEPT} | ({KEPT: "up"} if kept else {})
        if wanted != items:
            path = VARIABLES + job_id
            body = {"Path": path, "Namespace": self.settings.namespace, "Items": wanted}
            await self._run(lambda c: c.variable.create_variable(path, body, namespace=self.settings.namespace))

    async def variable_owners(self) -> list[str]:
        """Ids of jobs that have a variable."""
        space = self.settings.namespace
        found = await self._run(lambda c: c.variables.get_variables(prefix=VARIABLES, namespace=space))
        paths = [str(raw["Path"]).removeprefix(VARIABLES) for raw in found]
        return [path for path in paths if path and "/" not in path]

    async def whole_job(self, job_id: str) -> Mapping[str, Any] | None:
        """A job as registered; None if it is not."""
        job: Mapping[str, Any] | None = await self._run(lambda c: c.job.get_job(job_id), missing=True)
        return job

    async def status_of(self, allocation_id: str) -> str | None:
        """An allocation's client status; None if it is unknown to Nomad."""
        raw = await self._run(lambda c: c.allocation.get_allocation(allocation_id), missing=True)
        return None if raw is None else facts.allocation(raw).client

    @classmethod
    @asynccontextmanager
    async def opened(cls, settings: NomadSettings) -> AsyncIterator[Self]:
        """Open a client that gets an answer. Errors in the block are raised with a next step."""
        address = checked_address(settings.address)
        api = cls(settings, address)
        try:
            await api.check_access()
            yield api
        except NomadError as error:
            raise opening_error(error, address, settings.namespace, settings.token is not None) from error
        finally:
            await api.aclose()


async def follow_log(settings: NomadSettings, allocation_id: str, *, tail_bytes: int) -> AsyncIterator[str]:
    """Lines that an allocation's task writes to standard error, until its end. Raises NomadError."""
    params = {
        "task": facts.TASK, "type": "stderr", "origin": "end", "offset": str(tail_bytes), "plain": "true",
        "follow": "true", "namespace": settings.namespace, **({"region": settings.region} if settings.region else {}),
    }  # fmt: skip
    url = f"{checked_address(settings.address)}/v1/client/fs/logs/{allocation_id}"
    headers = {"X-Nomad-Token": settings.token} if settings.token else {}
    try:
        async with (
            open_stream_session(settings) as session,
            session.get(
                url, params=params, headers=headers, timeout=aiohttp.ClientTimeout(total=None),
                server_hostname=settings.tls_server_name if url.startswith("https:") else None,
                allow_redirects=False,  # the token is for this address only
            ) as reply,
        ):  # fmt: skip
            if reply.status != 200:
                raise NomadError(reply.status, f"no log of {allocation_id[:8]}: {(await reply.text()).strip()[:300]}")
            async for line in reply.content:
                yield line.decode("utf-8", "replace").rstrip("\n")
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise NomadError(0, f"the log of {allocation_id[:8]} broke off: {error or type(error).__name__}") from error
