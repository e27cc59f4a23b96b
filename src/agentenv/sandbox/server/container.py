"""All slots of one server: routes calls and leases to their slot."""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
from collections.abc import Iterable, Sequence

from agentenv.errors import (
    AgentEnvError,
    CallLostError,
    ProtocolError,
    SandboxUnavailableError,
    StaleLeaseError,
)
from agentenv.sandbox.control_protocol import Hello, Pong, SlotFailed, SlotLost
from agentenv.sandbox.loop_watch import Stalls
from agentenv.sandbox.server.calls import CallInFlight, Outlet, encode_result, refusal
from agentenv.sandbox.server.context import ServerContext
from agentenv.sandbox.server.inbox import Inbox, close_all
from agentenv.sandbox.server.process import SlotIo
from agentenv.sandbox.server.replies import Raw
from agentenv.sandbox.server.slot import Slot
from agentenv.sandbox.server.supervisor_link import Received, SlotHandedOver
from agentenv.sandbox.server.tools.registry import parse_arguments, with_attached
from agentenv.wire.calls import Call, CallKey
from agentenv.wire.leases import (
    EndRequest,
    LeaseGrant,
    LeaseKey,
    LeaseLoss,
    LeaseRequest,
    ReleaseReply,
    RenewReply,
    RenewRequest,
    SealRequest,
)
from agentenv.wire.server import SlotsReply
from agentenv.wire.states import SlotState

log = logging.getLogger(__name__)


