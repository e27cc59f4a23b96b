"""One slot: its state, its lease, and what it is made anew for. Its calls are SlotCalls'."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections import deque
from dataclasses import replace

from agentenv.deadlines import scaled
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
from agentenv.sandbox.control_protocol import SlotReady
from agentenv.sandbox.culprits import WAYS, Loss, error_of
from agentenv.sandbox.limit_watch import MEMORY_ABOVE
from agentenv.sandbox.server.context import ServerContext
from agentenv.sandbox.server.leases import Lease
from agentenv.sandbox.server.process import SlotIo
from agentenv.sandbox.server.replies import ReplyMemory
from agentenv.sandbox.server.session_calls import SlotHost
from agentenv.sandbox.server.slot_calls import SlotCalls
from agentenv.wire.leases import LeaseKey, LeaseRequest, SlotReport
from agentenv.wire.network import NetworkPolicy
from agentenv.wire.roots import RootSpec
from agentenv.wire.states import SERVER_SLOT_MOVES, SlotState, move

RELEASE_S = scaled(20.0)
"""How long a release waits for the supervisor before it returns without an answer."""
SEAL_S = scaled(60.0)
"""How long a seal waits for the supervisor: killing (10 s), verifying (5 s), waiting until a start is possible (15
s), and starting (10 s, and 10 s more for a network)."""
REROOT_S = scaled(60.0)
"""How long a lease with a root waits for the supervisor: as a seal, and the same again for another attempt."""
_OF_ITS_ROOT = (BadImageError.code, CheckpointError.code, ConfigError.code, ImageUnavailableError.code)
"""Errors of a refused root that its holder gets as they are: they are of what was asked for."""
_ENDED_REQUESTS = 64
_UNHEARD_S = scaled(5.0)
"""How long the supervisor may take to report why a slot's agent ended."""

log = logging.getLogger(__name__)


