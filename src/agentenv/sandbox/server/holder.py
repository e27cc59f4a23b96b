"""What the holder of lease keys may do with a container: run calls, fetch answers, keep and end its leases."""

from __future__ import annotations

import contextlib
import hmac
from collections.abc import Iterable, Sequence

from aiohttp import web

from agentenv.errors import AgentEnvError, CallLostError, ProtocolError, SandboxUnavailableError
from agentenv.sandbox.server.access import BEARER
from agentenv.sandbox.server.calls import CallInFlight, Outlet, encode_result, refusal
from agentenv.sandbox.server.container import Container
from agentenv.sandbox.server.inbox import Inbox
from agentenv.sandbox.server.process import SlotIo
from agentenv.sandbox.server.replies import Raw
from agentenv.sandbox.server.slot import Slot
from agentenv.sandbox.server.slot_sessions import SlotHost
from agentenv.wire.calls import Call, CallKey
from agentenv.wire.leases import (
    ActionReply,
    ActionRequest,
    ChangeNetwork,
    CheckpointSlot,
    DropCheckpoint,
    LeaseKey,
    LeaseLoss,
    ReleaseReply,
    RenewReply,
    RenewRequest,
    RestoreSlot,
    SealSlot,
)

_NO_SECRET = "-" * 16
"""The secret of no lease."""


class Holder:
    """The sender of one request or stream. With a ``run`` it can use only that run's leases: the key of another is
    answered as one with a wrong secret. None: leases of any run."""

    def __init__(self, container: Container, run: str | None) -> None:
        self._container = container
        self._context = container.context
        self._run = run

    # -- calls -------------------------------------------------------------------------------------

    def submit(self, calls: Sequence[Call], outlet: Outlet, size_bytes: int) -> None:
        """Run these calls, or answer for those already known; together they took ``size_bytes`` of JSON. Each gets
        one answer through ``outlet``, unless it is resubmitted over another."""
        held_bytes = size_bytes // max(1, len(calls))
        for call in calls:
            try:
                self._submit(call, outlet, held_bytes)
            except AgentEnvError as error:
                self._context.statistics.calls_faulted += 1
                outlet.refuse(call.id, encode_result(refusal(call.id, error)))

    def beside(self, key: LeaseKey) -> tuple[SlotIo, dict[str, str]]:
        """Slot agent and environment for a transfer. Raises StaleLeaseError, SandboxUnavailableError."""
        return self._container.slot(key.slot).beside(self._own(key)), self._context.env

    def host(self, key: LeaseKey) -> SlotHost:
        """Starts programs in the slot. Raises StaleLeaseError, SandboxUnavailableError."""
        return self._container.slot(key.slot).host(self._own(key))

    async def lost_with(self, key: LeaseKey) -> AgentEnvError | None:
        """Why the lease was lost, once that is known; None if it was not."""
        return await self._container.slot(key.slot).lost_with(self._own(key))

    def cancel(self, calls: Iterable[CallKey], outlet: Outlet) -> None:
        """Cancel these calls: each running one gets its (cancelled) answer, over ``outlet`` too; answers of the
        others are forgotten. Calls that are unknown, or of another lease, are ignored."""
        for call in calls:
            if (asked := self._known(call.id, call.lease)) is None:
                continue
            if asked.message is None:
                asked.resubmitted(outlet)
                self._container.slot(asked.slot).calls.cancel(asked)
            else:
                self.forget((call,))

    def forget(self, calls: Iterable[CallKey]) -> None:
        """These answers arrived, or the call will not be submitted. Calls that are unknown, or of another lease,
        are ignored."""
        for call in calls:
            if (asked := self._known(call.id, call.lease)) is not None:
                asked.memory.forget(asked)
                self._container.slot(asked.slot).calls.pump()
            elif call.id not in self._context.index:
                with contextlib.suppress(AgentEnvError):  # nothing is kept for a lease that has ended, however it ended
                    self._container.slot(call.lease.slot).admit(self._own(call.lease)).inbox.drop(call.id)

    def inbox(self, key: LeaseKey, call_id: str) -> Inbox:
        """Inbox for the attachments of a call that will be submitted. Raises StaleLeaseError, ProtocolError when it
        was submitted already."""
        memory = self._container.slot(key.slot).admit(self._own(key))
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
        memory = self._container.slot(key.slot).admit(self._own(key))
        asked = self._known(call_id, key)
        if asked is None or asked.memory is not memory:
            raise CallLostError("the call is not remembered (any longer)")
        return asked

    def _submit(self, call: Call, outlet: Outlet, held_bytes: int) -> None:
        if call.id in self._context.index:
            known = self._known(call.id, call.lease)
            if known is None:
                raise ProtocolError(f"call id {call.id!r} is in use under another lease")
            self._context.statistics.calls_asked_again += 1
            known.resubmitted(outlet)
            return
        slot = self._container.slot(call.lease.slot)
        memory = slot.admit(self._own(call.lease))
        if memory.has_ended(call.id):
            raise CallLostError("the call ran, but its answer is no longer remembered")
        if call.boot != self._container.boot:
            raise CallLostError("the sandbox server was restarted after the call was sent: it may have run")
        if self._container.draining:
            raise SandboxUnavailableError("the sandbox server is shutting down")
        slot.calls.submit(call, memory, outlet, held_bytes)

    def _known(self, call_id: str, lease: LeaseKey) -> CallInFlight | None:
        """The call of that id, if it belongs to that lease."""
        asked = self._context.index.get(call_id)
        if not isinstance(asked, CallInFlight) or asked.slot != lease.slot:
            return None
        own = self._own(lease)
        return asked if hmac.compare_digest(asked.secret.encode(), own.secret.encode()) else None

    # -- leases ------------------------------------------------------------------------------------

    def renew(self, request: RenewRequest) -> RenewReply:
        """One heartbeat for many leases."""
        self._container.heard()
        if self._run is not None:
            self._container.checkpoints.seen(self._run, self._context.poller.loop.time())
        renewed: list[int] = []
        stale: list[int] = []
        lost: list[LeaseLoss] = []
        for given in request.keys:
            key, slot = self._own(given), self._container.find(given.slot)
            # How long a lease may last unattended the farm has decided, not the holder of a pass.
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
            case RestoreSlot(checkpoint=name):
                await slot.restore(key, name)
            case ChangeNetwork(network=policy):
                await slot.connect(key, policy)
            case DropCheckpoint(checkpoint=name):
                slot.admit(key)
                self._context.supervisor.drop(name)
                self._container.checkpoints.dropped(name)
        return ActionReply(slot=slot.index, state=slot.reported, checkpoint=checkpoint)

    async def _checkpoint(self, slot: Slot, key: LeaseKey, request_id: str) -> str:
        now_s = self._context.poller.loop.time()
        self._container.make_room()
        name = await slot.checkpoint(key, request_id)
        self._container.checkpoints.made(name, slot.run_of(key.epoch) or "", now_s)
        return name

    def _own(self, key: LeaseKey) -> LeaseKey:
        """The key; in place of one of another run's lease, a key that matches no lease."""
        slot = self._container.find(key.slot)
        run = None if self._run is None or slot is None else slot.run_of(key.epoch)
        return key if run in (None, self._run) else key.model_copy(update={"secret": _NO_SECRET})


def holder_of(request: web.Request, container: Container) -> Holder:
    """What the sender of this request may do with the container's leases."""
    return Holder(container, request[BEARER].run)
