"""All slots of one server: what its supervisor says of them, their leases, reports about them."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from agentenv.errors import LeaseLostError, ProtocolError, SandboxUnavailableError, StaleLeaseError, from_wire
from agentenv.sandbox.control_protocol import (
    Connected,
    Exported,
    Hello,
    NotFrozen,
    Pong,
    SlotFailed,
    SlotLost,
    SlotRefused,
)
from agentenv.sandbox.loop_watch import Stalls
from agentenv.sandbox.server.calls import CallInFlight
from agentenv.sandbox.server.context import ServerContext
from agentenv.sandbox.server.layer_routes import LayerExports
from agentenv.sandbox.server.slot import Slot
from agentenv.sandbox.server.supervisor_link import LayerHandedOver, Received, SlotHandedOver
from agentenv.wire.leases import (
    EndRequest,
    LeaseGrant,
    LeaseRequest,
    ReleaseReply,
)
from agentenv.wire.roots import unfit
from agentenv.wire.server import SlotsReply
from agentenv.wire.states import SlotState

_KEEP_CHECKPOINTS_S: Final = 1800.0
"""How long a run's checkpoints are kept while it has no lease in the container."""

log = logging.getLogger(__name__)


class Attendance:
    """Authenticated requests, as far as they show that somebody is there: a container that outlives its starter ends
    itself when nobody uses it. Pure but for the clock."""

    def __init__(self, after_s: float, clock: Callable[[], float]) -> None:
        """``after_s``: how long a container may be unattended; 0: for ever."""
        self._after_s = after_s
        self._clock = clock
        self._open = 0
        self._last_at_s = clock()

    @contextmanager
    def request(self) -> Iterator[None]:
        """During one request. A long one (a watch, a stream) attends to the container until it ends."""
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1
            self._last_at_s = self._clock()

    def is_over(self, *, leased: bool) -> bool:
        """Whether the container has been unattended for too long. Never while a slot is ``leased``."""
        if not self._after_s or self._open or leased:
            return False
        return self._clock() - self._last_at_s >= self._after_s


class KeptCheckpoints:
    """The checkpoints made for runs of a farm, and when each run was seen last, so that those of a run that is gone do
    not take the room of others. Those of no run, whose container is its pool's own, are kept as long as that. Pure."""

    def __init__(self, keep_s: float = _KEEP_CHECKPOINTS_S) -> None:
        self._keep_s = keep_s
        self._runs: dict[str, str] = {}
        """By checkpoint."""
        self._seen: dict[str, float] = {}

    def made(self, checkpoint: str, run: str, now: float) -> None:
        """A checkpoint was made of a slot that the run has leased."""
        if run:
            self._runs[checkpoint] = run
            self._seen[run] = now

    def dropped(self, checkpoint: str) -> None:
        """It is forgotten; no effect for one that is not known."""
        self._runs.pop(checkpoint, None)

    def seen(self, run: str, now: float) -> None:
        """The run has a lease in the container."""
        if run in self._seen:
            self._seen[run] = now

    def stale(self, leasing: Iterable[str], now: float) -> list[str]:
        """Checkpoints of runs that have not been seen for too long and are not ``leasing`` now, which are forgotten."""
        for run in leasing:
            self.seen(run, now)
        gone = {run for run, seen in self._seen.items() if now - seen > self._keep_s}
        found = [checkpoint for checkpoint, run in self._runs.items() if run in gone]
        for checkpoint in found:
            del self._runs[checkpoint]
        for run in gone:
            del self._seen[run]
        return found


