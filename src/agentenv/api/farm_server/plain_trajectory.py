"""Trajectories whose slots the farm holds itself: the lease, the session and the calls of each."""

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
from agentenv.tools.catalog import ToolCatalog
from agentenv.wire import farm as wire
from agentenv.wire import plain
from agentenv.wire.calls import CallResult
from agentenv.wire.leases import BY_NAME, LOST_KEPT_S, SlotRequest, Tags
from agentenv.wire.roots import RootSpec

Result = TypeVar("Result")

_FIRST_TTL_S: Final = 30.0
"""How long a lease lasts that its request no longer waits for."""
_LONGEST_RENEWAL_S: Final = 60.0
_REMEMBERED_S: Final = LOST_KEPT_S
"""How long calls of a trajectory that has lost its slot are refused, unless it is released."""
_LARGE_AT_ONCE: Final = 2
"""Calls of a run, at once, whose results may be as large as files."""
_ROOT: Final = "-"
"""In the tag of a lease that says which ask made it: what follows says for which root."""


class PlainRun:
    """The trajectories of one run, the images that its references mean, and the executor of its calls, whose pool this
    is."""

    def __init__(self, name: str, catalog: ToolCatalog, leases: PlainLeases, images: FarmImages) -> None:
        self.name = name
        self.leases = leases
        self.images = images
        self.executor = ToolExecutor(self, catalog)
        self.trajectories: dict[str, Trajectory] = {}
        self.large = asyncio.Semaphore(_LARGE_AT_ONCE)

    async def lease_slots(self, request: SlotRequest, *, timeout_s: float | None = None) -> list[SlotLease]:  # noqa: ARG002 - the port's
        """For the executor: the one trajectory's, for as long as that waits."""
        (trajectory,) = request.trajectories
        return [await self.trajectories[trajectory].acquire(request)]

    def trajectory(self, name: str) -> Trajectory:
        """The trajectory of that name."""
        if name not in self.trajectories:
            self.trajectories[name] = Trajectory(self, name)
        return self.trajectories[name]


