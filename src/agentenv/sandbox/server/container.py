"""All slots of one server: packets of its supervisor, leases and reports; and what the sender of a request may do."""

from __future__ import annotations

import hmac
import logging
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final

from aiohttp import web

from agentenv.errors import (
    AgentEnvError,
    CallLostError,
    LeaseLostError,
    ProtocolError,
    SandboxUnavailableError,
    StaleLeaseError,
    from_wire,
)
from agentenv.sandbox.control_protocol import (
    Connected,
    Exported,
    Hello,
    NotFrozen,
    Pong,
    SlotFailed,
    SlotLost,
    SlotRefused,
    SlotView,
)
from agentenv.sandbox.loop_watch import Stalls
from agentenv.sandbox.server.access import BEARER
from agentenv.sandbox.server.calls import Raw, ResultSink, SlotCall, encode_result, refusal
from agentenv.sandbox.server.context import ServerContext
from agentenv.sandbox.server.layer_routes import LayerExports
from agentenv.sandbox.server.process import SlotIo
from agentenv.sandbox.server.slot import Slot
from agentenv.sandbox.server.slot_sessions import SlotHost
from agentenv.sandbox.server.supervisor_link import LayerHandedOver, Received, SlotHandedOver
from agentenv.sandbox.server.uploads import UploadBuffer
from agentenv.wire.calls import Call, CallKey
from agentenv.wire.leases import (
    ActionReply,
    ActionRequest,
    ChangeNetwork,
    CheckpointSlot,
    DropCheckpoint,
    EndRequest,
    LeaseGrant,
    LeaseKey,
    LeaseLoss,
    LeaseRequest,
    PauseSlot,
    PauseWhenIdle,
    ReleaseReply,
    RenewReply,
    RenewRequest,
    RestoreSlot,
    SealSlot,
)
from agentenv.wire.roots import unfit
from agentenv.wire.server import PausedReply, SlotsReply
from agentenv.wire.states import SlotState

_KEEP_CHECKPOINTS_S: Final = 1800.0
"""How long a run's checkpoints are kept while it has no lease in the container."""

_NO_SECRET = "-" * 16
"""The secret of no lease."""

log = logging.getLogger(__name__)


class IdleTimer:
    """Counts authenticated requests, so that a container which outlives its starter can end itself when it is no
    longer used. Pure but for the clock."""

    def __init__(self, after_s: float, clock: Callable[[], float]) -> None:
        """``after_s``: how long a container may be unused; 0: for ever."""
        self._after_s = after_s
        self._clock = clock
        self._open = 0
        self._last_at_s = clock()

    def begin(self) -> None:
        """From now on requests are answered."""
        self._last_at_s = self._clock()

    @contextmanager
    def request(self) -> Iterator[None]:
        """During one request. A long one (a watch, a stream) counts as use until it ends."""
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1
            self._last_at_s = self._clock()

    def is_over(self, *, leased: bool) -> bool:
        """Whether the container has been unused for too long. Never while a slot is ``leased``."""
        if not self._after_s or self._open or leased:
            return False
        return self._clock() - self._last_at_s >= self._after_s


class KeptCheckpoints:
    """The checkpoints made for runs of a farm, and when each run was seen last, so that those of a run that has ended
    can make room for others. Those of no run (the container belongs to one pool) are kept as long as the container.
    Pure."""

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
        """It was dropped. No effect for an unknown one."""
        self._runs.pop(checkpoint, None)

    def seen(self, run: str, now: float) -> None:
        """The run has a lease in the container."""
        if run in self._seen:
            self._seen[run] = now

    def stale(self, leasing: Iterable[str], now: float) -> list[str]:
        """Remove and return the checkpoints of runs that have not been seen for too long and have no lease now."""
        for run in leasing:
            self.seen(run, now)
        ended = {run for run, seen in self._seen.items() if now - seen > self._keep_s}
        dropped = [checkpoint for checkpoint, run in self._runs.items() if run in ended]
        for checkpoint in dropped:
            del self._runs[checkpoint]
        for run in ended:
            del self._seen[run]
        return dropped


