"""Containers as allocations of one Nomad job: the same sandbox server, on a cluster.

Decisions are in :mod:`agentenv.slots.backends.nomad.view` (pure); this module carries them out. Nomad may be down
or restart at any time: known containers stay in use, and are reconciled when Nomad is back.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

from agentenv.background import finish
from agentenv.config import ContainerSettings, NomadSettings
from agentenv.containers.connection import open_session
from agentenv.containers.handle import ContainerHandle
from agentenv.deadlines import START_TIMEOUT_S, scaled
from agentenv.errors import ConfigError, JobOwnedError, SandboxUnavailableError
from agentenv.slots.backends.base import ContainerEvent, ContainerStarted, StartFailed
from agentenv.slots.backends.nomad import facts
from agentenv.slots.backends.nomad.allocation_tasks import AllocationTasks
from agentenv.slots.backends.nomad.api import EventStream, NomadApi, open_stream_session
from agentenv.slots.backends.nomad.count import CountKeeper
from agentenv.slots.backends.nomad.ending import end_job
from agentenv.slots.backends.nomad.explain import NomadError, opening_error
from agentenv.slots.backends.nomad.follow import Follower, Following
from agentenv.slots.backends.nomad.job import JobShape, check_shape, check_standing, job_text, job_variables
from agentenv.slots.backends.nomad.lock_owner import LockOwner
from agentenv.slots.backends.nomad.owner import JobOwner
from agentenv.slots.backends.nomad.view import (
    AwaitEmpty,
    Command,
    Diagnose,
    FleetView,
    ForgetAllocation,
    Handshake,
    ReportEvent,
    Reschedule,
    StopAllocation,
)

logger = logging.getLogger(__name__)

_PURGE_TIMEOUT_S = scaled(30.0)
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class NomadStatus:
    """The backend's current activity, for operators."""

    address: str
    namespace: str
    job_id: str
    following: Following
    goal: int | None
    asked: int | None
    """The count last agreed on with Nomad; below the goal while starts are being spread out."""
    containers: dict[str, str]
    """Each container's stage, by its id."""
    waiting_for: str
    """Why Nomad does not place the requested containers; empty if it does."""
    problem: str
    """The job's other owner, or Nomad's last refusal or silence; empty once Nomad has answered again."""


