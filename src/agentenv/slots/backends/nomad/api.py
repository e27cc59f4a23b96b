"""The few requests to Nomad that the backend makes, in threads. No decisions.

python-nomad is synchronous (``requests``); the event stream, which must be cancellable and must tell
silence from death, is not read through it (see :class:`EventStream`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import aiohttp
import nomad

from agentenv.config import NomadSettings
from agentenv.deadlines import scaled
from agentenv.errors import ConfigError
from agentenv.slots.backends.nomad import facts
from agentenv.slots.backends.nomad.client import NomadClient, Reply
from agentenv.slots.backends.nomad.explain import NomadError
from agentenv.slots.backends.nomad.lock_owner import LockOwner

logger = logging.getLogger(__name__)

_THREADS = 4
"""Requests at once: Nomad's servers have others to serve."""
_SLOW_S = scaled(30)
"""Timeout for parsing and registering: the scheduler of a small cluster may be busy."""
_LOG_BYTES = 16 * 1024
_LOCK_TTL, _LOCK_DELAY = "10s", "2s"
"""The smallest TTL that Nomad accepts."""
_LOCK_TIMEOUT_S = 5


VARIABLES = "nomad/jobs/"
"""Path prefix of jobs' variables in Nomad, followed by the job's id."""
KEPT = "kept"
"""Item of the job's Nomad variable that marks a farm as kept beyond its users."""


@dataclass(frozen=True)
class Lock:
    """A job's lock that is held. ``index``, of Nomad's log, grows with every write of the holder."""

    id: str
    index: int
    holder: LockOwner