class Container:
    """The server without HTTP. ``boot`` identifies this process, new at every start. For calls see
    :class:`Requester`."""

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
        self.idle_timer = IdleTimer(unattended_after_s, context.poller.loop.time)
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
        """See :meth:`agentenv.sandbox.server.supervisor_link.SupervisorLink.silent_s`."""
        return self.context.supervisor.silent_s(self.context.poller.loop.time())

    @property
    def unattended(self) -> bool:
        """Whether the container should end, because it has been unused for too long."""
        return self.idle_timer.is_over(leased=any(slot.reported is SlotState.leased for slot in self._slots))

    def close(self) -> None:
        """Release every slot; the supervisor keeps them running. Repeatable."""
        self.draining = True
        for slot in self._slots:
            slot.close()

    # -- the supervisor ----------------------------------------------------------------------------

    def take(self, received: Received) -> None:
        """Process a packet of the supervisor. Raises ProtocolError when it does not fit the state (nothing leaks)."""
        match received:
            case Pong():
                self.context.supervisor.pong()
                self.supervisor_stalls = received.stalls
            case SlotHandedOver(ready, agents) if slot := self.find(ready.slot):
                slot.ready(ready, agents)
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
                self.exports.exported(received.exported, received.pipe)
            case Exported():
                self.exports.exported(received)
            case Hello() | SlotHandedOver() | SlotFailed() | SlotRefused() | NotFrozen() | Connected() | SlotLost():
                if isinstance(received, SlotHandedOver):
                    for agent in received.agents.values():
                        agent.close()
                raise ProtocolError(f"the supervisor sent an unexpected {type(received).__name__}")

    def obey(self, generation: int) -> None:
        """A farm of this generation controls the container. No effect after one of a higher generation."""
        if generation > self.generation:
            self.generation = generation
            self.context.supervisor.fence(generation)

    def sent(self, call: SlotCall) -> None:
        """The call's result was written to a connection."""
        self._slots[call.slot].calls.sent(call)

    # -- leases ------------------------------------------------------------------------------------

    async def lease(self, request: LeaseRequest) -> LeaseGrant:
        """Lease a slot. Raises InfraError when the slot is not free or could not be made with the root, ConfigError
        when no slot here can have it (nothing has been done then), SandboxUnavailableError when draining."""
        if self.draining:
            raise SandboxUnavailableError("the sandbox server is shutting down", next_step="lease elsewhere")
        slot = self.slot(request.slot)
        if request.root is not None and (why := unfit(request.root, self.context.limits, self.context.refused)):
            raise why
        resumed = self.context.paused.begin_resume(request)
        try:
            lease = slot.grant(request)
            if request.root is not None:
                await slot.wait_rerooted(lease)
        except BaseException:
            self.context.paused.end_resume(resumed, resumed=False)
            raise
        if resumed:
            self.context.paused.end_resume(resumed, resumed=True)
            self.context.supervisor.drop(resumed)
        return lease.as_grant()

    def drop_paused(self, checkpoint: str) -> None:
        """A paused slot is no longer wanted. No effect if it is none."""
        if self.context.paused.dropped(checkpoint):
            self.context.supervisor.drop(checkpoint)

    def heard(self) -> None:
        """A pool has sent a heartbeat, or was sent a beat of its watch."""
        self._heard_at_s = self.context.poller.loop.time()

    def make_room(self) -> None:
        """Drop the checkpoints of runs that have ended, and what was paused too long ago."""
        leasing = {slot.lease.tags.run for slot in self._slots if slot.lease is not None}
        for checkpoint in self.context.paused.stale(self.context.poller.loop.time()):
            log.info("checkpoint %s is dropped: it was paused for long", checkpoint)
            self.context.supervisor.drop(checkpoint)
        for checkpoint in self.checkpoints.stale(leasing, self.context.poller.loop.time()):
            log.info("checkpoint %s is dropped: its run has had no slot here for long", checkpoint)
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

    def paused(self) -> PausedReply:
        """For ``GET /v1/paused``."""
        self.make_room()
        return PausedReply(paused=self.context.paused.report(self.context.poller.loop.time()))

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
        if not 0 <= index < len(self._slots):
            raise StaleLeaseError(f"this container has no slot {index}: it has {len(self._slots)}")
        return self._slots[index]

    def find(self, index: int) -> Slot | None:
        """As :meth:`slot`, but None when there is none."""
        return self._slots[index] if 0 <= index < len(self._slots) else None


