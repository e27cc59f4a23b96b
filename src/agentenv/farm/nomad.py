"""A farm that is a Nomad job, seen from outside: its state in Nomad, and its containers' addresses."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Self

import aiohttp

from agentenv.config import NomadSettings
from agentenv.containers.handle import ContainerHandle
from agentenv.errors import AgentEnvError, ConfigError
from agentenv.farm.view import Census, Place, choose
from agentenv.slots.backends.nomad import facts
from agentenv.slots.backends.nomad.api import KEPT, VARIABLES, NomadApi, open_stream_session
from agentenv.slots.backends.nomad.backend import checked_address
from agentenv.slots.backends.nomad.ending import end_job
from agentenv.slots.backends.nomad.explain import NomadError, end_of, failed_event, opening_error, placement
from agentenv.slots.backends.nomad.owner import JobOwner


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


_FAULTS_SHOWN = 5
_ADDRESSES_AT_ONCE = 8
_LOG_LINE_BYTES = 160
"""Nomad reads logs by bytes: this many are requested per line to show."""


class NomadFarm:
    """The allocations of one job."""

    def __init__(self, settings: NomadSettings) -> None:
        self.settings = settings

    @classmethod
    def from_options(cls, job: str | None) -> Self:
        """The given job, at the cluster of the NOMAD_* variables. Raises ConfigError."""
        return cls(NomadSettings.from_environment(job_id=job))

    @property
    def where(self) -> str:
        """The job and its cluster."""
        settings = self.settings
        return f"Nomad job {settings.job_id} ({settings.namespace}) at {settings.address}"

    async def census(self) -> Census:
        """See :class:`OperatorAccess`."""
        async with OperatorApi.opened(self.settings) as api:
            job = await api.job()
            if job is None or job.stopped:
                flag = f" --job {self.settings.job_id}" if self.settings.job_id != NomadSettings().job_id else ""
                return Census(
                    "nomad", self.where, exists=False, next_step=f"start one: `agentenv up --backend nomad{flag}`"
                )
            snapshot, names, variable, created, lock = await asyncio.gather(
                api.snapshot(), api.node_names(), api.variable(self.settings.job_id), api.created_at(), api.lock()
            )
            alive = [one for one in snapshot.allocations if not _ended(one)]
            token = variable.token if variable is not None else None
            places = await self._places(api, alive, names, token, created)
        waiting = waiting_for(snapshot)
        if token is None:
            waiting.append("the containers cannot be queried: the job's Nomad variable has no item `token`")
        return Census(
            "nomad",
            self.where,
            exists=True,
            goal=job.count,
            places=places,
            waiting_for=tuple(waiting),
            faults=_faults(snapshot),
            owner=str(lock.holder) if lock is not None else "",
        )

    async def _places(
        self,
        api: OperatorApi,
        allocations: list[facts.Allocation],
        names: Mapping[str, str],
        token: str | None,
        created: Mapping[str, float],
    ) -> tuple[Place, ...]:
        gate = asyncio.Semaphore(_ADDRESSES_AT_ONCE)

        async def place(one: facts.Allocation) -> Place:
            running = one.client == "running" and one.task_state == "running"
            if running and one.address is None:  # lists leave addresses out
                async with gate:
                    one = await api.allocation(one.id)
            place = _place(one, names.get(one.node, one.node[:8]), token if running else None)
            began = created.get(one.id)
            return place if began is None else dataclasses.replace(place, age_s=max(0.0, time.time() - began))

        return tuple(await asyncio.gather(*map(place, allocations)))

    async def down(self) -> str:
        """See :class:`OperatorAccess`. Raises JobOwnedError while a run works on it, SandboxUnavailableError when its
        containers do not end."""
        async with OperatorApi.opened(self.settings) as api:
            known = await api.job() is not None
            async with owned(api, "agentenv down"):
                await end_job(api)
                await api.forget_token()
        return f"purged {self.where} and its token" if known else f"{self.where}: no farm is running there"

    async def logs(self, container: str | None, *, tail: int, follow: bool) -> AsyncIterator[tuple[str, str]]:
        """Lines of standard error, each with its allocation. Raises ConfigError when there is no such container."""
        async with OperatorApi.opened(self.settings) as api:
            found = [one for one in (await api.snapshot()).allocations if container is not None or not _ended(one)]
            chosen = _chosen(found, container, self.where)
            if not follow:
                for one in chosen:
                    for line in await _log(api, one, tail) if tail else []:
                        yield one.id, line if len(chosen) == 1 else f"{one.id[:8]} {line}"
                return
        async for identity, line in self._follow(chosen, tail):
            yield identity, line if len(chosen) == 1 else f"{identity[:8]} {line}"

    async def _follow(self, chosen: list[facts.Allocation], tail: int) -> AsyncIterator[tuple[str, str]]:
        """Several logs merged, until all have ended."""
        lines: asyncio.Queue[tuple[str, str | None]] = asyncio.Queue(maxsize=1000)

        async def read(one: facts.Allocation) -> None:
            try:
                async for line in follow_log(self.settings, one.id, tail_bytes=tail * _LOG_LINE_BYTES):
                    await lines.put((one.id, line))
            except AgentEnvError as error:
                await lines.put((one.id, f"({error.message})"))
            await lines.put((one.id, None))

        readers = [asyncio.create_task(read(one), name=f"log of {one.id}") for one in chosen]
        try:
            going = len(readers)
            while going:
                identity, line = await lines.get()
                if line is None:
                    going -= 1
                else:
                    yield identity, line
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)


async def _log(api: OperatorApi, one: facts.Allocation, tail: int) -> list[str]:
    """The last lines of its standard error, and the reason why it refused to serve, which is only on standard
    output."""
    lines = (await api.log_tail(one.id, "stderr")).splitlines()
    if _ended(one) and (event := failed_event(await api.log_tail(one.id, "stdout"))) is not None:
        lines.append(f"it did not become ready: {event.reason}" + (f" ({event.next_step})" if event.next_step else ""))
    return lines[-tail:]


@asynccontextmanager
async def owned(api: OperatorApi, verb: str, *, wait: bool = True) -> AsyncIterator[None]:
    """Own the job of ``api`` during the block. Raises what :meth:`JobOwner.acquire` raises."""
    owner = JobOwner(api, verb)
    try:
        await owner.acquire(wait=wait)
        yield
    finally:
        await owner.release()


def waiting_for(snapshot: facts.Snapshot) -> list[str]:
    """Why containers are missing, in Nomad's terms: unplaced, slow to start, or draining."""
    problems = []
    blocked = [one for one in snapshot.evaluations if one.status in ("blocked", "complete")]
    latest = max(blocked, key=lambda one: one.modify_index, default=None)
    if latest is not None and latest.failures:
        unplaced = placement(latest.failures)
        problems.append(f"{unplaced.reason} ({unplaced.next_step})" if unplaced.next_step else unplaced.reason)
    for one in snapshot.allocations:
        if one.desired == "run" and one.client == "pending":
            last = one.events[-1] if one.events else None
            latest_word = f"{last.kind}: {last.message}" if last else "no Nomad client has started it yet"
            problems.append(f"container {one.id[:8]} is starting: {latest_word}")
    problems += [f"node {node.name or node.id[:8]} is being drained" for node in snapshot.nodes if node.draining]
    return problems


