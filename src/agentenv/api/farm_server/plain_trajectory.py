"""One trajectory whose slot the farm holds itself: its lease, its session and its calls."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

from agentenv.api.farm_server.desk import Desk
from agentenv.api.farm_server.desk_lease import DeskLease, HeldBefore, granted, renew
from agentenv.api.farm_server.lost_names import LostSlot
from agentenv.api.farm_server.settings import PlainSettings
from agentenv.api.farm_server.tokens import Right
from agentenv.errors import (
    AgentEnvError,
    ConnectionLostError,
    InfraError,
    LeaseLostError,
    PoolClosedError,
    ProtocolError,
    SlotDestroyedError,
    StaleLeaseError,
)
from agentenv.executor.session import ToolSession
from agentenv.executor.tool_executor import ToolExecutor
from agentenv.slots.records import LeaseRecord
from agentenv.wire import farm as wire
from agentenv.wire import plain
from agentenv.wire.calls import CallResult
from agentenv.wire.leases import BY_NAME, LOST_KEPT_S, RunKind

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_FIRST_TTL_S: Final = 30.0
"""How long a lease lasts that its request no longer waits for."""
_LONGEST_RENEWAL_S: Final = 60.0
_REMEMBERED_S: Final = LOST_KEPT_S
"""How long calls of a trajectory that has lost its slot are refused, unless it is released."""


class Trajectory:
    """One trajectory of a run: its slot, from the first call until it is released. Its lease is lost once and for all:
    a call must not find another, empty workspace without an error."""

    def __init__(
        self,
        desk: Desk,
        before: HeldBefore,
        run: str,
        name: str,
        settings: PlainSettings,
        clock: Callable[[], float],
    ) -> None:
        self.name = name
        self.run = run
        self.session: ToolSession | None = None
        self.lease: DeskLease | None = None
        self.running = 0
        self.used_at = clock()
        self._desk = desk
        self._before = before
        self._settings = settings
        self._clock = clock
        self._right: Right | None = None
        self._ask: wire.Ask | None = None
        self._opening: asyncio.Task[ToolSession] | None = None
        self._calls: dict[str, tuple[plain.ExecuteRequest, asyncio.Task[CallResult]]] = {}
        self._had = ""
        """The lease that an earlier farm process has granted it."""
        self._gone: AgentEnvError | None = None
        self._lost_before: LostSlot | None = None
        """What it has lost before this process held it."""
        self._renewed_at: float | None = None
        self._released = False

    @property
    def waits(self) -> bool:
        """Whether it waits for its slot now."""
        return self._opening is not None and not self._opening.done()

    @property
    def lost(self) -> AgentEnvError | None:
        """Why it has no slot any more."""
        lost = self.lease.lost if self.lease is not None else self._gone
        idle_s = self._settings.idle_s
        expired = self._renewed_at is not None and self._clock() - self._renewed_at >= idle_s
        if expired and isinstance(lost, StaleLeaseError):
            return StaleLeaseError(
                f"trajectory {self.name!r} made no call for {idle_s:g} s, so its slot was released",
                next_step="release it to start over, or raise plain.idle_s of the farm",
            )
        return lost

    @property
    def lease_name(self) -> str:
        """Of the lease that it has, or had."""
        if self.lease is not None:
            return self.lease.name
        assert self._lost_before is not None, "it has had a slot"
        return self._lost_before.lease

    @contextmanager
    def used(self) -> Iterator[None]:
        """It is not idle meanwhile."""
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1
            self.used_at = self._clock()

    # -- its slot --------------------------------------------------------------------------------

    async def entered(self, executor: ToolExecutor, right: Right, kind: RunKind) -> ToolSession:
        """Its session; the first call opens it, and others wait for that. Raises what :func:`granted` does, and why it
        was lost."""
        if (lost := self.lost) is not None:
            raise lost.copy()
        if self.session is None:
            if not self.waits:
                self._right = right
                self._opening = asyncio.create_task(self._open(executor, kind), name=f"slot of {self.name}")
            assert self._opening is not None
            await asyncio.wait({self._opening})
            return _outcome(self._opening)
        return self.session

    async def _open(self, executor: ToolExecutor, kind: RunKind) -> ToolSession:
        released = LeaseLostError(f"trajectory {self.name!r} was released while it waited for a slot")
        if self._released:
            raise released
        session = executor.open(self.name, kind=kind)
        await session.__aenter__()
        if self._released:
            await session.aclose()
            raise released
        self.session = session
        return session

    async def acquire(self, kind: RunKind) -> DeskLease:
        """Its lease: the one it has had before the farm was restarted, or a new one."""
        assert self._right is not None
        if self._ask is None:
            before = self._before.find(self.run, self.name)
            lost = self._desk.lost_names.find(self.run, self.name) if before is None else None
            if lost is not None:
                self._lost_before, self._gone = lost, lost.error
                raise lost.error.copy()
            self._had = "" if before is None else before.name
            self._ask = self._asked(before, kind)
        lease = await granted(self._desk, self._ask, self.run, self._right, timeout_s=self._settings.acquire_timeout_s)
        if lease is not None and self._had in ("", lease.name):
            await self._keep(lease)
            self.lease = lease
            return lease
        self._ask = None
        if not self._had:  # the slot was granted when its request no longer waited, and nothing ran in it
            return await self.acquire(kind)
        if lease is None:
            self._gone = LeaseLostError(f"trajectory {self.name!r} has lost its slot", next_step="release it")
            raise self._gone
        await lease.release()
        raise ConnectionLostError(f"the slot {self._had} cannot be reached now", next_step="ask again")

    async def _keep(self, lease: DeskLease) -> None:
        """Before anything is called it lasts as long as an idle one does, whatever becomes of this process. Raises
        AgentEnvError when that is not known, or it has ended."""
        at = self._clock()
        if lease.key.slot not in await renew([lease], self._settings.idle_s):
            raise lease.lost or ConnectionLostError(f"the slot {lease.name} is being taken back", next_step="ask again")
        self.renewed(at)

    def _asked(self, before: LeaseRecord | None, kind: RunKind) -> wire.Ask:
        """The ask that has made that lease; or a new one, which cannot be mistaken for one of another slot."""
        nonce = before.tags.item if before is not None else secrets.token_hex(8)
        return wire.Ask(
            request_id=_digest(self.run, self.name, nonce),
            trajectories=(self.name,),
            tags=wire.AskTags(environment=BY_NAME, kind=before.tags.kind if before else kind, item=nonce),
            ttl_s=_FIRST_TTL_S,
        )

    async def release(self, by: str) -> bool:
        """End its lease, or its wait for one. False: it has none."""
        self._released = True
        had = self.waits
        if self.lease is not None:  # before anything is awaited: the name may be used again at once
            had = self._desk.end(self.lease.id, None, by)
        if self._ask is not None:
            self._desk.cancel(self._ask.request_id, self.run)
        self._desk.lost_names.forget(self.run, self.name)
        if self.session is not None:
            await self.session.aclose()
        return had

    def due(self) -> DeskLease | None:
        """The lease, if it has to be renewed: something was called since it was last, or still runs."""
        if self.lease is None or self.lease.lost is not None:
            return None
        if self._renewed_at is None:
            return self.lease
        every_s = min(self._settings.idle_s / 4, _LONGEST_RENEWAL_S)
        used = self.running > 0 or self.used_at >= self._renewed_at
        return self.lease if used and self._clock() - self._renewed_at >= every_s else None

    def renewed(self, at: float) -> None:
        """The lease lasts ``idle_s`` from then."""
        self._renewed_at = at

    # -- calls -----------------------------------------------------------------------------------

    async def call(self, session: ToolSession, request: plain.ExecuteRequest) -> CallResult:
        """The result of a call; with a ``call_id`` it runs once. Raises InfraError; ProtocolError when the id was used
        for another call that runs."""
        if request.call_id is None:
            return await self._call(session, request, None)
        running = self._calls.get(request.call_id)
        if running is None:
            task = asyncio.create_task(self._call(session, request, self._id_of(request.call_id)))
            self._calls[request.call_id] = request, task
            task.add_done_callback(lambda _: self._calls.pop(request.call_id or "", None))
        else:
            first, task = running
            if (first.tool, first.timeout_s) != (request.tool, request.timeout_s):
                raise ProtocolError(
                    f"call_id {request.call_id!r} is another call's", next_step="use a new one for each"
                )
        await asyncio.wait({task})
        return _outcome(task).model_copy(update={"id": request.call_id})

    async def _call(self, session: ToolSession, request: plain.ExecuteRequest, call_id: str | None) -> CallResult:
        tool = request.tool
        try:
            return await session.call(tool.name, tool.arguments, timeout_s=request.timeout_s, call_id=call_id)
        except SlotDestroyedError as error:
            return CallResult.refused(call_id or "-", error)
        except ProtocolError as error:  # not the sender's
            raise InfraError(str(error)) from error

    def _id_of(self, call_id: str) -> str:
        """The same for the container, as long as the trajectory has its slot."""
        assert self._ask is not None
        return _digest(self._ask.request_id, call_id)

    def view(self) -> plain.PlainTrajectory:
        """For ``GET /status``."""
        lost = self.lost
        return plain.PlainTrajectory(
            run=self.run,
            trajectory_id=self.name,
            state="lost" if lost is not None else "held" if self.lease is not None else "waiting",
            lease=self.lease.name if self.lease is not None else None,
            running_calls=self.running,
            idle_s=0.0 if self.running else self._clock() - self.used_at,
            error=str(lost or ""),
        )

    def over(self) -> bool:
        """Whether it may be forgotten."""
        lost = self.lost is not None
        if self.running or self.waits or (self.lease is not None and not lost):
            return False
        return self._clock() - self.used_at > (_REMEMBERED_S if lost else wire.ASK_TTL_S)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:40]


def _outcome(task: asyncio.Task[Result]) -> Result:
    """The result of a task that several wait for; each gets an exception of its own."""
    if task.cancelled():
        raise PoolClosedError("the farm service is shutting down", next_step="retry: its replacement will answer")
    if isinstance(error := task.exception(), AgentEnvError):
        raise error.copy()
    return task.result()