class NomadBackend:
    """The farm is the allocations of job ``nomad.job_id``; one farm at a time owns a job, by a lock at Nomad.

    Opening submits the job or adopts the existing one with its running containers. Closing purges it
    (``purge_job_on_shutdown``), unless ``agentenv up`` left it running or runs of a farm have leases on it, or leaves
    everything running. Opening raises JobOwnedError when another run owns the job (a standby waits instead),
    ConfigError or SandboxUnavailableError with the next step; afterwards failures of Nomad are logged and survived. A
    backend that loses the job (it was frozen or cut off, and another run took it) no longer changes the job; its
    leases stay valid.
    """

    name = "nomad"

    def __init__(
        self,
        containers: ContainerSettings | None = None,
        nomad: NomadSettings | None = None,
        *,
        start_timeout_s: float = START_TIMEOUT_S,
        reshape: bool = False,
        ensure_image: Callable[[str], object] | None = None,
        url: str = "",
        standby: bool = False,
        on_standby: Callable[[str, str], None] = lambda *_: None,
        on_back: Callable[[], None] = lambda: None,
    ) -> None:
        """``reshape``: running containers with another number of slots may be replaced. ``ensure_image`` builds the
        image of that name if it is missing; called (in a thread) if :func:`builds_image` is true.

        ``url`` is the address of the farm service this backend is for, shown to its standbys. With ``standby``,
        opening waits until the job is ours, for days if need be. ``on_standby`` is called with the address (empty if
        it has none) and a description of each other owner: during that wait, and when the job is lost to it later;
        ``on_back`` when a lost job is ours again, or may have been another's for a moment (see :attr:`generation`).

        Raises ConfigError for an invalid address or invalid certificates, and for a standby that would purge the job
        it takes over.
        """
        self._nomad = nomad or NomadSettings.from_environment()
        if standby and self._nomad.purge_job_on_start:
            raise ConfigError(
                "purge_job_on_start", "a standby takes over the containers that are running", next_step="unset it"
            )
        self._url = url
        self._standby = standby
        self._on_standby = on_standby
        self._on_back = on_back
        self._reshape = reshape
        self._ensure_image = ensure_image
        self._containers = containers or ContainerSettings()
        self._address = checked_address(self._nomad.address)
        self._start_timeout_s = start_timeout_s
        self._view = FleetView(start_timeout_s=start_timeout_s)
        self._events: asyncio.Queue[ContainerEvent | None] = asyncio.Queue()
        self._handles: dict[str, ContainerHandle] = {}
        self._token = ""
        self._found = 0
        self._resources = AsyncExitStack()
        self._open: _Open | None = None
        self._closing: asyncio.Task[None] | None = None

    # -- opening and closing ---------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        if self._open is not None or self._closing is not None:
            raise SandboxUnavailableError("a NomadBackend is opened once", next_step="make a new one")
        try:
            self._open = opened = await self._assemble()
            await opened.api.check_access()
            if self._standby:
                await opened.owner.stand_by(self._report_owner)
            else:
                await opened.owner.acquire()
            if self._ensure_image is not None and builds_image(self._nomad, self._address):
                await asyncio.to_thread(self._ensure_image, self._nomad.image)
            if self._nomad.purge_job_on_start:
                await self._purge(opened.api)
            await self._submit(first=True)
            await opened.follower.look()
            opened.start()
        except NomadError as error:
            await self._abandon()
            if self.lost is not None:
                raise self.lost from error
            raise opening_error(error, self._address, self._nomad.namespace, self._nomad.token is not None) from error
        except BaseException:
            await self._abandon()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(), name="close nomad backend")
        await finish(self._closing)

    async def _assemble(self) -> _Open:
        api = NomadApi(self._nomad, self._address)
        self._resources.push_async_callback(api.aclose)
        stream_session = await self._resources.enter_async_context(open_stream_session(self._nomad))
        session = await self._resources.enter_async_context(open_session())
        stream = EventStream(stream_session, self._nomad, self._address)
        owner = JobOwner(api, self._nomad.run_name, url=self._url, on_lost=self._report_loss, on_back=self._report_back)
        opened = _Open(
            api,
            owner,
            AllocationTasks(api, session, self._containers),
            Follower(api, stream, self._process_fact, self._tick),
            CountKeeper(api, self._view, self._submit, lambda: owner.holds),
        )
        self._resources.push_async_callback(owner.release)
        self._resources.push_async_callback(opened.stop)
        return opened

    def _report_owner(self, owner: LockOwner) -> None:
        self._on_standby(owner.url, str(owner))

    def _report_loss(self, owner: LockOwner) -> None:
        if (error := self.lost) is not None:
            self._emit(StartFailed(error.message, error.next_step))
        self._report_owner(owner)

    def _report_back(self) -> None:
        self._opened().count.begin_anew()
        self._on_back()

    async def _submit(self, *, first: bool = False) -> None:
        """Register the job; an existing one keeps its count, and its containers if nothing else changed."""
        api = self._opened().api
        text = job_text(self._nomad)
        try:
            job = await api.parse(text, job_variables(text, self._containers, self._nomad))
        except NomadError as error:
            if error.status == 400:
                raise ConfigError("job_file", error.message, next_step="`nomad job validate` tells more") from error
            raise
        standing = await api.standing() if first else None
        if (shape := JobShape.of(job)) is not None:
            check_shape(shape, self._containers, self._nomad)
            if standing is not None and not self._reshape:
                check_standing(JobShape.of(standing), shape, await api.left_over(), self._nomad.job_id)
        self._token = await api.agree_on_token(secrets.token_hex(32))
        await api.register(job)
        if standing is not None:
            self._found = facts.job(standing).count
            self._opened().count.adopt(self._found)

    async def _abandon(self) -> None:
        self._closing = asyncio.create_task(self._resources.aclose(), name="abandon nomad backend")
        await finish(self._closing)

    async def _close(self) -> None:
        try:
            opened = self._open
            if opened is not None and self._nomad.purge_job_on_shutdown and not await opened.api.is_kept():
                if runs := await opened.allocation_tasks.runs_leasing(self._handles.values()):
                    logger.warning("job %s keeps running: leased to %s", self._nomad.job_id, ", ".join(runs))
                    return
                await opened.stop()
                await self._purge(opened.api)
                await opened.api.forget_token()
        except NomadError as error:
            logger.warning("job %s is not purged, its containers keep running: %s", self._nomad.job_id, error)
        finally:
            await self._resources.aclose()
            self._events.put_nowait(None)

    async def _purge(self, api: NomadApi) -> None:
        """End the job, whatever becomes of its containers. Raises NomadError."""
        try:
            await end_job(api, within_s=_PURGE_TIMEOUT_S)
        except SandboxUnavailableError as error:
            logger.warning("%s", error.message)
            await api.deregister(purge=True)

    # -- the backend's interface -----------------------------------------------------------------

    @property
    def found(self) -> int:
        """See :class:`ContainerBackend`: the count of the job that was adopted."""
        return self._found

    @property
    def generation(self) -> int:
        """See :class:`ContainerBackend`. 0 before opening. It grows while open when Nomad may have given the job to
        another in between: after a loss, or a cut of more than 20 s."""
        return 0 if self._open is None else self._open.owner.generation

    @property
    def lost(self) -> JobOwnedError | None:
        """The run that owns the job now, after this one has lost it; None while it has not."""
        return None if self._open is None else self._open.owner.lost

    async def scale(self, count: int) -> None:
        """See :class:`ContainerBackend`."""
        self._opened().count.aim(count)

    async def events(self) -> AsyncIterator[ContainerEvent]:
        """See :class:`ContainerBackend`. Never raises because of Nomad."""
        while (event := await self._events.get()) is not None:
            yield event

    async def replace(self, container_id: str, reason: str) -> None:
        """See :class:`ContainerBackend`."""
        self._opened()
        if (allocation := self._view.allocation_of(container_id)) is not None:
            self._perform([StopAllocation(allocation, reason)])

    def status(self) -> NomadStatus:
        """Current activity and reasons for waiting."""
        opened, unplaced = self._opened(), self._view.unplaced
        return NomadStatus(
            address=self._address,
            namespace=self._nomad.namespace,
            job_id=self._nomad.job_id,
            following=opened.follower.following,
            goal=opened.count.goal,
            asked=opened.count.asked,
            containers={container: str(stage) for container, stage in self._view.stages().items()},
            waiting_for=unplaced.reason if unplaced is not None else "",
            problem=str(self.lost or "") or opened.follower.problem,
        )

    def __repr__(self) -> str:
        state = "closed" if self._open is None or self._closing is not None else self._open.follower.following
        return f"<NomadBackend {self._nomad.job_id} at {self._address}, {state}, {self._view!r}>"

    def _opened(self) -> _Open:
        if self._open is None or self._closing is not None:
            raise SandboxUnavailableError("the backend is not open", next_step="use it inside `async with`")
        return self._open

    # -- performing ------------------------------------------------------------------------------

    def _process_fact(self, fact: facts.Fact) -> None:
        self._perform(self._view.update(fact, _now()))
        ended = isinstance(fact, facts.Job) and fact.stopped
        if self._open is not None and (ended or isinstance(fact, facts.Snapshot)):
            self._open.count.compare(self._view.job)

    def _tick(self) -> None:
        self._perform(self._view.tick(_now()))

    def _perform(self, commands: Iterable[Command]) -> None:
        opened = self._open
        if opened is None or self._closing is not None:
            return
        for command in commands:
            self._perform_one(opened, command)
        opened.count.look_again()

    def _perform_one(self, opened: _Open, command: Command) -> None:
        match command:
            case ReportEvent(event):
                self._emit(event)
            case Handshake(container, allocation):
                opened.allocation_tasks.handshake(
                    allocation,
                    self._token,
                    self._start_timeout_s,
                    lambda outcome: self._perform(self._view.handshake_done(container, outcome, _now())),
                )
            case ForgetAllocation(container):
                opened.allocation_tasks.forget(container)
                self._handles.pop(container, None)
            case AwaitEmpty(container, at_most_s):
                opened.allocation_tasks.await_empty(
                    self._handles[container],
                    at_most_s,
                    lambda silent: self._perform(self._view.emptied(container, _now(), silent=silent)),
                )
            case StopAllocation(allocation_id, reason, after_s):
                opened.allocation_tasks.stop(allocation_id, reason, after_s, lambda: self._view.is_alive(allocation_id))
            case Diagnose(allocation):
                opened.allocation_tasks.diagnose(allocation, self._nomad.image, self._emit)
            case Reschedule():
                opened.count.reschedule()

    def _emit(self, event: ContainerEvent) -> None:
        if isinstance(event, ContainerStarted):
            self._handles[event.handle.id] = event.handle
        self._events.put_nowait(event)


