"""Bookkeeping of waiters and leases, and what to do next. Pure: no I/O, no clock of its own.

Every method takes ``now`` (monotonic seconds) where time matters and returns the commands the pool
must perform, in order. The rules it keeps for any order of events:

- waiters are served first come, first served; a waiter put back keeps its place;
- slots are leased packed low: lowest container index, then lowest slot;
- a slot has at most one lease, and is leased again only after its container reported it free;
- no waiter is granted a slot at or after its deadline, and none is forgotten;
- a container's health changes which *new* leases it gets, never a lease it has.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from agentenv.errors import AgentEnvError, ContainerLostError, StaleLeaseError
from agentenv.slots.counts import Counts, Load
from agentenv.slots.records import ContainerRecord, LeaseRecord
from agentenv.wire.states import ContainerState, LeaseState, SlotState


@dataclass(frozen=True)
class Grant:
    """Request this slot from its container for this trajectory; report back with confirm or refuse."""

    lease: int
    container: str
    slot: int
    trajectory: str
    deadline: float


@dataclass(frozen=True)
class HandOver:
    """The container granted the lease: give it to the waiter, or release it if the waiter has left."""

    ticket: int
    lease: int
    container: str
    trajectory: str


@dataclass(frozen=True)
class Expire:
    """The waiter's deadline has passed. ``position`` 1 is the head of the queue; 0: a slot was being requested."""

    ticket: int
    position: int
    waited_s: float


@dataclass(frozen=True)
class EndLease:
    """The lease was ended by someone other than its holder."""

    lease: int
    error: AgentEnvError


@dataclass(frozen=True)
class Reclaim:
    """Have the container reset the slot, then report freed or quarantined. ``lease``: its last lease."""

    container: str
    slot: int
    lease: int | None


@dataclass(frozen=True)
class Retire:
    """The container has no lease and is not worth keeping: replace it."""

    container: str
    reason: str


Command = Grant | HandOver | Expire | EndLease | Reclaim | Retire


@dataclass
class Waiter:
    """A trajectory in the queue, or (``lease`` set) about to get a slot."""

    ticket: int
    trajectory: str
    since: float
    deadline: float
    lease: int | None = None