class Requester:
    """What the sender of one request or stream may do with a container's leases: run calls, fetch results, renew and
    end leases. With a ``run`` it can use only the leases of that run: the key of another is treated as one with a wrong
    secret. None: leases of any run."""

    def __init__(self, container: Container, run: str | None) -> None:
        self._container = container
        self._context = container.context
        self._run = run

    # -- calls -------------------------------------------------------------------------------------

    def submit(self, calls: Sequence[Call], sink: ResultSink, json_bytes: int) -> None:
        """Run these calls, or send the results of those already known; their JSON has ``json_bytes`` together. Each
        gets one result through ``sink``, unless it is resubmitted over another."""
        bytes_per_call = json_bytes // max(1, len(calls))
        for call in calls:
            try:
                self._submit(call, sink, bytes_per_call)
            except AgentEnvError as error:
                self._context.statistics.calls_faulted += 1
                sink.refuse(call.id, encode_result(refusal(call.id, error)))

    def io_and_env(self, key: LeaseKey) -> tuple[SlotIo, dict[str, str]]:
        """Slot agent and environment for a transfer. Raises StaleLeaseError, SandboxUnavailableError."""
        return self._container.slot(key.slot).io(self._own(key)), self._context.env

    def host(self, key: LeaseKey) -> SlotHost:
        """Starts programs in the slot. Raises StaleLeaseError, SandboxUnavailableError."""
        return self._container.slot(key.slot).host(self._own(key))

    def view(self, key: LeaseKey) -> SlotView | None:
        """What is known of the slot's image; None: it has none. Raises as :meth:`host`."""
        return self._container.slot(key.slot).view(self._own(key))

    async def wait_why_lost(self, key: LeaseKey) -> AgentEnvError | None:
        """Why the lease was lost, once that is known; None if it was not lost."""
        return await self._container.slot(key.slot).wait_why_lost(self._own(key))

    def cancel(self, calls: Iterable[CallKey], sink: ResultSink) -> None:
        """Cancel these calls: each running one gets its (cancelled) result, over ``sink`` too; results of the
        others are discarded. Calls that are unknown, or of another lease, are ignored."""
        for call in calls:
            if (known := self._known(call.id, call.lease)) is None:
                continue
            if known.message is None:
                known.resubmitted(sink)
                self._container.slot(known.slot).calls.cancel(known)
            else:
                self.forget((call,))

    def forget(self, calls: Iterable[CallKey]) -> None:
        """Discard these results: they arrived, or the call will not be submitted. Calls that are unknown, or of
        another lease, are ignored."""
        for call in calls:
            if (known := self._known(call.id, call.lease)) is not None:
                known.cache.forget(known)
                self._container.slot(known.slot).calls.pump()
            elif call.id not in self._context.index:
                with suppress(AgentEnvError):  # a lease that has ended has no uploads
                    self._container.slot(call.lease.slot).admit(self._own(call.lease)).uploads.drop(call.id)

    def uploads(self, key: LeaseKey, call_id: str) -> UploadBuffer:
        """Buffer for the attachments of a call that will be submitted. Raises StaleLeaseError, ProtocolError when it
        was submitted already."""
        cache = self._container.slot(key.slot).admit(self._own(key))
        if call_id in self._context.index or cache.has_ended(call_id):
            raise ProtocolError(f"call {call_id!r} was submitted already")
        return cache.uploads

    def attachment(self, key: LeaseKey, call_id: str, field: str) -> Raw:
        """An attachment of a call's result. Raises StaleLeaseError, CallLostError when there is no such call, or its
        result was discarded."""
        raw = self.in_flight(key, call_id).attachments.get(field)
        if raw is None:
            raise CallLostError(f"there is no {field} of this call, or it was discarded")
        return raw

    def in_flight(self, key: LeaseKey, call_id: str) -> SlotCall:
        """A call whose result is not discarded. Raises StaleLeaseError, CallLostError when there is no such call."""
        cache = self._container.slot(key.slot).admit(self._own(key))
        known = self._known(call_id, key)
        if known is None or known.cache is not cache:
            raise CallLostError("the call is unknown, or its result was discarded")
        return known

    def _submit(self, call: Call, sink: ResultSink, json_bytes: int) -> None:
        if call.id in self._context.index:
            known = self._known(call.id, call.lease)
            if known is None:
                raise ProtocolError(f"call id {call.id!r} is in use under another lease")
            self._context.statistics.calls_asked_again += 1
            known.resubmitted(sink)
            return
        slot = self._container.slot(call.lease.slot)
        cache = slot.admit(self._own(call.lease))
        if cache.has_ended(call.id):
            raise CallLostError("the call ran, but its result has been discarded")
        if call.boot != self._container.boot:
            raise CallLostError("the sandbox server was restarted after the call was sent: it may have run")
        if self._container.draining:
            raise SandboxUnavailableError("the sandbox server is shutting down")
        slot.calls.submit(call, cache, sink, json_bytes)

    def _known(self, call_id: str, lease: LeaseKey) -> SlotCall | None:
        """The call of that id, if it belongs to that lease."""
        known = self._context.index.get(call_id)
        if known is None or known.slot != lease.slot:
            return None
        secret = self._own(lease).secret
        return known if hmac.compare_digest(known.secret.encode(), secret.encode()) else None

    # -- leases ------------------------------------------------------------------------------------

    def renew(self, request: RenewRequest) -> RenewReply:
        """One heartbeat for many leases."""
        self._container.heard()
        if self._run is not None:
            self._container.checkpoints.seen(self._run, self._context.poller.loop.time())
        renewed: list[int] = []
        stale: list[int] = []
        lost: list[LeaseLoss] = []
        for sent in request.keys:
            key, slot = self._own(sent), self._container.find(sent.slot)
            # The farm has decided how long a lease may last without a heartbeat, not the holder of a pass.
            alive = slot is not None and slot.renew(key, request.ttl_s, lengthens=self._run is None)
            (renewed if alive else stale).append(key.slot)
            if not alive and slot is not None and (why := slot.why_lost(key)):
                lost.append(LeaseLoss(slot=key.slot, error=why.code, message=str(why)))
        return RenewReply(
            renewed=tuple(renewed),
            stale=tuple(stale),
            lost=tuple(lost),
            supervisor_silent_s=self._container.supervisor_silent_s,
        )

    async def release(self, key: LeaseKey) -> ReleaseReply:
        """See :meth:`agentenv.sandbox.server.slot.Slot.release`."""
        return ReleaseReply(slot=key.slot, state=await self._container.slot(key.slot).release(self._own(key)))

    async def act(self, request: ActionRequest) -> ActionReply:
        """Do something to a leased slot. Raises as the slot's method of that name does."""
        slot, key = self._container.slot(request.key.slot), self._own(request.key)
        checkpoint = ""
        match request.action:
            case SealSlot():
                await slot.seal(key, request.request_id)
            case CheckpointSlot():
                checkpoint = await self._checkpoint(slot, key, request.request_id)
            case PauseSlot():
                self._container.make_room()
                checkpoint = await slot.pause(key, request.request_id)
            case PauseWhenIdle():
                slot.pause_when_idle(key)
            case RestoreSlot(checkpoint=name):
                await slot.restore(key, name)
            case ChangeNetwork(network=policy):
                await slot.connect(key, policy)
            case DropCheckpoint(checkpoint=name):
                slot.admit(key)
                self._context.supervisor.drop(name)
                self._container.checkpoints.dropped(name)
                self._context.paused.dropped(name)
        return ActionReply(slot=slot.index, state=slot.reported, checkpoint=checkpoint)

    async def _checkpoint(self, slot: Slot, key: LeaseKey, request_id: str) -> str:
        now_s = self._context.poller.loop.time()
        self._container.make_room()
        name = await slot.checkpoint(key, request_id)
        self._container.checkpoints.made(name, slot.run_of(key.epoch) or "", now_s)
        return name

    def _own(self, key: LeaseKey) -> LeaseKey:
        """The key; in place of one of another run's lease, a key that matches no lease."""
        if self._run is None:
            return key
        slot = self._container.find(key.slot)
        run = None if slot is None else slot.run_of(key.epoch)
        return key if run in (None, self._run) else key.model_copy(update={"secret": _NO_SECRET})


def requester_of(request: web.Request, container: Container) -> Requester:
    """The sender of this request."""
    return Requester(container, request[BEARER].run)