class _Open:
    """The parts of an open backend, and its tasks."""

    def __init__(
        self, api: NomadApi, owner: JobOwner, allocation_tasks: AllocationTasks, follower: Follower, count: CountKeeper
    ) -> None:
        self.api = api
        self.owner = owner
        self.allocation_tasks = allocation_tasks
        self.follower = follower
        self.count = count
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to follow Nomad and to maintain the count."""
        works = {
            "nomad events": self.follower.follow(),
            "nomad lists": self.follower.keep_looking(),
            "nomad count": self.count.keep_count(),
            "nomad reschedules": self.count.keep_rescheduling(),
        }
        self._tasks = [asyncio.create_task(work, name=name) for name, work in works.items()]
        for task in self._tasks:
            task.add_done_callback(_report)

    async def stop(self) -> None:
        """Cancel every task. May be repeated."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.allocation_tasks.aclose()


def builds_image(settings: NomadSettings, address: str) -> bool:
    """Whether to build a missing image on opening: the image and the cluster are local to this machine. Pure."""
    here = urlsplit(address).hostname in _LOOPBACK
    return settings.driver == "docker" and settings.build_image and here and settings.image.endswith(":local")


def checked_address(address: str) -> str:
    """The address without a trailing slash. Raises ConfigError when it is invalid."""
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError("nomad_address", f"got {address!r}", next_step="allowed: http(s)://host:port")
    return address.rstrip("/")


def _now() -> float:
    return asyncio.get_running_loop().time()


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("%s failed", task.get_name(), exc_info=error)
