"""Opens tool sessions, and keeps one client per container in use."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Protocol, Self

from agentenv.background import TaskSet
from agentenv.config import ExecutorSettings
from agentenv.containers.handle import ContainerHandle
from agentenv.errors import ConfigError, PoolClosedError
from agentenv.executor.client import SandboxClient
from agentenv.executor.observer import CallObserver
from agentenv.executor.session import CallCounters, ExternalTools, SessionLease, ToolSession
from agentenv.tools.catalog import UNOFFERED, ToolCatalog
from agentenv.wire.leases import RunKind, SlotRequest, Tags, short_tag
from agentenv.wire.roots import RootSpec

_IDLE_CLOSE_S: Final = 30.0
"""How long an unused connection is kept for the next session."""


class Pool(Protocol):
    """The part of ``SlotPool`` that an executor needs."""

    async def lease_slots(self, request: SlotRequest, *, timeout_s: float | None = None) -> Sequence[SessionLease]:
        """Lease the request's slots; AcquireTimeoutError at the deadline."""


@dataclass(frozen=True)
class ExecutorStatistics:
    """Counts since the executor was created; ``*_now`` are current values.

    ``streams`` counts connections opened, ``reconnects`` those reopened to the same container, ``reasked`` the
    calls resubmitted, ``batch_wait_s`` the sum over calls of the wait for their batch.
    """

    sessions_now: int
    containers_now: int
    running_now: int
    calls: int
    model_faults: int
    policy_faults: int
    infra_faults: int
    cancelled: int
    batches: int
    streams: int
    reconnects: int
    reasked: int
    batch_wait_s: float


@dataclass
class _ClientEntry:
    """A client and the number of sessions using it."""

    client: SandboxClient
    users: int = 0
    idle_timer: asyncio.TimerHandle | None = field(default=None, repr=False)