class Slot:
    """One slot. Slots never wait for each other."""

    def __init__(self, index: int, context: ServerContext) -> None:
        self.index = index
        self._state = SlotState.resetting
        self._state_since_s = context.poller.loop.time()
        self.epoch = 0
        self.lease: Lease | None = None
        self.reason = ""
        self._context = context
        self._loop = context.poller.loop
        self._sealing = False
        self._rerooting = False
        self._freezing = ""
        """The name of the checkpoint that is being made."""
        self._not_frozen = ""
        self._frozen: dict[str, str] = {}
        """Checkpoints made for this lease, by request."""
        self._connecting: deque[asyncio.Future[str]] = deque()
        self._settled: list[asyncio.Future[None]] = []
        self._expiry: asyncio.TimerHandle | None = None
        self._sealed_by = ""
        self._ended_requests: deque[str] = deque(maxlen=_ENDED_REQUESTS)
        """Requests of leases that have ended: a late copy of such a request must not get a lease."""
        self._ended: tuple[Lease, AgentEnvError] | None = None
        """The lease that was lost last, and why, so that late clients get the reason instead of a stale lease."""
        self._unheard: asyncio.TimerHandle | None = None
        """Until when the supervisor may report why the agent ended."""
        self._over = asyncio.Event()
        """Set when the current lease ends."""
        self.calls = SlotCalls(index, context, self._agent_lost, lambda: bool(self._freezing))

    def __repr__(self) -> str:
        return f"Slot({self.index}, {self.state}, epoch={self.epoch}, {self.calls!r})"

    @property
    def state(self) -> SlotState:
        """Its current state."""
        return self._state

    @state.setter
    def state(self, to: SlotState) -> None:
        if to is not self._state:
            self._state_since_s = self._loop.time()
        self._state = to
        self._context.changed(self.index)

    def report(self) -> SlotReport:
        """For ``GET /v1/slots``."""
        lease = self.lease
        return SlotReport(
            slot=self.index,
            state=self.state,
            epoch=self.epoch,
            trajectory=lease.trajectory if lease else None,
            tags=lease.tags if lease else None,
            expires_in_s=max(0.0, lease.expires_at_s - self._loop.time()) if lease else None,
            running_calls=len(self.calls),
            in_state_s=self._loop.time() - self._state_since_s,
            reason=self.reason,
        )

    # -- leases ------------------------------------------------------------------------------------

    def grant(self, request: LeaseRequest) -> Lease:
        """Lease this slot; repeating a ``request_id`` returns the same lease. Raises StaleLeaseError when the slot
        is not free: the client's view is outdated."""
        if self.lease is not None and self.lease.request_id == request.request_id:
            return self.lease
        if request.request_id in self._ended_requests:
            raise StaleLeaseError(f"slot {self.index} was leased by this very request, and that lease has ended")
        if self.state is not SlotState.free:
            raise StaleLeaseError(f"slot {self.index} is {self.state}, not free", next_step="lease another slot")
        self.state = move(SERVER_SLOT_MOVES, self.state, SlotState.leased)
        self.calls.any_ran, self._sealed_by = False, ""
        lease = Lease.grant(request, self.epoch, self._loop.time())
        if request.root is not None:
            self._rerooting = True
            self.calls.close()
        self._take_up(lease)
        if request.root is not None:
            self._context.supervisor.reroot(self.index, self.epoch, request.root.to_dict())
        self._context.statistics.leases_granted += 1
        return lease

    async def rerooted(self, lease: Lease) -> None:
        """Wait until the slot has the root that this lease was granted with. Raises what the lease has ended with."""
        if self._rerooting and self.lease is lease and not await self._settle(REROOT_S) and self.lease is lease:
            self._lose_lease(Loss.refused, f"it was not made within {REROOT_S:g} s")
            self._reset()
        if self.lease is not lease:
            raise self.why_lost(lease.key) or LeaseLostError(f"slot {self.index} was lost: {self.reason or self.state}")

    def why_lost(self, key: LeaseKey) -> AgentEnvError | None:
        """Why the lease with this key was lost; None if it was not, or if that was longer ago than one lease."""
        return self._ended[1] if self._ended is not None and self._ended[0].admits(key) else None

    async def lost_with(self, key: LeaseKey) -> AgentEnvError | None:
        """As :meth:`why_lost`, for programs: these end before the supervisor has reported how their slot did."""
        if self._unheard is not None and self.lease is not None and self.lease.admits(key):
            await self._over.wait()
        return self.why_lost(key)

    def run_of(self, epoch: int) -> str | None:
        """The run whose lease of this epoch lasts or was lost last; None if there is no such lease."""
        ended = self._ended[0] if self._ended is not None else None
        return next((one.tags.run for one in (self.lease, ended) if one is not None and one.key.epoch == epoch), None)

    def renew(self, key: LeaseKey, ttl_s: float, *, lengthens: bool = True) -> bool:
        """One heartbeat; False when the lease has ended. Unless it ``lengthens`` the lease, that lasts no longer than
        it did without one."""
        if self.lease is None or not self.lease.admits(key):
            return False
        if self.lease.not_renewed:
            self._lose(LeaseLostError(self.lease.not_renewed, next_step="lease by another token"))
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
            self._end_lease(LeaseLostError(f"slot {self.index}: the lease was released"), released=True)
            self._reset()
        elif key.epoch > self.epoch or (self.lease is not None and key.epoch == self.epoch):
            raise self._stale()
        if self.state is SlotState.resetting and key.epoch >= self.epoch and not await self._settle(RELEASE_S):
            return SlotState.resetting
        return SlotState.quarantined if self.state is SlotState.quarantined else SlotState.free

    async def end(self, epoch: int, why: AgentEnvError | None = None, *, at_renewal: bool = False) -> SlotState:
        """End the lease of ``epoch``, whoever holds it, as :meth:`release` does; no effect for another epoch. With
        ``why`` the lease is lost, and its holder gets that reason; ``at_renewal``: instead of its next renewal."""
        if self.lease is None or self.epoch != epoch:
            if why is None:
                self._context.lost.released(self.index, epoch)
            return self.state
        key = self.lease.key
        if why is not None and at_renewal:
            self.lease.not_renewed = why.message
            self._context.supervisor.remember(self.index, self.epoch, self.lease.to_memory())
            return self.state
        if why is not None:
            self._lose(why)
        return await self.release(key)

    def _lose(self, why: AgentEnvError) -> None:
        assert self.lease is not None
        self._ended = self.lease, why
        self._end_lease(why)
        self._reset()

    async def seal(self, key: LeaseKey, request_id: str = "") -> None:
        """Kill everything in the slot and recreate it over the same workspace, keeping the lease; once per
        non-empty ``request_id``. Queued calls wait for it; a running one is cancelled.

        Raises StaleLeaseError, SlotDestroyedError, LeaseLostError (also when it takes too long: the lease ends).
        """
        if self.lease is None or not self.lease.admits(key):
            raise self._gone(key)
        if not self._sealing and request_id and request_id == self._sealed_by:
            return
        if not self._sealing:
            self._sealing, self._sealed_by = True, request_id
            self.calls.stop()
            self.calls.close()
            self._context.supervisor.seal(self.index, self.epoch)
        if not await self._settle(SEAL_S) and self._sealing and self.lease is not None and self.lease.admits(key):
            # Programs in the slot can make the seal slow: this must not be a failure that is retried for free.
            self._lose_lease(Loss.not_renewed, f"it was not sealed within {SEAL_S:g} s")
            self._reset()
        if self.lease is None or not self.lease.admits(key):
            raise self.why_lost(key) or LeaseLostError(
                f"slot {self.index} was lost while it was sealed: {self.reason or self.state}"
            )

    async def checkpoint(self, key: LeaseKey, request_id: str = "") -> str:
        """Kill everything in the slot and keep its files as a checkpoint, with which it goes on; returns its name. Once
        per non-empty ``request_id``. A running call is cancelled.

        Raises StaleLeaseError, SlotDestroyedError, LeaseLostError (also when it takes too long: the lease ends);
        CheckpointError when it was not made.
        """
        self._check_recreatable(key)
        if request_id and request_id in self._frozen:
            return self._frozen[request_id]
        name = self._freezing = secrets.token_hex(16)
        self._not_frozen = ""
        self.calls.stop()
        self._context.supervisor.freeze(self.index, self.epoch, name)
        await self._until_recreated(key, "frozen")
        if self._not_frozen:
            raise CheckpointError(f"no checkpoint was made: {self._not_frozen}")
        if request_id:
            self._frozen[request_id] = name
        return name

    async def restore(self, key: LeaseKey, checkpoint: str) -> None:
        """Kill everything in the slot and give it the files of a checkpoint in place of its own. Raises as
        :meth:`checkpoint`; when there is no such checkpoint the lease ends."""
        self._check_recreatable(key)
        assert self.lease is not None
        self.lease.root = replace(self.lease.root or RootSpec("", checkpoint), checkpoint=checkpoint)
        self._rerooting = True
        self.calls.stop()
        self.calls.close()
        self._context.supervisor.reroot(self.index, self.epoch, self.lease.root.to_dict())
        await self._until_recreated(key, "restored")

    async def connect(self, key: LeaseKey, policy: NetworkPolicy) -> None:
        """Change the network of an image slot, whose processes go on. Raises StaleLeaseError, LeaseLostError;
        SandboxUnavailableError when it cannot be had, and then there is none; SlotDestroyedError when it takes too
        long: the lease ends, because nobody knows which network the slot has."""
        self._check_recreatable(key)
        assert self.lease is not None
        if self.lease.root is None or not self.lease.root.image:
            raise SandboxUnavailableError("plain slots have the network of their container")
        self.lease.root = replace(self.lease.root, network=policy)
        waiter: asyncio.Future[str] = self._loop.create_future()
        self._connecting.append(waiter)
        self._context.supervisor.connect(self.index, self.epoch, policy.to_json())
        reason = ""
        try:
            async with asyncio.timeout(SEAL_S):
                reason = await waiter
        except TimeoutError:
            if self.lease is not None and self.lease.admits(key):
                self._lose_lease(Loss.unchanged, f"its network was not changed within {SEAL_S:g} s")
                self._reset()
        if self.lease is None or not self.lease.admits(key):
            raise self.why_lost(key) or self._stale()
        if reason:
            raise SandboxUnavailableError(f"the network of slot {self.index}: {reason}")

    def connected(self, epoch: int, env: dict[str, str], reason: str) -> None:
        """The supervisor has changed the network; requests are answered in their order."""
        if epoch != self.epoch or not self._connecting:
            return
        _answer(self._connecting.popleft(), reason)
        self.calls.change_network_env(env)

    def _check_recreatable(self, key: LeaseKey) -> None:
        if self.lease is None or not self.lease.admits(key):
            raise self._gone(key)
        if self._sealing or self._rerooting or self._freezing:
            raise SandboxUnavailableError(f"slot {self.index} is being recreated already", next_step="ask again")

    async def _until_recreated(self, key: LeaseKey, done: str) -> None:
        if not await self._settle(SEAL_S) and self.lease is not None and self.lease.admits(key):
            self._lose_lease(Loss.not_renewed, f"it was not {done} within {SEAL_S:g} s")
            self._reset()
        if self.lease is None or not self.lease.admits(key):
            raise self.why_lost(key) or LeaseLostError(f"slot {self.index} was lost: {self.reason or self.state}")

    # -- what the supervisor says ------------------------------------------------------------------

    def ready(self, packet: SlotReady, agent: socket.socket) -> None:
        """The slot is usable (again); ``agent`` is the socket to its agent, owned from now on."""
        if self.state is SlotState.quarantined or self.state is SlotState.gone:
            agent.close()
            raise ProtocolError(f"the supervisor made slot {self.index} ready, which is {self.state}")
        if self.lease is not None and self._sealing and packet.kept and packet.epoch == self.epoch:
            self._sealing = False
            self.lease.sealed = True
            self._context.supervisor.remember(self.index, self.epoch, self.lease.to_memory())
            self._open_calls(packet, agent, era=0, sealed=True)
        elif self._freezing and packet.kept and packet.epoch == self.epoch:
            self._freezing = ""
            if self.lease is None:
                agent.close()
                self._context.supervisor.reset(self.index, self.epoch)
                return
            self._cancel_unheard()
            self.calls.close()
            self._open_calls(packet, agent, era=0, sealed=self.lease.sealed)
        elif self._rerooting and packet.epoch == self.epoch:
            self._rerooting = False
            if self.lease is None:  # released meanwhile: only now can it be reset
                agent.close()
                self._context.supervisor.reset(self.index, self.epoch)
                return
            self._open_calls(packet, agent, era=0, sealed=False)
        elif self._sealing and packet.kept:
            # Released while it was being sealed: only now can it be reset.
            self._sealing = False
            agent.close()
            self._context.supervisor.reset(self.index, self.epoch)
            return
        else:
            self._renewed(packet, agent)
        self._wake_settled()
        self.calls.pump()

    def refused(self, epoch: int, code: str, reason: str) -> None:
        """The slot cannot have the root of its lease; it is being reset."""
        if epoch != self.epoch or not self._rerooting:
            return
        self._rerooting = False
        if code in _OF_ITS_ROOT and self.lease is not None:
            error = from_wire(code, reason)
            self._ended = self.lease, error
            self._end_lease(error)
        else:
            self._lose_lease(Loss.refused, reason)
        if self.state is not SlotState.resetting:
            self.state = move(SERVER_SLOT_MOVES, self.state, SlotState.resetting)
        self._wake_settled()

    def not_frozen(self, epoch: int, reason: str, *, ended: bool) -> None:
        """The checkpoint was not made; the slot goes on, or will be ready again if its processes have ended."""
        if epoch == self.epoch and self._freezing:
            self._not_frozen = reason
            if not ended:
                self._freezing = ""
                self._wake_settled()
                self.calls.pump()

    def failed(self, epoch: int, reason: str) -> None:
        """The slot could not be verified clean."""
        self._lose_lease(Loss.quarantined, f"the slot is quarantined: {reason}")
        self._sealing = False
        self.epoch = epoch
        self.reason = reason
        self.calls.close()
        if self.state is not SlotState.quarantined:
            self.state = move(SERVER_SLOT_MOVES, self.state, SlotState.quarantined)
        self._wake_settled()

    def lost(self, loss: Loss, reason: str, *, ask_reset: bool = False) -> None:
        """The slot's agent is no longer usable. Repeatable until the slot is ready again."""
        if self.state not in (SlotState.free, SlotState.leased):
            return
        if self.calls.take_above() == MEMORY_ABOVE:
            loss, reason = Loss.memory_above, f"{MEMORY_ABOVE} ({reason})"
        log.warning("slot %d lost: %s", self.index, reason)
        self._context.statistics.slots_lost += 1
        self._lose_lease(loss, reason)
        self._sealing = False
        self.calls.close()
        self.state = move(SERVER_SLOT_MOVES, self.state, SlotState.resetting)
        if ask_reset:
            self._context.supervisor.reset(self.index, self.epoch)

    def close(self) -> None:
        """The server ends; the supervisor keeps the slot running."""
        if self._expiry is not None:
            self._expiry.cancel()
        self._cancel_unheard()
        self.calls.close()
        self._wake_settled()

    # -- what its holder may use ------------------------------------------------------------------

    def admit(self, key: LeaseKey) -> ReplyMemory:
        """The reply memory of the lease with ``key``. Raises StaleLeaseError, or the error the lease was lost with."""
        if self.lease is None or self.calls.memory is None or not self.lease.admits(key):
            raise self._gone(key)
        return self.calls.memory

    def beside(self, key: LeaseKey) -> SlotIo:
        """For a transfer, which runs concurrently with calls. Raises StaleLeaseError, SandboxUnavailableError."""
        self.admit(key)
        if self.calls.io is None:
            raise SandboxUnavailableError(f"slot {self.index} is being reset", next_step="ask again")
        return self.calls.io

    def host(self, key: LeaseKey) -> SlotHost:
        """For programs beside its calls. Raises StaleLeaseError, SandboxUnavailableError."""
        self.beside(key)
        assert self.calls.host is not None  # it comes and goes with the agent
        self.calls.any_ran = True
        return self.calls.host

    # -- inside ------------------------------------------------------------------------------------

    def _gone(self, key: LeaseKey) -> AgentEnvError:
        return self.why_lost(key) or self._stale()

    def _stale(self) -> StaleLeaseError:
        return StaleLeaseError(f"the lease of slot {self.index} has ended (the slot is in epoch {self.epoch})")

    def _take_up(self, lease: Lease) -> None:
        self.lease = lease
        self._over = asyncio.Event()
        self.calls.begin_lease()
        self._context.supervisor.remember(self.index, self.epoch, lease.to_memory())
        self._watch_expiry()
        self.calls.prepare()

    def _renewed(self, packet: SlotReady, agent: socket.socket) -> None:
        """A new epoch, or a slot that this (new) server process takes over."""
        self._lose_lease(Loss.reset, "the slot was reset")
        self._sealing = self._rerooting = False
        self._freezing = ""
        self._cancel_unheard()
        self.calls.close()
        if self.state is not SlotState.resetting:
            self.state = move(SERVER_SLOT_MOVES, self.state, SlotState.resetting)
        self.epoch = packet.epoch
        self.reason = ""
        lease = None
        if packet.lease is not None:
            try:
                lease = Lease.from_memory(self.index, packet.lease, self._loop.time())
            except ProtocolError:
                agent.close()
                self._context.supervisor.reset(self.index, self.epoch)
                raise
        self._open_calls(packet, agent, era=lease.era if lease else 0, sealed=lease is not None and lease.sealed)
        self.state = move(SERVER_SLOT_MOVES, self.state, SlotState.leased if lease else SlotState.free)
        if lease is not None:
            self.calls.any_ran = True  # as far as this server process can know
            self._take_up(lease)

    def _open_calls(self, packet: SlotReady, agent: socket.socket, era: int, *, sealed: bool) -> None:
        self._answer_connecting("the slot was recreated meanwhile")  # the supervisor answers none of them any more
        self.calls.open(packet, agent, era, sealed=sealed)
        if self.lease is not None:
            self.calls.prepare()

    def _agent_lost(self, loss: Loss, reason: str) -> None:
        if loss is not Loss.ended:
            self.lost(loss, reason, ask_reset=True)
        elif self.lease is None:
            self.lost(loss, reason)
        elif self._freezing:
            return  # the supervisor has killed it
        elif self._unheard is None:
            # Only the supervisor can tell how it ended, and reports it at once.
            if self.calls.io is not None:
                self.calls.io.limits.look()
            self._unheard = self._loop.call_later(_UNHEARD_S, self._supervisor_said_nothing, reason)

    def _supervisor_said_nothing(self, reason: str) -> None:
        self._unheard = None
        self.lost(Loss.reset, f"{reason}, and the supervisor did not say why within {_UNHEARD_S:g} s", ask_reset=True)

    def _cancel_unheard(self) -> None:
        if self._unheard is not None:
            self._unheard.cancel()
            self._unheard = None

    def _reset(self) -> None:
        self.state = move(SERVER_SLOT_MOVES, self.state, SlotState.resetting)
        self.calls.close()
        if not (self._sealing or self._rerooting or self._freezing):
            self._context.supervisor.reset(self.index, self.epoch)

    def _lose_lease(self, loss: Loss, reason: str) -> None:
        """The lease ends without its holder's doing; the holder gets the reason however late it asks."""
        if self.lease is not None:
            if WAYS[loss] is SlotDestroyedError and not self.calls.any_ran:
                loss = Loss.unused
            error = error_of(loss, self.index, reason)
            self._ended = self.lease, error
            self._end_lease(error)

    def _end_lease(self, error: AgentEnvError, *, released: bool = False) -> None:
        """Every call of the lease is answered; nothing of the lease is remembered but that it was lost."""
        if self.lease is None:
            return
        if not released:
            self._context.lost.add(self.lease, error, self._loop.time())
        self._ended_requests.append(self.lease.request_id)
        self.lease = None
        self._over.set()
        self._cancel_unheard()
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        self._answer_connecting("the lease has ended")
        self.calls.end_lease(error)
        self._frozen.clear()

    def _answer_connecting(self, reason: str) -> None:
        while self._connecting:
            _answer(self._connecting.popleft(), reason)

    def _watch_expiry(self) -> None:
        lease = self.lease
        if lease is None:
            return
        if self._expiry is not None:
            self._expiry.cancel()
        self._expiry = self._loop.call_at(lease.expires_at_s, self._expired)

    def _expired(self) -> None:
        lease = self.lease
        if lease is None or self.state is not SlotState.leased:
            return
        log.warning("lease of slot %d (%s) expired", self.index, lease.trajectory)
        self._context.statistics.leases_expired += 1
        self._end_lease(error_of(Loss.expired, self.index, f"the lease had no heartbeat for {lease.ttl_s:g} s"))
        self._reset()

    async def _settle(self, within_s: float) -> bool:
        """Wait until the supervisor has answered; False if it has not within ``within_s``."""
        waiter = self._loop.create_future()
        self._settled.append(waiter)
        try:
            async with asyncio.timeout(within_s):
                await waiter
        except TimeoutError:
            self._settled.remove(waiter)
            return False
        return True

    def _wake_settled(self) -> None:
        waiters, self._settled = self._settled, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


def _answer(waiter: asyncio.Future[str], reason: str) -> None:
    """One whose request has ended is cancelled: it keeps its place only for the order of the answers."""
    if not waiter.done():
        waiter.set_result(reason)