def _faults(snapshot: facts.Snapshot) -> tuple[str, ...]:
    """The latest unexpected ends."""
    ended = [one for one in snapshot.allocations if one.client in ("failed", "lost")]
    ended.sort(key=lambda one: one.modify_index)
    return tuple(f"container {one.id[:8]} {one.client}: {end_of(one)}" for one in ended[-_FAULTS_SHOWN:])


def _place(one: facts.Allocation, node: str, token: str | None) -> Place:
    handle = None
    if one.address is not None and token is not None:
        handle = ContainerHandle(
            id=one.container, index=one.index, base_url=f"http://{one.address}", token=token, slots=0
        )
    state = one.client if one.desired == "run" and not one.migrating else "draining"
    last = one.events[-1] if one.events else None
    return Place(one.container, one.index, state, node, f"{last.kind}: {last.message}" if last else "", handle)


def _ended(one: facts.Allocation) -> bool:
    return one.client in ("complete", "failed") or (one.client == "lost" and one.desired != "run")


def _chosen(found: list[facts.Allocation], container: str | None, where: str) -> list[facts.Allocation]:
    if container is None:
        if not found:
            raise ConfigError("logs", f"{where} has no container", next_step="see `agentenv status`")
        return sorted(found, key=lambda one: one.index)
    newest = sorted(found, key=lambda one: -one.modify_index)
    by_index = {one.index: one for one in reversed(newest)}
    if container.isdigit() and int(container) in by_index:
        return [by_index[int(container)]]
    place = choose([(one.id, one) for one in newest], container)
    if place is None:
        raise ConfigError("CONTAINER", f"{where} has no container {container!r}", next_step="see `agentenv status`")
    return [place]