class Trajectory:
    """One trajectory of a run: its slot, from the first call until it is released. Its lease is lost once and for all:
    a call must not find another, empty workspace without an error."""

    def __init__(self, run: PlainRun, name: str) -> None:
        self.name = name
        self.run = run.name
        self.lease: SlotLease | None = None
        self.running = 0
        self.used_at = run.leases.clock()
        self._run = run
        self._leases = run.leases
        self._settings = run.leases.settings
        self._clock = run.leases.clock
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
    def _has_slot(self) -> bool:
        return self.lease is not None and self.lease.lost is None

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

    async def entered(self, right: Right, request: plain.ExecuteRequest) -> ToolSession:
        """Its session; the first call opens it, and others wait for that. Raises AcquireTimeoutError: it is waited for
        still, if another call comes within ASK_TTL_S; what :meth:`PlainLeases.granted` and :meth:`FarmImages.resolve`
        do, and why it was lost; ProtocolError when its slot was made from another root than the request names."""
        if (lost := self.lost) is not None:
            raise lost.copy()
        if self._opening is None or (self._opening.done() and not self._has_slot):
            if self.lease is not None:  # nothing was called in it
                self._leases.release(self.run, self.name, BY_FARM)
            self._ask = self.lease = None
            self._opening = asyncio.create_task(self._open(right, request, self._opening))
            self._opening.add_done_callback(lambda task: task.cancelled() or task.exception())  # nobody may wait for it
        opening = self._opening
        await asyncio.wait({opening}, timeout=self._settings.acquire_timeout_s)
        if not opening.done():
            if self._ask is not None:
                raise self._leases.late(self._ask, self.run)
            why = (request.image and self._run.images.problem(request.image)) or "it is being fetched"
            raise AcquireTimeoutError(f"the image is not there yet: {why}", next_step="retry: the fetch goes on")
        if opening.cancelled() and not self._leases.closed:
            raise LeaseLostError(f"trajectory {self.name!r} was released while it waited for a slot")
        session = _outcome(opening)
        if (lost := session.lease.lost) is not None:
            raise lost.copy()
        assert self._ask is not None
        if request.image and request.asked != self._ask.tags.item.partition(_ROOT)[2]:
            raise ProtocolError(
                f"the slot of trajectory {self.name!r} was not made from {request.image} with this root",
                next_step="name what the first call named, or nothing; or use another trajectory",
            )
        if self._renewed_at is None and self.lease is not None:
            await self._keep(self.lease)
        return session

    async def _open(
        self, right: Right, request: plain.ExecuteRequest, former: asyncio.Task[ToolSession] | None
    ) -> ToolSession:
        await _close(former)
        self._right, root, named = right, None, request.image
        if named and self._leases.of_name(self.run, self.name) is None:
            root = request.root_of(named if is_digest(named) else (await self._run.images.resolve(named)).digest)
        # A nonce: what asks for this slot cannot be mistaken for what asked for another one.
        item = secrets.token_hex(8) + (_ROOT + request.asked if named else "")
        return await self._run.executor.open(self.name, kind=request.kind, item=item, root=root).__aenter__()

    async def acquire(self, request: SlotRequest) -> SlotLease:
        """Its lease: the one it has had before the farm was restarted, or a new one."""
        assert self._right is not None
        before = self._leases.of_name(self.run, self.name)
        self._ask = self._asked(request.tags, request.root) if before is None else self._asked(before.tags)
        lease = await self._leases.granted(self._ask, self.run, self._right)
        if lease is None or (before is not None and before.name != lease.name):
            if lease is not None:
                await lease.release()
            raise ConnectionLostError(f"the slot of {self.name!r} cannot be reached now", next_step="ask again")
        if before is not None:
            await self._keep(lease)
        self.lease = lease
        return lease

    async def _keep(self, lease: SlotLease) -> None:
        """Before anything is called it lasts as long as an idle one does, whatever becomes of this process. Raises
        AgentEnvError when that is not known, or it has ended."""
        at = self._clock()
        if lease.key.slot not in await self._leases.renew([lease]):
            raise lease.lost or ConnectionLostError(f"the slot {lease.name} is being taken back", next_step="ask again")
        self.renewed(at)

    def _asked(self, tags: Tags, root: RootSpec | None = None) -> wire.Ask:
        """The ask for the slot with these tags: it finds the lease again that it has made."""
        return wire.Ask(
            request_id=_digest(self.run, self.name, tags.item),
            trajectories=(self.name,),
            tags=wire.AskTags(environment=BY_NAME, kind=tags.kind, item=tags.item),
            ttl_s=_FIRST_TTL_S,
            root=root,
            image_reference="" if root is None else self._run.images.reference(root.image),
        )

    async def aclose(self) -> None:
        """End its wait for a slot, and its session. What it had is released."""
        if self._ask is not None:
            self._leases.withdraw(self._ask, self.run)
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait({self._opening})
            await _close(self._opening)

    def due(self) -> SlotLease | None:
        """The lease, if it has to be renewed: something was called since it was last, or still runs."""
        if not self._has_slot:
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
        name = request.call_id
        if name is None:
            return await self._call(session, request, None)
        if name not in self._calls:
            assert self._ask is not None
            in_slot = _digest(self._ask.request_id, name)  # the same as long as the trajectory has its slot
            self._calls[name] = request, asyncio.create_task(self._call(session, request, in_slot))
            self._calls[name][1].add_done_callback(lambda _: self._calls.pop(name))
        first, task = self._calls[name]
        if (first.tool, first.timeout_s) != (request.tool, request.timeout_s):
            raise ProtocolError(f"call_id {name!r} is another call's", next_step="use a new one for each")
        await asyncio.wait({task})
        return _outcome(task).model_copy(update={"id": name})

    async def _call(self, session: ToolSession, request: plain.ExecuteRequest, call_id: str | None) -> CallResult:
        tool = request.tool
        try:
            return await session.call(tool.name, tool.arguments, timeout_s=request.timeout_s, call_id=call_id)
        except SlotDestroyedError as error:
            return CallResult.refused(call_id or "-", error)
        except ProtocolError as error:  # not the sender's
            raise InfraError(str(error)) from error

    def view(self) -> plain.PlainTrajectory:
        """For ``GET /status``."""
        lost = self.lost
        has = "held" if self._has_slot else "waiting"
        return plain.PlainTrajectory(
            run=self.run,
            trajectory_id=self.name,
            state="lost" if lost is not None else has,
            lease=self.lease.name if self.lease is not None else None,
            running_calls=self.running,
            idle_s=0.0 if self.running else self._clock() - self.used_at,
            error=str(lost or ""),
        )

    def over(self) -> bool:
        """Whether it may be forgotten."""
        if self.running or self._has_slot:
            return False
        return self._clock() - self.used_at > (wire.ASK_TTL_S if self.lost is None else _REMEMBERED_S)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:40]


async def _close(opening: asyncio.Task[ToolSession] | None) -> None:
    """Close the session that was opened, if one was."""
    if opening is not None and not opening.cancelled() and opening.exception() is None:
        await opening.result().aclose()


def _outcome(task: asyncio.Task[Result]) -> Result:
    """The result of a task that several wait for; each gets an exception of its own."""
    if task.cancelled():
        raise PoolClosedError("the farm service is shutting down", next_step="retry: its replacement will answer")
    if isinstance(error := task.exception(), AgentEnvError):
        raise error.copy()
    return task.result()