class Container:
    """The server without HTTP. ``boot`` identifies this process, new at every start. For calls see
    :class:`agentenv.sandbox.server.holder.Holder`."""

    def __init__(self, slots: int, context: ServerContext, generation: int = 0, unattended_after_s: float = 0) -> None:
        self.boot = secrets.token_hex(8)
        self.generation = generation
        """The highest generation of a farm that the container has obeyed; 0: none."""
        self.draining = False
        self.counted = context.statistics
        self.supervisor_stalls = Stalls()
        """Stalls of the supervisor's event loop, as last reported."""
        self.context = context
        self._heard_at_s = context.poller.loop.time()
        self.attendance = Attendance(unattended_after_s, context.poller.loop.time)
        self.exports = LayerExports(context.supervisor)
        self.checkpoints = KeptCheckpoints()
        self._slots = [Slot(index, context) for index in range(slots)]

    def __repr__(self) -> str:
        return f"Container({self.boot}, {self._slots!r})"

    @property
    def settled(self) -> bool:
        """Whether the supervisor has reported the state of every slot."""
        return all(slot.reported is not SlotState.resetting for slot in self._slots)

    @property
    def supervisor_silent_s(self) -> float:
        """Seconds for which the supervisor has not answered."""
        return self.context.supervisor.silent_s(self.context.poller.loop.time())

    @property
    def unattended(self) -> bool:
        """Whether the container should end, because nobody has used it for too long."""
        return self.attendance.is_over(leased=any(slot.reported is SlotState.leased for slot in self._slots))

    def close(self) -> None:
        """Release every slot; the supervisor keeps them running. Repeatable."""
        self.draining = True
        for slot in self._slots:
            slot.close()

    # -- the supervisor ----------------------------------------------------------------------------

    def take(self, received: Received) -> None:
        """Process a packet of the supervisor about a slot. Raises ProtocolError when it is impossible (nothing
        leaks)."""
        match received:
            case Pong():
                self.context.supervisor.answered()
                self.supervisor_stalls = received.stalls
            case SlotHandedOver(ready, agent) if slot := self.find(ready.slot):
                slot.ready(ready, agent)
            case SlotFailed() if slot := self.find(received.slot):
                slot.failed(received.epoch, received.reason)
            case SlotRefused() if slot := self.find(received.slot):
                slot.refused(received.epoch, received.error, received.reason)
            case NotFrozen() if slot := self.find(received.slot):
                slot.not_frozen(received.epoch, received.reason, ended=received.ended)
            case Connected() if slot := self.find(received.slot):
                slot.connected(received.epoch, received.env, received.reason)
            case SlotLost() if slot := self.find(received.slot):
                slot.lost(received.loss, received.reason)
            case LayerHandedOver():
                self.exports.answered(received.exported, received.pipe)
            case Exported():
                self.exports.answered(received)
            case Hello() | SlotHandedOver() | SlotFailed() | SlotRefused() | NotFrozen() | Connected() | SlotLost():
                if isinstance(received, SlotHandedOver):
                    received.agent.close()
                raise ProtocolError(f"the supervisor sent an unexpected {type(received).__name__}")

    def obey(self, generation: int) -> None:
        """A farm of this generation controls the container. No effect after one of a higher generation."""
        if generation > self.generation:
            self.generation = generation
            self.context.supervisor.fence(generation)

    def sent(self, asked: CallInFlight) -> None:
        """This answer was handed to a connection."""
        asked.memory.sent(asked)
        self._slots[asked.slot].calls.pump()

    # -- leases ------------------------------------------------------------------------------------

    async def lease(self, request: LeaseRequest) -> LeaseGrant:
        """Lease a slot. Raises InfraError when the slot is not free or could not be made with the root, ConfigError
        when no slot here can have it (nothing has been done then), SandboxUnavailableError when draining."""
        if self.draining:
            raise SandboxUnavailableError("the sandbox server is shutting down", next_step="lease elsewhere")
        slot = self.slot(request.slot)
        if request.root is not None and (why := unfit(request.root, self.context.limits, self.context.refused)):
            raise why
        lease = slot.grant(request)
        if request.root is not None:
            await slot.rerooted(lease)
        return lease.as_grant()

    def heard(self) -> None:
        """A pool has sent a heartbeat, or was sent a beat."""
        self._heard_at_s = self.context.poller.loop.time()

    def make_room(self) -> None:
        """Forget the checkpoints of runs that are gone."""
        leasing = {slot.lease.tags.run for slot in self._slots if slot.lease is not None}
        for checkpoint in self.checkpoints.stale(leasing, self.context.poller.loop.time()):
            log.info("checkpoint %s is forgotten: its run has had no slot here for long", checkpoint)
            self.context.supervisor.drop(checkpoint)

    async def end(self, request: EndRequest) -> ReleaseReply:
        """See :meth:`Slot.end`."""
        why = from_wire(request.error, request.message, "", LeaseLostError) if request.error else None
        if isinstance(why, ProtocolError):
            raise why
        slot = self.slot(request.slot)
        state = await slot.end(request.epoch, why, at_renewal=request.at_renewal)
        return ReleaseReply(slot=request.slot, state=state)

    # -- reports -----------------------------------------------------------------------------------

    def inventory(self) -> SlotsReply:
        """For ``GET /v1/slots``."""
        now_s = self.context.poller.loop.time()
        return SlotsReply(
            boot=self.boot,
            slots=tuple(slot.report() for slot in self._slots),
            lost=self.context.lost.report(now_s),
            heard_s=now_s - self._heard_at_s,
        )

    def statistics(self) -> dict[str, int]:
        """For ``GET /v1/statistics``."""
        counted = self.counted
        states = [slot.reported for slot in self._slots]
        counted.slots_free = states.count(SlotState.free)
        counted.slots_leased = states.count(SlotState.leased)
        counted.calls_queued = sum(slot.calls.queued for slot in self._slots)
        counted.calls_running = sum(slot.calls.busy for slot in self._slots)
        return counted.as_dict()

    def states(self) -> dict[str, int]:
        """Number of slots per state, including empty states."""
        states = [slot.reported for slot in self._slots]
        return {state.value: states.count(state) for state in SlotState}

    def slot(self, index: int) -> Slot:
        """The slot with this number. Raises StaleLeaseError when there is none."""
        if (found := self.find(index)) is None:
            raise StaleLeaseError(f"this container has no slot {index}: it has {len(self._slots)}")
        return found

    def find(self, index: int) -> Slot | None:
        """As :meth:`slot`, but None when there is none."""
        return self._slots[index] if 0 <= index < len(self._slots) else None
