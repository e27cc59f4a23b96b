"""One slot: its state and its lease. ``slot_states`` has the legal moves, ``call_queue`` the slot's calls."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from agentenv.deadlines import RELEASE_S, REROOT_S, SEAL_S, scaled
from agentenv.errors import (
    AgentEnvError,
    BadImageError,
    CheckpointError,
    ConfigError,
    ImageUnavailableError,
    LeaseLostError,
    ProtocolError,
    SandboxUnavailableError,
    SlotDestroyedError,
    StaleLeaseError,
    from_wire,
)
from agentenv.sandbox.control_protocol import SlotReady, SlotView
from agentenv.sandbox.limit_watch import MEMORY_ABOVE
from agentenv.sandbox.server.call_queue import Agents, CallQueue, close_agents
from agentenv.sandbox.server.calls import ResultCache
from agentenv.sandbox.server.context import ServerContext
from agentenv.sandbox.server.leases import Lease
from agentenv.sandbox.server.process import SlotIo
from agentenv.sandbox.server.slot_sessions import SlotHost
from agentenv.sandbox.server.slot_states import REPORTED, USABLE, Event, Move, Refusal, State, decide, may
from agentenv.sandbox.slot_loss import WAYS, LossReason, error_of
from agentenv.wire.leases import LeaseKey, LeaseRequest, SlotReport
from agentenv.wire.network import NetworkPolicy
from agentenv.wire.roots import RootSpec
from agentenv.wire.states import SlotState

_ROOT_ERRORS = (BadImageError.code, CheckpointError.code, ConfigError.code, ImageUnavailableError.code)
"""Errors of a refused root that the client gets unchanged, because its request caused them."""
_ENDED_REQUESTS = 64
_EXPLAIN_S = scaled(5.0)
"""Time for the supervisor to report why a slot's agent ended."""
_HELD_S = 0.5
"""A timer that is so late was held up by this process."""

log = logging.getLogger(__name__)


@dataclass
class _Checkpoint:
    """A checkpoint in the making."""

    name: str
    failure: str = ""
    """Why it could not be made."""


