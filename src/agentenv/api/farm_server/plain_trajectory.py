"""One trajectory whose slot the farm holds itself: its lease, its session and its calls."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

from agentenv.api.farm_server.audit import BY_FARM
from agentenv.api.farm_server.plain_leases import PlainLeases
from agentenv.api.farm_server.tokens import Right
from agentenv.errors import (
    AcquireTimeoutError,
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
from agentenv.farm_client.images import FarmImages
from agentenv.slots.lease import SlotLease
from agentenv.store.reference import is_digest
from agentenv.wire import farm as wire
from agentenv.wire import plain
from agentenv.wire.calls import CallResult
from agentenv.wire.leases import BY_NAME, LOST_KEPT_S, SlotRequest, Tags

Result = TypeVar("Result")

_FIRST_TTL_S: Final = 30.0
"""How long a lease lasts that its request no longer waits for."""
_LONGEST_RENEWAL_S: Final = 60.0
_REMEMBERED_S: Final = LOST_KEPT_S
"""How long calls of a trajectory that has lost its slot are refused, unless it is released."""
_ROOT: Final = "-"
"""In the tag of a lease that says which ask made it: what follows says for which root."""


class Trajectory:
    """One trajectory of a run: its slot, from the first call until it is released. Its lease is lost once and for all:
    a call must not find another, empty workspace without an error."""

    def __init__(self, leases: PlainLeases, run: str, name: str) -> None:
        self.name = name
        self.run = run
        self.lease: SlotLease | None = None
        self.running = 0
        self.used_at = leases.clock()
        self._leases = leases
        self._settings = leases.settings
        self._clock = leases.clock
        self._right: Right | None = None
        self._ask: wire.Ask | None = None
        """The one that its lease was, or is to be, granted for."""
        self._opening: asyncio.Task[ToolSession] | None = None
        self._calls: dict[str, tuple[plain.ExecuteRequest, asyncio.Task[CallResult]]] = {}
        self._renewed_at: float | None = None

    @property
    def waits(self) -> bool:
        """Whether it waits for its slot now."""
        return self._opening is not None and not self._opening.done()

    @property
    def lost(self) -> AgentEnvError | None:
        """Why it has no slot any more."""
        if self.lease is None:  # what it has lost, it lost before this process held it
            before = None if self.waits else self._leases.lost(self.run, self.name)
            return None if before is None else before.error
        if self._renewed_at is None:  # nothing was called in it
            return None
        lost, idle_s = self.lease.lost, self._settings.idle_s
        if self._clock() - self._renewed_at >= idle_s and isinstance(lost, StaleLeaseError):
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
        lost = self._leases.lost(self.run, self.name)
        assert lost is not None, "it has had a slot"
        return lost.lease

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

    async def entered(
        self, executor: ToolExecutor, images: FarmImages, right: Right, request: plain.ExecuteRequest
    ) -> ToolSession:
        """Its session; the first call opens it, and others wait for that. Raises AcquireTimeoutError: it is waited for
        still, if another call comes within ASK_TTL_S; what :meth:`PlainLeases.granted` and :meth:`FarmImages.resolve`
        do, and why it was lost; ProtocolError when its slot was made from another root than the request names."""
        if (lost := self.lost) is not None:
            raise lost.copy()
        if self._opening is None or (self._opening.done() and (self.lease is None or self.lease.lost is not None)):
            if self.lease is not None:  # nothing was called in it
                self._leases.release(self.run, self.name, BY_FARM)
            self._ask = self.lease = None
            self._opening = asyncio.create_task(self._open(executor, images, right, request))
            self._opening.add_done_callback(lambda task: task.cancelled() or task.exception())  # nobody may wait for it
        opening = self._opening
        await asyncio.wait({opening}, timeout=self._settings.acquire_timeout_s)
        if not opening.done():
            if self._ask is not None:
                raise self._leases.late(self._ask, self.run)
            why = (request.image and images.problem(request.image)) or "it is being fetched"
            raise AcquireTimeoutError(f"the image is not there yet: {why}", next_step="retry: the fetch goes on")
        if opening.cancelled() and not self._leases.closed:
            raise LeaseLostError(f"trajectory {self.name!r} was released while it waited for a slot")
        session = _outcome(opening)
        assert self._ask is not None
        if request.image and request.asked != self._ask.tags.item.partition(_ROOT)[2]:
            raise ProtocolError(
                f"the slot of trajectory {self.name!r} was not made from {request.image} with this root",
                next_step="name what the first call named, or nothing; or use another trajectory",
            )
        if self._renewed_at is None:
            await self._keep()
        return session

    async def _open(
        self, executor: ToolExecutor, images: FarmImages, right: Right, request: plain.ExecuteRequest
    ) -> ToolSession:
        root = None
        if request.image and self._leases.before(self.run, self.name) is None:
            named = request.image
            root = request.root_of(named if is_digest(named) else (await images.resolve(named)).digest)
        # A nonce: what asks for this slot cannot be mistaken for what asked for another one.
        item = secrets.token_hex(8) + (_ROOT + request.asked if request.image else "")
        self._right = right
        return await executor.open(self.name, kind=request.kind, item=item, root=root).__aenter__()

    async def acquire(self, request: SlotRequest, reference: str) -> SlotLease:
        """Its lease: the one it has had before the farm was restarted, or a new one. ``reference``: where the image of
        the request's root comes from."""
        assert self._right is not None
        before = self._leases.before(self.run, self.name)
        self._ask = self._asked(request, reference, request.tags if before is None else before.tags)
        lease = await self._leases.granted(self._ask, self.run, self._right)
        if before is not None and before.name != lease.name:
            await lease.release()
            raise ConnectionLostError(f"the slot {before.name} cannot be reached now", next_step="ask again")
        self.lease = lease
        if before is not None:
            await self._keep()
        return lease

    async def _keep(self) -> None:
        """Before anything is called it lasts as long as an idle one does, whatever becomes of this process. Raises
        AgentEnvError when that is not known, or it has ended."""
        lease, at = self.lease, self._clock()
        assert lease is not None
        if lease.key.slot not in await self._leases.renew([lease]):
            raise lease.lost or ConnectionLostError(f"the slot {lease.name} is being taken back", next_step="ask again")
        self.renewed(at)

    def _asked(self, request: SlotRequest, reference: str, tags: Tags) -> wire.Ask:
        """The ask for the slot with these tags: it finds the lease again that it has made."""
        return wire.Ask(
            request_id=_digest(self.run, self.name, tags.item),
            trajectories=(self.name,),
            tags=wire.AskTags(environment=BY_NAME, kind=tags.kind, item=tags.item),
            ttl_s=_FIRST_TTL_S,
            root=request.root,
            image_reference=reference,
        )

    async def release(self, by: str) -> bool:
        """End its lease, or its wait for one. False: it has none."""
        had = self.waits
        if self.lease is not None:  # before anything is awaited: the name may be used again at once
            had = self._leases.end(self.lease.id, by)
        if self._ask is not None:
            self._leases.withdraw(self._ask, self.run)
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait({self._opening})
            if not self._opening.cancelled() and self._opening.exception() is None:
                await self._opening.result().aclose()
        return had

    def due(self) -> SlotLease | None:
        """The lease, if it has to be renewed: something was called since it was last, or still runs."""
        if self.lease is None or self.lease.lost is not None:
            return None
        if self._renewed_at is None:
            return self.lease if self.running else None
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
            state="lost"
            if lost is not None
            else "held"
            if self.lease is not None and self.lease.lost is None
            else "waiting",
            lease=self.lease.name if self.lease is not None else None,
            running_calls=self.running,
            idle_s=0.0 if self.running else self._clock() - self.used_at,
            error=str(lost or ""),
        )

    def over(self) -> bool:
        """Whether it may be forgotten."""
        lost = self.lost is not None
        if self.running or (self.lease is not None and self.lease.lost is None):
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