class Container:
    """The server without HTTP. ``boot`` identifies this process, new at every start."""

    def __init__(self, slots: int, context: ServerContext) -> None:
        self.boot = secrets.token_hex(8)
        self.draining = False
        self.counted = context.statistics
        self.supervisor_stalls = Stalls()
        """Stalls of the supervisor's event loop, as last reported."""
        self._context = context
        self._heard_at_s = context.poller.loop.time()
        self._slots = [Slot(index, context) for index in range(slots)]

    def __repr__(self) -> str:
        return f"Container({self.boot}, {self._slots!r})"

    @property
    def settled(self) -> bool:
        """Whether the supervisor has reported the state of every slot."""
        return all(slot.state is not SlotState.resetting for slot in self._slots)

    @property
    def supervisor_silent_s(self) -> float:
        """Seconds for which the supervisor has not answered."""
        return self._context.supervisor.silent_s(self._context.poller.loop.time())

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
                self._context.supervisor.answered()
                self.supervisor_stalls = received.stalls
            case SlotHandedOver(ready, agent) if self._has(ready.slot):
                self._slots[ready.slot].ready(ready, agent)
            case SlotFailed() if self._has(received.slot):
                self._slots[received.slot].failed(received.epoch, received.reason)
            case SlotLost() if self._has(received.slot):
                self._slots[received.slot].lost(received.loss, received.reason)
            case Hello() | SlotHandedOver() | SlotFailed() | SlotLost():
                if isinstance(received, SlotHandedOver):
                    received.agent.close()
                raise ProtocolError(f"the supervisor sent an unexpected {type(received).__name__}")

    def _has(self, slot: int) -> bool:
        return 0 <= slot < len(self._slots)

    # -- calls -------------------------------------------------------------------------------------

    def submit(self, calls: Sequence[Call], outlet: Outlet, size_bytes: int) -> None:
        """Run these calls, or answer for those already known; together they took ``size_bytes`` of JSON. Each gets
        one answer through ``outlet``, unless it is resubmitted over another."""
        held_bytes = size_bytes // max(1, len(calls))
        for call in calls:
            try:
                self._submit(call, outlet, held_bytes)
            except AgentEnvError as error:
                self.counted.calls_faulted += 1
                outlet.refuse(call.id, encode_result(refusal(call.id, error)))

    def beside(self, key: LeaseKey) -> tuple[SlotIo, dict[str, str]]:
        """Slot agent and environment for a transfer. Raises StaleLeaseError, SandboxUnavailableError."""
        return self._slot(key.slot).beside(key), self._context.env

    def cancel(self, calls: Iterable[CallKey], outlet: Outlet) -> None:
        """Cancel these calls: each running one gets its (cancelled) answer, over ``outlet`` too; answers of the
        others are forgotten. Calls that are unknown, or of another lease, are ignored."""
        for call in calls:
            if (asked := self._known(call.id, call.lease)) is None:
                continue
            if asked.message is None:
                asked.resubmitted(outlet)
                self._slots[asked.slot].cancel(asked)
            else:
                self.forget((call,))

    def forget(self, calls: Iterable[CallKey]) -> None:
        """These answers arrived, or the call will not be submitted. Calls that are unknown, or of another lease,
        are ignored."""
        for call in calls:
            if (asked := self._known(call.id, call.lease)) is not None:
                asked.memory.forget(asked)
                self._slots[asked.slot].made_room()
            elif call.id not in self._context.index and call.lease.slot < len(self._slots):
                with contextlib.suppress(AgentEnvError):  # nothing is kept for a lease that has ended, however it ended
                    self._slots[call.lease.slot].admit(call.lease).inbox.drop(call.id)

    def inbox(self, key: LeaseKey, call_id: str) -> Inbox:
        """Inbox for the attachments of a call that will be submitted. Raises StaleLeaseError, ProtocolError when it
        was submitted already."""
        memory = self._slot(key.slot).admit(key)
        if call_id in self._context.index or memory.has_ended(call_id):
            raise ProtocolError(f"call {call_id!r} was asked already")
        return memory.inbox

    def fetched(self, key: LeaseKey, call_id: str, field: str) -> Raw:
        """Attachments of a finished call's result; empty once it is forgotten. Raises StaleLeaseError,
        CallLostError when there is no such call."""
        raw = self.in_flight(key, call_id).attachments.get(field)
        if raw is None:
            raise CallLostError(f"the call's {field} is not remembered (any longer)")
        return raw

    def in_flight(self, key: LeaseKey, call_id: str) -> CallInFlight:
        """A call whose result is not forgotten. Raises StaleLeaseError, CallLostError when there is no such call."""
        memory = self._slot(key.slot).admit(key)
        asked = self._known(call_id, key)
        if asked is None or asked.memory is not memory:
            raise CallLostError("the call is not remembered (any longer)")
        return asked

    def sent(self, asked: CallInFlight) -> None:
        """This answer was handed to a connection."""
        asked.memory.sent(asked)
        self._slots[asked.slot].made_room()

    def _submit(self, call: Call, outlet: Outlet, held_bytes: int) -> None:
        if call.id in self._context.index:
            known = self._known(call.id, call.lease)
            if known is None:
                raise ProtocolError(f"call id {call.id!r} is in use under another lease")
            self.counted.calls_asked_again += 1
            known.resubmitted(outlet)
            return
        slot = self._slot(call.lease.slot)
        memory = slot.admit(call.lease)
        if memory.has_ended(call.id):
            raise CallLostError("the call ran, but its answer is no longer remembered")
        if call.boot != self.boot:
            raise CallLostError("the sandbox server was restarted after the call was sent: it may have run")
        if self.draining:
            raise SandboxUnavailableError("the sandbox server is shutting down")
        attached = memory.inbox.take(call.id, call.attachments)
        try:
            arguments = parse_arguments(call.tool, with_attached(call.tool, call.arguments, attached))
            slot.submit(call, arguments, memory, outlet, held_bytes, attached)
        except BaseException:
            close_all(attached)
            raise

    def _known(self, call_id: str, lease: LeaseKey) -> CallInFlight | None:
        """The call of that id, if it belongs to that lease."""
        asked = self._context.index.get(call_id)
        if not isinstance(asked, CallInFlight) or asked.slot != lease.slot:
            return None
        return asked if hmac.compare_digest(asked.secret.encode(), lease.secret.encode()) else None

    # -- leases ------------------------------------------------------------------------------------

    def lease(self, request: LeaseRequest) -> LeaseGrant:
        """Lease a slot. Raises InfraError when the slot is not free, SandboxUnavailableError when draining."""
        if self.draining:
            raise SandboxUnavailableError("the sandbox server is shutting down", next_step="lease elsewhere")
        return self._slot(request.slot).grant(request).as_grant()

    def renew(self, request: RenewRequest) -> RenewReply:
        """One heartbeat for many leases."""
        self._heard_at_s = self._context.poller.loop.time()
        renewed: list[int] = []
        stale: list[int] = []
        lost: list[LeaseLoss] = []
        for key in request.keys:
            alive = key.slot < len(self._slots) and self._slots[key.slot].renew(key, request.ttl_s)
            (renewed if alive else stale).append(key.slot)
            if not alive and key.slot < len(self._slots) and (why := self._slots[key.slot].why_lost(key)):
                lost.append(LeaseLoss(slot=key.slot, error=why.code, message=str(why)))
        return RenewReply(
            renewed=tuple(renewed),
            stale=tuple(stale),
            lost=tuple(lost),
            supervisor_silent_s=self.supervisor_silent_s,
        )

    async def release(self, key: LeaseKey) -> ReleaseReply:
        """See :meth:`Slot.release`."""
        return ReleaseReply(slot=key.slot, state=await self._slot(key.slot).release(key))

    async def end(self, request: EndRequest) -> ReleaseReply:
        """See :meth:`Slot.end`."""
        return ReleaseReply(slot=request.slot, state=await self._slot(request.slot).end(request.epoch))

    async def seal(self, request: SealRequest) -> ReleaseReply:
        """See :meth:`Slot.seal`."""
        state = await self._slot(request.slot).seal(request.key, request.request_id)
        return ReleaseReply(slot=request.slot, state=state)

    # -- reports -----------------------------------------------------------------------------------

    def inventory(self) -> SlotsReply:
        """For ``GET /v1/slots``."""
        heard_s = self._context.poller.loop.time() - self._heard_at_s
        return SlotsReply(boot=self.boot, slots=tuple(slot.report() for slot in self._slots), heard_s=heard_s)

    def statistics(self) -> dict[str, int]:
        """For ``GET /v1/statistics``."""
        counted = self.counted
        states = [slot.state for slot in self._slots]
        counted.slots_free = states.count(SlotState.free)
        counted.slots_leased = states.count(SlotState.leased)
        counted.calls_queued = sum(slot.queued for slot in self._slots)
        counted.calls_running = sum(slot.busy for slot in self._slots)
        return counted.as_dict()

    def states(self) -> dict[str, int]:
        """Number of slots per state, including empty states."""
        states = [slot.state for slot in self._slots]
        return {state.value: states.count(state) for state in SlotState}

    def _slot(self, index: int) -> Slot:
        if index >= len(self._slots):
            raise StaleLeaseError(f"this container has no slot {index}: it has {len(self._slots)}")
        return self._slots[index]