class NomadApi:
    """One cluster, one namespace, one job. Every method raises NomadError; close it with aclose()."""

    def __init__(self, settings: NomadSettings, address: str) -> None:
        self.settings = settings
        self.address = address
        self.not_ours: Callable[[], str] = str
        """Why the job must not be changed at the moment; empty if it may. Set by the job's owner, if there is one."""
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="nomad-api")
        self._client = NomadClient(settings, address, connections=_THREADS)

    async def aclose(self) -> None:
        """End the threads, each at its request's deadline at the latest. May be repeated."""
        await asyncio.to_thread(self._threads.shutdown, wait=True, cancel_futures=True)
        self._client.close()

    # -- the cluster ----------------------------------------------------------------------------

    async def check_access(self) -> None:
        """Check that server, namespace and token are valid."""
        await self._run(lambda c: c.namespace.get_namespace(self.settings.namespace))

    async def node(self, node_id: str) -> facts.Node:
        """One client, including its drain's deadline."""
        return facts.node(await self._run(lambda c: c.node.get_node(node_id)))

    # -- the job --------------------------------------------------------------------------------

    async def parse(self, text: str, variables: str) -> dict[str, Any]:
        """The job file as JSON. python-nomad's own parse() does not support variables."""
        body = {"JobHCL": text, "Canonicalize": True, "Variables": variables}
        job: dict[str, Any] = await self._run(
            lambda c: c.jobs.request("parse", json=body, method="post", timeout=_SLOW_S).json()
        )
        return job

    async def register(self, job: Mapping[str, Any]) -> None:
        """Register the job; the count of one that exists is kept."""
        body = {"Job": job, "PreserveCounts": True}
        await self._change(lambda c: c.jobs.request(json=body, method="post", timeout=_SLOW_S))

    async def job(self) -> facts.Job | None:
        """The job as registered; None if there is none."""
        try:
            return facts.job(await self._run(lambda c: c.job.get_job(self.settings.job_id)))
        except NomadError as error:
            if error.status == 404:
                return None
            raise

    async def standing(self) -> Mapping[str, Any] | None:
        """The whole job as registered; None if there is none, or it is stopped."""
        found: Mapping[str, Any] | None = await self._run(lambda c: c.job.get_job(self.settings.job_id), missing=True)
        return None if found is None or found.get("Stop") else found

    async def scale(self, count: int, why: str) -> int:
        """Change the count; returns the job's new index."""
        body = {"Count": count, "Target": {"Group": facts.GROUP}, "Message": why}
        job_id = self.settings.job_id
        reply = await self._change(lambda c: c.job.request(job_id, "scale", json=body, method="post").json())
        return int(reply.get("JobModifyIndex") or 0)

    async def deregister(self, *, purge: bool) -> None:
        """Stop the job, without its shutdown delay; ``purge``: forget it too. One that does not exist is no error.

        A purged job's allocations are forgotten at once, before their containers have ended: see :func:`end_job`.
        """
        params = {"purge": str(purge).lower(), "no_shutdown_delay": "true"}
        await self._change(
            lambda c: c.job.request(self.settings.job_id, params=dict(params), method="delete"), missing=True
        )

    async def reschedule(self) -> None:
        """Replace failed allocations now."""
        body = {"JobID": self.settings.job_id, "EvalOptions": {"ForceReschedule": True}}
        await self._change(lambda c: c.job.request(self.settings.job_id, "evaluate", json=body, method="post"))

    async def snapshot(self) -> facts.Snapshot:
        """The whole state of the job. The first request determines the index: later answers are not older."""
        job_id = self.settings.job_id
        response = await self._run(lambda c: c.job.request(job_id, "allocations", method="get"))
        index = int(response.headers.get("X-Nomad-Index") or 0)
        allocations = tuple(facts.allocation(raw) for raw in response.json())
        evaluations = await self._run(lambda c: c.job.get_evaluations(job_id))
        return facts.Snapshot(
            index=index,
            allocations=allocations,
            nodes=await self._nodes({one.node for one in allocations if one.desired == "run"}),
            evaluations=tuple(facts.evaluation(raw) for raw in evaluations),
            job=await self.job(),
        )

    async def _nodes(self, used: set[str]) -> tuple[facts.Node, ...]:
        try:
            nodes = [facts.node(raw) for raw in await self._run(lambda c: c.nodes.get_nodes()) if raw["ID"] in used]
            return tuple([await self.node(one.id) if one.draining else one for one in nodes])
        except NomadError as error:
            if error.status != 403:
                raise
            # Without node:read a drain is seen when Nomad migrates the allocation.
            return ()

    # -- allocations ----------------------------------------------------------------------------

    async def allocation(self, allocation_id: str) -> facts.Allocation:
        """One allocation, including its address."""
        return facts.allocation(await self._run(lambda c: c.allocation.get_allocation(allocation_id)))

    async def left_over(self) -> int:
        """Allocations of any incarnation of the job whose tasks have not ended yet."""
        wanted = f'JobID == "{self.settings.job_id}" and (ClientStatus == "running" or ClientStatus == "pending")'
        return len(await self._run(lambda c: c.allocations.get_allocations(filter_=wanted)))

    async def stop(self, allocation_id: str) -> None:
        """Stop an allocation without its shutdown delay. A missing one is not an error."""
        params = {"no_shutdown_delay": "true"}
        await self._change(
            lambda c: c.allocation.request(allocation_id, "stop", params=dict(params), method="post"), missing=True
        )

    async def log_tail(self, allocation_id: str, stream: str) -> str:
        """The end of its task's ``stdout`` or ``stderr``; empty when it is not available."""
        params = {"task": facts.TASK, "type": stream, "origin": "end", "offset": _LOG_BYTES, "plain": "true"}
        try:
            text: str = await self._run(
                lambda c: c.client.stream_logs.request(allocation_id, params=dict(params), method="get").text
            )
        except NomadError as error:
            logger.debug("no %s of %s: %s", stream, allocation_id, error)
            return ""
        return text

    # -- the token ------------------------------------------------------------------------------

    async def agree_on_token(self, proposal: str) -> str:
        """The job's bearer token: the one in the job's Nomad variable, else ``proposal``, which is then stored
        there."""
        # python-nomad knows that variables have namespaces, but ignores the namespace it was given
        path, space = VARIABLES + self.settings.job_id, self.settings.namespace
        payload = {"Path": path, "Namespace": space, "Items": {"token": proposal}}
        try:
            # cas=0: only if there is none. Whoever comes second takes the first one's.
            await self._run(lambda c: c.variable.create_variable(path, payload, namespace=space, cas=0))
            return proposal
        except NomadError as error:
            if error.status != 409:
                raise
        token = (await self._items(missing=False)).get("token")
        if not token:
            raise NomadError(
                409, f"the Nomad variable {path} has no item `token`", next_step=f"`nomad var purge {path}`"
            )
        return str(token)

    async def is_kept(self) -> bool:
        """Whether an operator left the farm running on purpose (``agentenv up`` marks it in the job's variable)."""
        return KEPT in await self._items(missing=True)

    async def _items(self, *, missing: bool) -> Mapping[str, str]:
        """The items of the job's variable. With ``missing``, a missing variable is empty."""
        path, space = VARIABLES + self.settings.job_id, self.settings.namespace
        found = await self._run(lambda c: c.variable.get_variable(path, namespace=space), missing=missing)
        return (found or {}).get("Items") or {}

    async def forget_token(self) -> None:
        """Remove the job's variable."""
        path, space = VARIABLES + self.settings.job_id, self.settings.namespace
        await self._change(lambda c: c.variable.delete_variable(path, namespace=space), missing=True)

    # -- the owner's lock -----------------------------------------------------------------------

    async def take_lock(self, items: Mapping[str, str], lock_id: str | None) -> Lock | None:
        """Take the job's lock, or keep it (``lock_id``) with new items; None from a Nomad without locks. Status 409:
        somebody else holds it."""
        lock: dict[str, str] = {"TTL": _LOCK_TTL, "LockDelay": _LOCK_DELAY}  # a write without them resets both
        if lock_id is not None:
            lock["ID"] = lock_id
        reply = await self._lock_request("lock-acquire", {"Items": dict(items), "Lock": lock})
        taken: str | None = (reply.get("Lock") or {}).get("ID")
        if taken is None:
            return None
        if taken == lock_id:
            # A write alone leaves the holder one TTL, a renewal two.
            await self._lock_request("lock-renew", {"Lock": {"ID": taken}})
        return Lock(taken, int(reply["ModifyIndex"]), LockOwner.of(items))

    async def renew_lock(self, lock_id: str) -> bool:
        """Whether Nomad has not freed the lock since it was taken; then it is kept."""
        try:
            await self._lock_request("lock-renew", {"Lock": {"ID": lock_id}})
        except NomadError as error:
            if error.status not in (404, 409):
                raise
            return False
        return True

    async def unlock(self, lock_id: str) -> None:
        """Release the job's lock. Status 409: it is held by another, or by nobody."""
        await self._lock_request("lock-release", {"Lock": {"ID": lock_id}})

    async def lock(self) -> Lock | None:
        """The holder of the job's lock; None if nobody holds it."""
        path, space = self.owner_path, self.settings.namespace
        found = await self._run(lambda c: c.variable.get_variable(path, namespace=space), missing=True)
        held = (found or {}).get("Lock")
        if not held:
            return None
        return Lock(held["ID"], int(found["ModifyIndex"]), LockOwner.of(found.get("Items") or {}))

    async def forget_owner(self) -> None:
        """Remove the last owner's items, unless there is another owner."""
        path, space = self.owner_path, self.settings.namespace
        try:
            await self._run(lambda c: c.variable.delete_variable(path, namespace=space), missing=True)
        except NomadError as error:
            if error.status != 409:
                raise

    @property
    def owner_path(self) -> str:
        """Path of the variable whose lock the job's owner holds."""
        return f"{VARIABLES}{self.settings.job_id}/owner"

    async def _lock_request(self, verb: str, body: Mapping[str, object]) -> dict[str, Any]:
        path, space = self.owner_path, self.settings.namespace
        whole = {"Path": path, "Namespace": space, **body}
        params = {verb: "", "namespace": space}
        reply: dict[str, Any] = await self._run(
            lambda c: c.variable.request(
                path, params=dict(params), json=whole, method="put", timeout=_LOCK_TIMEOUT_S
            ).json()
        )
        return reply

    # -- underneath -----------------------------------------------------------------------------

    async def _change(self, ask: Callable[[nomad.Nomad], Reply], *, missing: bool = False) -> Any:
        """Like :meth:`_run`, for requests that change the job. Raises NomadError 409 without sending anything when
        the job is not ours: checked in the thread, because the process may be frozen between any two steps."""

        def checked(client: nomad.Nomad) -> Reply:
            if why := self.not_ours():
                raise NomadError(409, why, next_step="try again")
            return ask(client)

        return await self._run(checked, missing=missing)

    async def _run(self, ask: Callable[[nomad.Nomad], Reply], *, missing: bool = False) -> Any:
        """Send a request in a thread. With ``missing``, 404 is answered by None."""
        asked = partial(self._client.ask, ask, missing=missing)
        return await asyncio.get_running_loop().run_in_executor(self._threads, asked)