class ToolExecutor:
    """Turns a pool of slots into tool sessions. An async context manager; it does not own the pool.

    Leaving it closes every session (releasing its slot) and every connection.

    Raises: ConfigError: the catalog has external tools but nothing that runs them was given.
    """

    def __init__(
        self,
        pool: Pool,
        catalog: ToolCatalog,
        settings: ExecutorSettings = ExecutorSettings(),  # noqa: B008 - frozen
        *,
        external: ExternalTools | None = None,
        observer: CallObserver | None = None,
    ) -> None:
        external_tools = [spec.name for spec in catalog.specs if spec.kind == "external"]
        if external_tools and external is None:
            raise ConfigError(
                "catalog", f"the external tools {external_tools} need a tool server", next_step="configure one"
            )
        self.catalog = catalog.extended(*(spec for spec in UNOFFERED if spec.name not in catalog))
        self.settings = settings
        self.external = external
        self.observer = observer
        self.tally = CallCounters()
        self.pool = pool
        self._entries: dict[ContainerHandle, _ClientEntry] = {}
        self._sessions: set[ToolSession] = set()
        self._closings = TaskSet()
        self._closed_counters = {"batches": 0, "streams": 0, "reconnects": 0, "reasked": 0, "batch_wait_s": 0.0}
        self._closed = False

    def __repr__(self) -> str:
        return f"<ToolExecutor {len(self._sessions)} sessions on {len(self._entries)} containers>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def open(
        self,
        trajectory: str,
        *,
        acquire_timeout_s: float | None = None,
        group: str = "",
        item: str = "",
        kind: RunKind = "train",
        run: str = "",
        root: RootSpec | None = None,
        container: str = "",
    ) -> ToolSession:
        """Create a session for this trajectory; entering it leases the slot (AcquireTimeoutError after
        ``acquire_timeout_s``, None: the pool's own). ``group`` and ``item`` are passed to external tools
        (:class:`agentenv.wire.toolserver.CallScope`); with ``kind`` they are the lease's tags, and so is
        ``run``, but at a farm service, where a lease is of its client's run. ``root``: the slot's root; None: a plain
        slot. ``container``: the one that has the checkpoint of that root."""
        tags = Tags(run=run, kind=kind, group=short_tag(group), item=short_tag(item))
        request = SlotRequest((trajectory,), tags, root=root, container=container)
        return ToolSession(self, request, acquire_timeout_s, group=group, item=item)

    async def aclose(self, *, cancel: bool = True) -> None:
        """Close every session and connection. Repeatable. Calls that run are cancelled, or with ``cancel=False`` left
        to their slots, whose leases must then outlast this."""
        self._closed = True
        if not cancel:
            self._close_all()
            await self._closings.wait()
        await asyncio.gather(*(session.aclose() for session in tuple(self._sessions)), return_exceptions=True)
        self._close_all()
        await self._closings.wait()

    def statistics(self) -> ExecutorStatistics:
        """Counts so far, and current values."""
        clients = [entry.client for entry in self._entries.values()]
        sums = {
            name: closed + sum(getattr(c.counters, name) for c in clients)
            for name, closed in self._closed_counters.items()
        }
        return ExecutorStatistics(
            sessions_now=len(self._sessions),
            containers_now=len(clients),
            running_now=sum(client.unfinished for client in clients),
            **vars(self.tally),
            **sums,
        )

    # -- for sessions ------------------------------------------------------------------------------

    async def acquire(self, session: ToolSession) -> SessionLease:
        """Lease a slot for ``session`` in the caller's task. Raises PoolClosedError once closed."""
        if self._closed:
            raise PoolClosedError("the executor is closed")
        (lease,) = await self.pool.lease_slots(session.request, timeout_s=session.acquire_timeout_s)
        if self._closed:
            await lease.release()
            raise PoolClosedError("the executor was closed while it waited for a slot")
        self._sessions.add(session)
        return lease

    def attach(self, container: ContainerHandle) -> SandboxClient:
        """The client of ``container``, created at its first use."""
        entry = self._entries.get(container)
        if entry is None:
            entry = self._entries[container] = _ClientEntry(SandboxClient(container, self.settings, self.observer))
        if entry.idle_timer is not None:
            entry.idle_timer.cancel()
            entry.idle_timer = None
        entry.users += 1
        return entry.client

    def detach(self, client: SandboxClient, *, gone: bool) -> None:
        """One user less; an unused client is closed at once if its container has ended, otherwise when idle."""
        entry = self._entries.get(client.handle)
        if entry is None or entry.client is not client:
            return  # closed before its users were
        entry.users -= 1
        if entry.users == 0 and gone:
            self._close_entry(client.handle)
        elif entry.users == 0:
            entry.idle_timer = asyncio.get_running_loop().call_later(_IDLE_CLOSE_S, self._close_entry, client.handle)

    def ended(self, session: ToolSession) -> None:
        """The session is closed and needs no further closing."""
        self._sessions.discard(session)

    def _close_all(self) -> None:
        for container in tuple(self._entries):
            self._close_entry(container)

    def _close_entry(self, container: ContainerHandle) -> None:
        entry = self._entries.pop(container)
        if entry.idle_timer is not None:
            entry.idle_timer.cancel()
        for name in self._closed_counters:
            self._closed_counters[name] += getattr(entry.client.counters, name)
        self._closings.start(container.id, entry.client.aclose(), "close")


@dataclass(frozen=True)
class GroupSessions:
    """Opens sessions for the trajectories of one group."""

    executor: ToolExecutor
    group: str
    item: str
    kind: RunKind = "train"

    def open(
        self,
        trajectory: str,
        *,
        acquire_timeout_s: float | None = None,
        root: RootSpec | None = None,
        container: str = "",
    ) -> ToolSession:
        """As ``ToolExecutor.open``, with the group's name and item."""
        return self.executor.open(
            trajectory,
            acquire_timeout_s=acquire_timeout_s,
            group=self.group,
            item=self.item,
            kind=self.kind,
            root=root,
            container=container,
        )