class Ledger:
    """Waiters, leases, slots and containers of one pool. See the module's rules."""

    def __init__(self) -> None:
        self._containers: dict[str, ContainerRecord] = {}
        self._ordered: list[ContainerRecord] = []
        self._open: list[tuple[int, str]] = []
        self._waiters: dict[int, Waiter] = {}
        self._queue: list[int] = []
        self._deadlines: list[tuple[float, int]] = []
        self._leases: dict[int, LeaseRecord] = {}
        self._counts = Counts()
        self._bound: float = math.inf
        self._next = 0

    # -- waiters ------------------------------------------------------------------------------

    def enqueue(self, trajectory: str, now: float, deadline: float) -> tuple[int, list[Command]]:
        """Add a waiter to the queue. Returns its ticket and the commands."""
        ticket = self._number()
        self._waiters[ticket] = Waiter(ticket, trajectory, now, deadline)
        self._queue.append(ticket)
        heapq.heappush(self._deadlines, (deadline, ticket))
        return ticket, self._settle(now)

    def withdraw(self, ticket: int, now: float) -> list[Command]:
        """The waiter has left. A lease being requested for it is released when the container answers."""
        self._forget(ticket)
        return self._settle(now)

    def dismiss_waiters(self) -> list[int]:
        """Empty the queue (closing, or no container can ever serve); returns the tickets, in order."""
        tickets = sorted(self._waiters)
        for ticket in reversed(tickets):  # from the queue's end: nothing behind it has to move up
            self._forget(ticket)
        return tickets

    def tick(self, now: float) -> list[Command]:
        """Expire waiters past their deadline."""
        return self._settle(now)

    def next_deadline(self) -> float | None:
        """Time at which tick() is due next; None if nobody waits."""
        while self._deadlines and self._deadlines[0][1] not in self._waiters:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    # -- leases -------------------------------------------------------------------------------

    def confirm(self, lease_id: int, now: float) -> list[Command]:
        """The container granted the lease."""
        commands = self._expire(now)
        lease = self._leases.get(lease_id)
        if lease is None:  # its container died meanwhile; the waiter is in the queue again
            return commands
        if lease.ticket is None:
            return commands + self._give_back(lease, LeaseState.released, now)
        lease.move(LeaseState.granted)
        del self._waiters[lease.ticket]
        return [*commands, HandOver(lease.ticket, lease_id, lease.container, lease.trajectory)]

    def refuse(self, lease_id: int, now: float) -> list[Command]:
        """The container did not grant the lease, or did not answer: the waiter gets its old place back."""
        lease = self._leases.get(lease_id)
        if lease is None:
            return self._settle(now)
        self._requeue(lease)
        return self._give_back(lease, LeaseState.lost, now) + self._settle(now)

    def ticket_of(self, lease_id: int) -> int | None:
        """The waiter this lease is being requested for; None if there is none (any more)."""
        lease = self._leases.get(lease_id)
        return None if lease is None else lease.ticket

    def release(self, lease_id: int, now: float) -> list[Command]:
        """The holder is done. No effect on a lease that has already ended."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.state is not LeaseState.granted:
            return []
        return self._give_back(lease, LeaseState.released, now)

    def stale(self, lease_id: int, now: float, why: AgentEnvError | None = None) -> list[Command]:
        """The container reports that this lease's epoch has ended, and possibly ``why`` the lease was lost."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.state is not LeaseState.granted:
            return []
        error = why or StaleLeaseError(
            f"slot {lease.slot} of {lease.container} is no longer leased to {lease.trajectory!r}: its epoch ended",
            next_step="start the rollout again on a new slot",
        )
        return [EndLease(lease_id, error), *self._give_back(lease, LeaseState.lost, now)]

    # -- slots --------------------------------------------------------------------------------

    def freed(self, container_id: str, slot: int, now: float) -> list[Command]:
        """The container reports the slot clean."""
        return self._reset_done(container_id, slot, SlotState.free, now)

    def quarantined(self, container_id: str, slot: int, now: float) -> list[Command]:
        """The container could not verify the reset. A container is retired when most of its slots are quarantined."""
        return self._reset_done(container_id, slot, SlotState.quarantined, now)

    def _reset_done(self, container_id: str, index: int, state: SlotState, now: float) -> list[Command]:
        container = self._containers.get(container_id)
        if container is None or container.slots[index].state is not SlotState.resetting:
            return []
        self._counts.move_slot(container, container.slots[index], state, now)
        self._offer(container)
        return self._retire_if_spoiled(container) + self._settle(now)

    # -- containers ---------------------------------------------------------------------------

    def started(self, container_id: str, index: int) -> list[Command]:
        """A container runs; its slots are not known yet."""
        container = ContainerRecord(container_id, index)
        self._containers[container_id] = container
        insort(self._ordered, container, key=lambda one: one.index)
        self._counts.started(container)
        if index >= self._bound:
            self._stop_leasing(container)
        return []

    def inventory(self, container_id: str, states: Iterable[SlotState], now: float) -> list[Command]:
        """The container's slots as it reports them; slots in use by others are waited for."""
        container = self._containers.get(container_id)
        if container is None or container.state is not ContainerState.starting:
            return []
        kept = (SlotState.free, SlotState.quarantined)
        self._counts.fill(container, (state if state in kept else SlotState.resetting for state in states), now)
        self._counts.move_container(container, ContainerState.ready)
        self._offer(container)
        held = [slot for slot in container.slots if slot.state is SlotState.resetting]
        reclaims = [Reclaim(container_id, slot.index, None) for slot in held]
        return reclaims + self._retire_if_spoiled(container) + self._settle(now)

    def suspect(self, container_id: str) -> list[Command]:
        """The container is late: no new leases. It keeps those it has."""
        container = self._containers.get(container_id)
        if container is not None and container.state is ContainerState.ready:
            self._counts.move_container(container, ContainerState.suspect)
        return []

    def recovered(self, container_id: str, now: float) -> list[Command]:
        """The container answered again."""
        container = self._containers.get(container_id)
        if container is None or container.state is not ContainerState.suspect:
            return []
        self._counts.move_container(container, ContainerState.ready)
        self._offer(container)
        return self._settle(now)

    def drain(self, container_id: str) -> list[Command]:
        """The container will be gone soon: no new leases, permanently."""
        container = self._containers.get(container_id)
        if container is not None:
            self._stop_leasing(container)
        return []

    def stuck(self, container_id: str, reason: str) -> list[Command]:
        """The container's slots do not return from their reset: no new leases; it is replaced when its last lease
        has ended."""
        container = self._containers.get(container_id)
        if container is None or container.stuck:
            return []
        container.stuck = reason
        self._stop_leasing(container)
        return self._retire_if_stuck(container)

    def drain_from(self, index: int) -> list[Command]:
        """The goal was lowered to this index: no new leases on containers at or above it, including those that
        start later."""
        self._bound = index
        for container in self._ordered[bisect_left(self._ordered, index, key=lambda one: one.index) :]:
            self._stop_leasing(container)
        return []

    def lose(self, container_id: str, reason: str, now: float) -> list[Command]:
        """The container is gone: its leases end, and waiters about to get one of its slots stay in the queue."""
        container = self._containers.pop(container_id, None)
        if container is None:
            return []
        self._ordered.remove(container)
        self._counts.move_container(container, ContainerState.gone)
        commands: list[Command] = []
        for slot in container.slots:
            if slot.lease is not None:
                commands += self._lose_lease(self._leases.pop(slot.lease), reason)
            slot.lease = None
            self._counts.move_slot(container, slot, SlotState.gone, now)
        self._counts.forget_gone()
        return commands + self._settle(now)

    # -- views --------------------------------------------------------------------------------

    def containers(self) -> Sequence[ContainerRecord]:
        """Every container that is not gone, by index. Read-only."""
        return self._ordered

    def slot_counts(self) -> dict[SlotState, int]:
        """Number of slots per state (states without slots are omitted)."""
        return {state: count for state, count in self._counts.slots.items() if count}

    def container_counts(self) -> dict[ContainerState, int]:
        """Number of containers per state (states without containers are omitted)."""
        return {state: count for state, count in self._counts.containers.items() if count}

    def load(self, now: float) -> Load:
        """Usage and capacity at this moment."""
        return self._counts.load(len(self._queue), now)

    @property
    def waiting(self) -> int:
        """Number of waiters in the queue (without those whose slot is being requested)."""
        return len(self._queue)

    def leases(self) -> Iterable[LeaseRecord]:
        """Every active lease."""
        return self._leases.values()

    def waiters(self) -> Iterable[Waiter]:
        """Every waiter without an answer, in the queue or with a slot being requested."""
        return self._waiters.values()

    def __repr__(self) -> str:
        slots = ", ".join(f"{count} {state}" for state, count in sorted(self.slot_counts().items()))
        return f"<Ledger {len(self._ordered)} containers, {slots or 'no slots'}, {self.waiting} waiting>"

    # -- the rules ----------------------------------------------------------------------------

    def _settle(self, now: float) -> list[Command]:
        """Expire waiters past their deadline, then give free slots to those who waited longest."""
        commands = self._expire(now)
        while self._queue and (container := self._lowest_open()) is not None:
            commands.append(self._grant(self._waiters[self._queue.pop(0)], container, now))
        return commands

    def _grant(self, waiter: Waiter, container: ContainerRecord, now: float) -> Grant:
        slot = container.lowest_free()
        lease = LeaseRecord(self._number(), waiter.ticket, waiter.trajectory, slot)
        self._counts.move_slot(container, slot, SlotState.leased, now)
        slot.lease = waiter.lease = lease.id
        self._leases[lease.id] = lease
        return Grant(lease.id, container.id, slot.index, waiter.trajectory, waiter.deadline)

    def _expire(self, now: float) -> list[Command]:
        commands: list[Command] = []
        while (due := self.next_deadline()) is not None and due <= now:
            waiter = self._waiters[self._deadlines[0][1]]
            position = 0 if waiter.lease is not None else bisect_left(self._queue, waiter.ticket) + 1
            commands.append(Expire(waiter.ticket, position, now - waiter.since))
            self._forget(waiter.ticket)
        return commands

    def _forget(self, ticket: int) -> None:
        waiter = self._waiters.pop(ticket, None)
        if waiter is None:
            return
        if waiter.lease is not None:
            self._leases[waiter.lease].ticket = None
        else:
            del self._queue[bisect_left(self._queue, ticket)]

    def _requeue(self, lease: LeaseRecord) -> None:
        if lease.ticket is not None:
            self._waiters[lease.ticket].lease = None
            insort(self._queue, lease.ticket)

    def _give_back(self, lease: LeaseRecord, end: LeaseState, now: float) -> list[Command]:
        """End the lease; its slot is used again only after the container has reset it."""
        lease.move(end)
        del self._leases[lease.id]
        container = self._containers[lease.container]
        slot = container.slots[lease.slot]
        slot.lease = None
        self._counts.move_slot(container, slot, SlotState.resetting, now)
        return [Reclaim(lease.container, lease.slot, lease.id), *self._retire_if_stuck(container)]

    def _lose_lease(self, lease: LeaseRecord, reason: str) -> list[Command]:
        held = lease.state is LeaseState.granted
        lease.move(LeaseState.lost)
        if not held:
            self._requeue(lease)
            return []
        error = ContainerLostError(
            f"container {lease.container} is gone, with slot {lease.slot} of {lease.trajectory!r}: {reason}",
            next_step="start the rollout again on a new slot",
        )
        return [EndLease(lease.id, error)]

    def _stop_leasing(self, container: ContainerRecord) -> None:
        if container.state is not ContainerState.draining:
            self._counts.move_container(container, ContainerState.draining)

    def _retire_if_stuck(self, container: ContainerRecord) -> list[Command]:
        leased = container.stuck and any(slot.state is SlotState.leased for slot in container.slots)
        return [] if leased or not container.stuck else [Retire(container.id, container.stuck)]

    def _retire_if_spoiled(self, container: ContainerRecord) -> list[Command]:
        """If most of its slots are quarantined: no new leases; replaced once its last lease has ended."""
        if container.quarantined * 2 <= len(container.slots):
            return []
        self._stop_leasing(container)
        reason = f"{container.quarantined} of {len(container.slots)} slots are quarantined"
        return [] if container.busy else [Retire(container.id, reason)]

    def _offer(self, container: ContainerRecord) -> None:
        if container.free and not container.offered:
            container.offered = True
            heapq.heappush(self._open, (container.index, container.id))

    def _lowest_open(self) -> ContainerRecord | None:
        """The ready container of lowest index with a free slot. Entries may be outdated, but none is missing."""
        while self._open:
            container = self._containers.get(self._open[0][1])
            if container is not None and container.free:
                return container
            heapq.heappop(self._open)
            if container is not None:
                container.offered = False
        return None

    def _number(self) -> int:
        self._next += 1
        return self._next