class Slot:
    """One slot. Slots never wait for each other."""

    def __init__(self, index: int, context: ServerContext) -> None:
        self.index = index
        self.state = State.resetting
        self.epoch = 0
        self.lease: Lease | None = None
        self.reason = ""
        self._context = context
        self._loop = context.poller.loop
        self._reported_since_s = self._loop.time()
        self._moved = asyncio.Event()
        """Set at the next move, and replaced."""
        self._checkpoint = _Checkpoint("")
        """The latest of this lease."""
        self._network_changes: deque[asyncio.Future[str]] = deque()
        """Changes of the network that the supervisor has not confirmed, in order."""
        self._expiry_timer: asyncio.TimerHandle | None = None
        """The end of the lease without a heartbeat."""
        self._pausing: asyncio.Task[None] | None = None
        """The pause of a lease that was not renewed in time."""
        self._explain_timer: asyncio.TimerHandle | None = None
        """The time for the supervisor to explain the end of the agent."""
        self._ended_requests: deque[str] = deque(maxlen=_ENDED_REQUESTS)
        """Request ids of leases that have ended: a late copy of such a request must not get a lease."""
        self._lost: tuple[Lease, AgentEnvError] | None = None
        """The lease that was lost last, and why, so that late clients get the reason instead of StaleLeaseError."""
        self._released: Lease | None = None
        """The lease that was released last: others may still have its key."""
        self.calls = CallQueue(index, context, self._agent_lost, lambda: self.state in USABLE)

    def __repr__(self) -> str:
        return f"Slot({self.index}, {self.state}, epoch={self.epoch}, {self.calls!r})"

    @property
    def reported(self) -> SlotState:
        """Its state as clients know it."""
        return REPORTED[self.state]

    def report(self) -> SlotReport:
        """For ``GET /v1/slots``."""
        lease = self.lease
        return SlotReport(
            slot=self.index,
            state=self.reported,
            epoch=self.epoch,
            trajectory=lease.trajectory if lease else None,
            tags=lease.tags if lease else None,
            expires_in_s=max(0.0, lease.expires_at_s - self._loop.time()) if lease else None,
            running_calls=len(self.calls),
            in_state_s=self._loop.time() - self._reported_since_s,
            reason=self.reason,
        )

    # -- state -------------------------------------------------------------------------------------

    def _move(self, event: Event) -> bool:
        """Take the move of this event; returns whether it led to another state. Raises StaleLeaseError,
        SandboxUnavailableError when the event may not happen now; nothing has changed then."""
        move = self._allowed(event)
        if move is None or move.to is self.state:
            return False
        if REPORTED[move.to] is not self.reported:
            self._reported_since_s = self._loop.time()
            self._context.changed(self.index)
        self.state = move.to
        if self._explain_timer is not None and move.to is not State.agent_gone:
            self._explain_timer.cancel()
            self._explain_timer = None
        if move.request_reset:
            self._context.supervisor.reset(self.index, self.epoch)
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()
        return True

    def _allowed(self, event: Event) -> Move | None:
        """The move of this event; None when it comes too late to mean anything. Raises as :meth:`_move`."""
        match decide(self.state, event):
            case Refusal.not_free:
                raise StaleLeaseError(f"slot {self.index} is {self.reported}, not free", next_step="lease another slot")
            case Refusal.busy:
                raise SandboxUnavailableError(f"slot {self.index} is being recreated", next_step="retry")
            case Refusal():
                return None
            case Move() as move:
                return move

    async def _wait_for(self, condition: Callable[[], bool], within_s: float | None) -> bool:
        """Wait for a move after which the condition holds; False if there was none ``within_s``."""
        try:
            async with asyncio.timeout(within_s):
                while not condition():
                    await self._moved.wait()
        except TimeoutError:
            return False
        return True

    # -- leases ------------------------------------------------------------------------------------

    def grant(self, request: LeaseRequest) -> Lease:
        """Lease this slot; repeating a ``request_id`` returns the same lease. Raises StaleLeaseError when the slot
        is not free: the client's view is outdated."""
        if self.lease is not None and self.lease.request_id == request.request_id:
            return self.lease
        if request.request_id in self._ended_requests:
            raise StaleLeaseError(f"slot {self.index} was leased by this request before, and that lease has ended")
        self._move(Event.grant if request.root is None else Event.grant_root)
        self.calls.any_ran = False
        if request.root is not None:
            self.calls.close()
        lease = Lease.grant(request, self.epoch, self._loop.time())
        self._adopt(lease)
        if request.root is not None:
            self._context.supervisor.reroot(self.index, self.epoch, request.root.to_dict())
        self._context.statistics.leases_granted += 1
        return lease

    async def wait_rerooted(self, lease: Lease) -> None:
        """Wait until the slot has the root that this lease was granted with. Raises what the lease has ended with."""
        await self._wait_recreated(lease, State.rerooting, "made", REROOT_S, LossReason.refused)

    def why_lost(self, key: LeaseKey) -> AgentEnvError | None:
        """Why the lease with this key was lost; None if it was not, or if that was longer ago than one lease."""
        return self._lost[1] if self._lost is not None and self._lost[0].admits(key) else None

    async def wait_why_lost(self, key: LeaseKey) -> AgentEnvError | None:
        """As :meth:`why_lost`, for streamed programs: waits until the supervisor has reported why the slot ended,
        because a program ends before that."""
        lease = self.lease
        if lease is not None and lease.admits(key):
            await self._wait_for(lambda: self.state is not State.agent_gone or self.lease is not lease, None)
        return self.why_lost(key)

    def run_of(self, epoch: int) -> str | None:
        """The run that has the lease of this epoch, or had it when it was lost last; None if there is no such lease."""
        lost = self._lost[0] if self._lost is not None else None
        return next((one.tags.run for one in (self.lease, lost) if one is not None and one.key.epoch == epoch), None)

    def renew(self, key: LeaseKey, ttl_s: float, *, lengthens: bool = True) -> bool:
        """One heartbeat; False when the lease has ended. Without ``lengthens`` it may shorten the time to live, not
        lengthen it."""
        if self.lease is None or not self.lease.admits(key):
            return False
        if self.lease.not_renewed:
            self._revoke(LeaseLostError(self.lease.not_renewed, next_step="lease by another token"))
            return False
        self.lease.ttl_s = ttl_s if lengthens else min(ttl_s, self.lease.ttl_s)
        self.lease.expires_at_s = self._loop.time() + self.lease.ttl_s
        self._watch_expiry()
        return True

    async def release(self, key: LeaseKey) -> SlotState:
        """End the lease and return when the slot is verified clean (or not), or after RELEASE_S. An epoch that has
        ended is not an error. Raises StaleLeaseError when the epoch is current but the key does not match its
        lease."""
        if self.lease is not None and self.lease.admits(key):
            lease = self._released = self.lease
            released = f"slot {self.index}: the lease of {lease.trajectory!r} was released"
            self._end_lease(LeaseLostError(released), released=True)
            self._leave(Event.give_back)
        elif key.epoch > self.epoch or (self.lease is not None and key.epoch == self.epoch):
            raise self._stale(key)
        if not await self._wait_for(
            lambda: key.epoch < self.epoch or self.reported is not SlotState.resetting, RELEASE_S
        ):
            return SlotState.resetting
        return SlotState.quarantined if self.state is State.quarantined else SlotState.free

    async def end(self, epoch: int, why: AgentEnvError | None = None, *, at_renewal: bool = False) -> SlotState:
        """End the lease of ``epoch``, of any holder, as :meth:`release` does; no effect for another epoch. With
        ``why`` the lease is lost, and its holder gets that reason; ``at_renewal``: instead of its next renewal."""
        if self.lease is None or self.epoch != epoch:
            if why is None:
                self._context.lost.released(self.index, epoch)
            return self.reported
        key = self.lease.key
        if why is not None and at_renewal:
            self.lease.not_renewed = why.message
            self._remember(self.lease)
            return self.reported
        if why is not None:
            self._revoke(why)
        return await self.release(key)

    # -- what a lease's holder may do to the slot ----------------------------------------------------

    async def seal(self, key: LeaseKey, request_id: str = "") -> None:
        """Kill everything in the slot and recreate it over the same workspace, keeping the lease; once per
        non-empty ``request_id``. Queued calls wait for it; a running one is cancelled.

        Raises StaleLeaseError, SlotDestroyedError, LeaseLostError (also when it takes too long: the lease ends);
        SandboxUnavailableError while the slot is recreated for another reason.
        """
        lease = self._held(key)
        if self.state is not State.sealing and request_id and request_id == lease.sealed_by:
            return
        if self._move(Event.seal):
            lease.sealed_by = request_id
            self.calls.stop()
            self.calls.close()
            self._context.supervisor.seal(self.index, self.epoch)
        # Programs in the slot can make the seal slow, so this must not be a failure of ours, which is retried.
        await self._wait_recreated(lease, State.sealing, "sealed", SEAL_S)

    async def checkpoint(self, key: LeaseKey, request_id: str = "") -> str:
        """Kill everything in the slot and keep its files as a checkpoint; the slot continues with them. Returns its
        name. Once per non-empty ``request_id``. A running call is cancelled. Raises as :meth:`seal`; CheckpointError
        when it was not made."""
        lease = self._held(key)
        if request_id in lease.checkpoints:
            return lease.checkpoints[request_id]
        self._move(Event.freeze)
        checkpoint = self._checkpoint = _Checkpoint(secrets.token_hex(16))
        self.calls.stop()
        self._context.supervisor.freeze(self.index, self.epoch, checkpoint.name)
        await self._wait_recreated(lease, State.freezing, "frozen", SEAL_S)
        if checkpoint.failure:
            raise CheckpointError(f"no checkpoint was made: {checkpoint.failure}")
        if request_id:
            lease.checkpoints[request_id] = checkpoint.name
        return checkpoint.name

    async def pause(self, key: LeaseKey, request_id: str = "") -> str:
        """End the lease, and keep the slot's files as a checkpoint; returns its name. See
        :class:`agentenv.wire.leases.PausedSlot`. Raises as :meth:`checkpoint`, and then the lease goes on."""
        if made := self._context.paused.made_by(request_id, key):
            return made
        lease = self._held(key)
        name = await self.checkpoint(key, request_id)
        self._context.paused.add(lease, name, request_id, self._loop.time())
        self._revoke(LeaseLostError(f"{lease.trajectory!r} was paused", next_step="resume it by its name"))
        return name

    def pause_when_idle(self, key: LeaseKey) -> None:
        """See :class:`agentenv.wire.leases.PauseWhenIdle`."""
        lease = self._held(key)
        lease.pauses_when_idle = True
        self._remember(lease)

    async def restore(self, key: LeaseKey, checkpoint: str) -> None:
        """Kill everything in the slot and give it the files of a checkpoint in place of its own, with which it is no
        longer sealed. Raises as :meth:`seal`; when there is no such checkpoint the lease ends."""
        lease = self._held(key)
        self._move(Event.reroot)
        lease.root = replace(lease.root or RootSpec("", checkpoint), checkpoint=checkpoint)
        self.calls.stop()
        self.calls.close()
        self._context.supervisor.reroot(self.index, self.epoch, lease.root.to_dict())
        await self._wait_recreated(lease, State.rerooting, "restored", SEAL_S)

    async def connect(self, key: LeaseKey, policy: NetworkPolicy) -> None:
        """Change the network of an image slot; its processes continue. Raises StaleLeaseError, LeaseLostError;
        SandboxUnavailableError when that fails, and then the slot has no network; SlotDestroyedError when it takes too
        long: the lease ends, because it is unknown which network the slot has."""
        lease = self._held(key)
        self._allowed(Event.connect)
        if lease.root is None or not lease.root.image:
            raise SandboxUnavailableError("a slot without an image uses its container's network")
        lease.root = replace(lease.root, network=policy)
        self._remember(lease)
        waiter: asyncio.Future[str] = self._loop.create_future()
        self._network_changes.append(waiter)
        self._context.supervisor.connect(self.index, self.epoch, policy.to_json())
        reason = ""
        try:
            async with asyncio.timeout(SEAL_S):
                reason = await waiter
        except TimeoutError:
            if self.lease is lease:
                self._revoke(self._error_of(LossReason.unchanged, f"its network was not changed within {SEAL_S:g} s"))
        if self.lease is not lease:
            raise self._lost_error(key)
        if reason:
            raise SandboxUnavailableError(f"the network of slot {self.index}: {reason}")

    def _held(self, key: LeaseKey) -> Lease:
        """The lease with ``key``. Raises StaleLeaseError, or the error the lease was lost with."""
        if self.lease is None or not self.lease.admits(key):
            raise self._lost_error(key)
        return self.lease

    async def _wait_recreated(
        self, lease: Lease, state: State, what: str, within_s: float, loss: LossReason = LossReason.not_renewed
    ) -> None:
        """Wait until the slot has left this state, in which it is being ``what``. Raises the error with which the lease
        has ended by then; when it takes longer than ``within_s``, the lease ends with ``loss``."""
        if not await self._wait_for(lambda: self.state is not state or self.lease is not lease, within_s):
            self._revoke(self._error_of(loss, f"it was not {what} within {within_s:g} s"))
        if self.lease is not lease:
            raise self.why_lost(lease.key) or LeaseLostError(
                f"slot {self.index} was lost: {self.reason or self.reported}"
            )

    # -- packets of the supervisor -----------------------------------------------------------------

    def ready(self, packet: SlotReady, agents: Agents) -> None:
        """The slot is usable (again); ``agents`` are owned from now on."""
        event = Event.kept if packet.kept else Event.replaced
        if packet.epoch != self.epoch or not may(self.state, event):
            self._begin_epoch(packet, agents)
        elif self.lease is None:
            close_agents(agents)
            self._move(event)
        else:
            if self.state is not State.freezing:  # a restore ends what a seal began
                self.lease.sealed = self.state is State.sealing
                self._remember(self.lease)
            self.calls.close()
            self._open_calls(packet, agents, era=0, sealed=self.lease.sealed)
            self._move(event)
        self.calls.pump()

    def refused(self, epoch: int, code: str, reason: str) -> None:
        """The slot cannot have the root of its lease; it is being reset."""
        if epoch == self.epoch and may(self.state, Event.refused):
            self._lose(from_wire(code, reason) if code in _ROOT_ERRORS else self._error_of(LossReason.refused, reason))
            self._leave(Event.refused)

    def not_frozen(self, epoch: int, reason: str, *, ended: bool) -> None:
        """The checkpoint was not made. The slot continues, or will be ready again if its processes have ended."""
        if epoch == self.epoch and may(self.state, Event.not_frozen):
            self._checkpoint.failure = reason
            if not ended:
                self._move(Event.not_frozen)
                self.calls.pump()

    def connected(self, epoch: int, env: dict[str, str], reason: str) -> None:
        """The supervisor has changed the network, or failed to (``reason``). It confirms requests in their order."""
        if epoch != self.epoch or not self._network_changes:
            return
        _set_reason(self._network_changes.popleft(), reason)
        self.calls.change_network_env(env)

    def failed(self, epoch: int, reason: str) -> None:
        """The slot could not be verified clean."""
        self._lose(self._error_of(LossReason.quarantined, f"the slot is quarantined: {reason}"))
        self.epoch = epoch
        self.reason = reason
        self._leave(Event.failed)

    def lost(self, loss: LossReason, reason: str, event: Event = Event.lost) -> None:
        """The slot's agent is no longer usable. Repeatable until the slot is ready again."""
        if not may(self.state, event):
            return
        if self.calls.take_above() == MEMORY_ABOVE:
            loss, reason = LossReason.memory_above, f"{MEMORY_ABOVE} ({reason})"
        log.warning("slot %d lost: %s", self.index, reason)
        self._context.statistics.slots_lost += 1
        self._lose(self._error_of(loss, reason))
        self._leave(event)

    def close(self) -> None:
        """The server ends; the supervisor keeps the slot running."""
        if self._pausing is not None:
            self._pausing.cancel()
        for timer in (self._expiry_timer, self._explain_timer):
            if timer is not None:
                timer.cancel()
        self.calls.close()

    # -- what a lease's holder may use ----------------------------------------------------------------

    def admit(self, key: LeaseKey) -> ResultCache:
        """The results of the lease with ``key``. Raises StaleLeaseError, or the error the lease was lost with."""
        self._held(key)
        assert self.calls.cache is not None  # it exists as long as the lease
        return self.calls.cache

    def io(self, key: LeaseKey) -> SlotIo:
        """The agent of the slot, or of the service that the key names, for a transfer, which runs concurrently with
        calls. Raises StaleLeaseError, SandboxUnavailableError, ConfigError when there is no such service."""
        self._held(key)
        self._allowed(Event.use)
        return self.calls.runner(key.service).io

    def host(self, key: LeaseKey) -> SlotHost:
        """Starts programs that are not calls. Raises as :meth:`io`."""
        self.io(key)
        self.calls.any_ran = True
        return self.calls.runner(key.service).host

    def view(self, key: LeaseKey) -> SlotView | None:
        """What is known of the slot's image; None: it has none. Raises as :meth:`io`."""
        self.io(key)
        return self.calls.runner(key.service).view

    # -- inside ------------------------------------------------------------------------------------

    def _lost_error(self, key: LeaseKey) -> AgentEnvError:
        return self.why_lost(key) or self._stale(key)

    def _stale(self, key: LeaseKey) -> StaleLeaseError:
        if self._released is not None and self._released.admits(key):
            return StaleLeaseError(f"the lease of {self._released.trajectory!r} (slot {self.index}) was released")
        return StaleLeaseError(f"the lease of slot {self.index} has ended (the slot is in epoch {self.epoch})")

    def _error_of(self, loss: LossReason, reason: str) -> AgentEnvError:
        """The error of a lease that its holder did not end."""
        unused = WAYS[loss] is SlotDestroyedError and not self.calls.any_ran
        return error_of(LossReason.unused if unused else loss, self.index, reason)

    def _adopt(self, lease: Lease) -> None:
        self.lease = lease
        self.calls.begin_lease()
        self._remember(lease)
        self._watch_expiry()
        self.calls.prepare()

    def _remember(self, lease: Lease) -> None:
        """Hand it to the supervisor, from which a restarted server has it."""
        self._context.supervisor.remember(self.index, self.epoch, lease.to_memory())

    def _begin_epoch(self, packet: SlotReady, agents: Agents) -> None:
        """A new epoch, or the slot of an earlier server process, with its lease."""
        if not may(self.state, Event.made):
            close_agents(agents)
            raise ProtocolError(f"the supervisor reported slot {self.index} as ready while it is {self.state}")
        self._lose(self._error_of(LossReason.reset, "the slot was reset"))
        self.calls.close()
        self.epoch = packet.epoch
        self.reason = ""
        lease = None
        if packet.lease is not None:
            try:
                lease = Lease.from_memory(self.index, packet.lease, self._loop.time())
            except ProtocolError:
                close_agents(agents)
                self._move(Event.lost)
                self._context.supervisor.reset(self.index, self.epoch)
                raise
        self._open_calls(packet, agents, era=lease.era if lease else 0, sealed=lease is not None and lease.sealed)
        self._move(Event.made if lease is None else Event.taken_over)
        self._context.changed(self.index)  # also when only the epoch has changed
        if lease is not None:
            self.calls.any_ran = True  # unknown: an earlier server process may have run some
            self._adopt(lease)

    def _open_calls(self, packet: SlotReady, agents: Agents, era: int, *, sealed: bool) -> None:
        self._end_network_changes("the slot was recreated")  # the supervisor will not confirm them
        self.calls.open(packet, agents, era, sealed=sealed)
        if self.lease is not None:
            self.calls.prepare()

    def _agent_lost(self, loss: LossReason, reason: str) -> None:
        if loss is not LossReason.ended:
            self.lost(loss, reason, Event.unusable)
        elif self.lease is None:
            self.lost(loss, reason)
        elif self._move(Event.agent_ended):
            # The supervisor reports at once how it ended; nobody else can see that.
            self.calls.look_at_limits()
            silent = f"{reason}, and the supervisor did not say why within {_EXPLAIN_S:g} s"
            self._explain_timer = self._loop.call_later(_EXPLAIN_S, self.lost, LossReason.reset, silent, Event.unusable)

    def _revoke(self, why: AgentEnvError) -> None:
        """End the lease by the server's own decision."""
        self._lose(why)
        self._leave(Event.give_back)

    def _leave(self, event: Event) -> None:
        """Leave the current state: release the agent, if there is one, and move."""
        self.calls.close()
        self._move(event)

    def _lose(self, error: AgentEnvError) -> None:
        """The lease, if any, is lost. Its holder gets the reason with any later request."""
        if self.lease is not None:
            self._lost = self.lease, error
            self._end_lease(error)

    def _end_lease(self, error: AgentEnvError, *, released: bool = False) -> None:
        """End every call of the lease with ``error``; only the loss of the lease is kept."""
        lease, self.lease = self.lease, None
        assert lease is not None
        if not released:
            self._context.lost.add(lease, error, self._loop.time())
        self._ended_requests.append(lease.request_id)
        self._context.paused.lease_ended(lease.request_id)
        if self._expiry_timer is not None:
            self._expiry_timer.cancel()
            self._expiry_timer = None
        self._end_network_changes("the lease has ended")
        self.calls.end_lease(error)

    def _end_network_changes(self, reason: str) -> None:
        while self._network_changes:
            _set_reason(self._network_changes.popleft(), reason)

    def _watch_expiry(self) -> None:
        if self._expiry_timer is not None:
            self._expiry_timer.cancel()
        assert self.lease is not None
        self._expiry_timer = self._loop.call_at(self.lease.expires_at_s, self._expired)

    def _expired(self, *, again: bool = False) -> None:
        assert self.lease is not None  # the timer ends with the lease
        late_s = self._loop.time() - self.lease.expires_at_s
        if late_s > _HELD_S and not again:  # renewals may lie unread in sockets
            wait_s = min(late_s, self.lease.ttl_s)
            self._expiry_timer = self._loop.call_later(wait_s, partial(self._expired, again=True))
            return
        if self.lease.pauses_when_idle and not self.lease.not_renewed:
            self.lease.expires_at_s = self._loop.time() + self.lease.ttl_s
            self._watch_expiry()
            if self._pausing is None:
                self._pausing = self._loop.create_task(self._pause_idle(self.lease))
            return
        log.warning("lease of slot %d (%s) expired", self.index, self.lease.trajectory)
        self._context.statistics.leases_expired += 1
        self._end_lease(
            error_of(LossReason.expired, self.index, f"the lease had no heartbeat for {self.lease.ttl_s:g} s")
        )
        self._leave(Event.give_back)

    async def _pause_idle(self, lease: Lease) -> None:
        try:
            await self.pause(lease.key)
            log.info("lease of slot %d (%s) was paused: it had no heartbeat", self.index, lease.trajectory)
        except AgentEnvError as error:
            log.warning("lease of slot %d (%s) could not be paused: %s", self.index, lease.trajectory, error)
        finally:
            self._pausing = None


def _set_reason(waiter: asyncio.Future[str], reason: str) -> None:
    """No effect on a request that has ended: it keeps its place only for the order of confirmations."""
    if not waiter.done():
        waiter.set_result(reason)