SILENT_AFTER_S = scaled(45.0)
"""Nomad sends a heartbeat every 30 s (nomad/event_endpoint.go of 1.11.3)."""
_PATH = "/v1/event/stream"
_LINE_BYTES = 64 * 1024 * 1024
_CONNECT_S = scaled(10.0)


class EventStream:
    """Connects when entered; iterating gives each line as JSON, heartbeats as ``{}``."""

    def __init__(self, session: aiohttp.ClientSession, settings: NomadSettings, address: str) -> None:
        self._session = session
        self._settings = settings
        self._url = address + _PATH
        self._server_hostname = settings.tls_server_name if address.startswith("https:") else None

    async def lines(self, *, after: int, nodes: bool) -> AsyncGenerator[dict[str, Any], None]:
        """Events after an index of the cluster's log; the first item, ``{}``, means that it is connected.

        ``nodes``: include events of nodes, for which the token needs ``node:read``. Raises NomadError when the
        stream ends, is refused, or is silent for ``SILENT_AFTER_S``.
        """
        job = self._settings.job_id
        topics = [f"Allocation:{job}", f"Evaluation:{job}", f"Job:{job}", *(["Node"] if nodes else [])]
        params = [("namespace", self._settings.namespace), ("index", str(after)), *(("topic", one) for one in topics)]
        if self._settings.region:
            params.append(("region", self._settings.region))
        headers = {"X-Nomad-Token": self._settings.token} if self._settings.token else {}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=SILENT_AFTER_S)
        try:
            async with self._session.get(
                self._url,
                params=params,
                headers=headers,
                timeout=timeout,
                server_hostname=self._server_hostname,
                allow_redirects=False,  # the token is for this address only
            ) as response:
                if response.status != 200:
                    raise NomadError(response.status, (await response.text())[:500])
                yield {}
                async for line in response.content:
                    if line.strip():
                        yield json.loads(line)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise NomadError(0, f"the event stream was cut: {error or type(error).__name__}") from error
        raise NomadError(0, "Nomad ended the event stream")


def open_stream_session(settings: NomadSettings) -> aiohttp.ClientSession:
    """A session for the stream. Raises ConfigError for certificates that cannot be read."""
    connector = aiohttp.TCPConnector(limit=2, ssl=tls(settings))
    return aiohttp.ClientSession(connector=connector, trust_env=False, read_bufsize=_LINE_BYTES)


def tls(settings: NomadSettings) -> ssl.SSLContext:
    """The same TLS settings as for the API. Raises ConfigError naming the field."""
    field = "ca_cert"
    try:
        context = ssl.create_default_context(cafile=settings.ca_cert)
        field = "client_cert"
        if settings.client_cert is not None:
            context.load_cert_chain(settings.client_cert, settings.client_key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(field, f"cannot be used: {error}", next_step="a PEM file is needed") from error
    if settings.skip_verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


async def pause(seconds: float, alarm: asyncio.Event) -> None:
    """Sleep for a time, or until the event is set; then clear it."""
    try:
        async with asyncio.timeout(seconds):
            await alarm.wait()
    except TimeoutError:
        return
    finally:
        alarm.clear()
