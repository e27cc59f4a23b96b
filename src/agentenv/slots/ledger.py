"""Bookkeeping of waiters and leases, and what to do next. Pure: no I/O, no clock of its own.

Every method takes ``now`` (monotonic seconds) where time matters and returns the commands the pool
must perform, in order. The rules it keeps for any order of events:

- the queue policy decides whose turn it is (:mod:`agentenv.slots.queue_policy`); a waiter put back keeps its place;
- a group gets all of its slots together, or none; of those that lack slots when some are lost, only the first keeps
  what it has, or they would wait for each other's;
- slots are leased packed low: lowest container index, then lowest slot;
- a waiter that needs a particular container holds up nobody while that has no room, and fails when that leaves;
- a slot has at most one lease, and is leased again only after its container reported it free;
- no waiter is granted a slot at or after its deadline, and none is forgotten;
- a waiter with an image gets slots where that is stored (:class:`agentenv.slots.waiters.ImageWaits`);
- a container's health changes which *new* leases it gets, never a lease it has.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence

from agentenv.errors import AgentEnvError, CheckpointError, ContainerLostError, StaleLeaseError
from agentenv.image_placement.placement import DEFAULT_COPIES, Placement
from agentenv.slots.commands import Command, EndLease, Expire, Fail, Grant, HandOver, Reclaim, Retire
from agentenv.slots.counts import Counts, Load
from agentenv.slots.queue_policy import FirstCome, QueuePolicy, caps_of
from agentenv.slots.records import ContainerRecord, Holder, LeaseRecord, SlotRecord
from agentenv.slots.waiters import ImageWaits, Waiter, Waiters
from agentenv.wire.leases import SlotRequest, Tags
from agentenv.wire.states import ContainerState, LeaseState, SlotState


class Ledger:
    """Waiters, leases, slots and containers of one pool. See the module's rules."""

    def __init__(self, queue_policy: QueuePolicy | None = None, *, copies_per_image: int = DEFAULT_COPIES) -> None:
        """``queue_policy`` decides whose turn it is: by default whoever came first. ``copies_per_image``: see
        :class:`Placement`."""
        self._containers: dict[str, ContainerRecord] = {}
        self._ordered: list[ContainerRecord] = []
        self._open: list[tuple[int, str]] = []
        self._queue_policy = queue_policy if queue_policy is not None else FirstCome()
        self._waiters = Waiters(self._queue_policy)
        self.placement: Placement[ContainerRecord] = Placement(copies_per_image)
        """To be looked at."""
        self._images = ImageWaits(self._waiters, self.placement)
        self._leases: dict[int, LeaseRecord] = {}
        self._adopted: dict[tuple[Tags, str], LeaseRecord] = {}
        self._counts = Counts()
        self._bound: float = math.inf
        self._next = 0
        self.adopted_total = 0
        """Leases found in containers so far."""

    # -- waiters ------------------------------------------------------------------------------

    def enqueue(self, request: SlotRequest, now: float, deadline: float) -> tuple[int, list[Command]]:
        """Add a waiter to the queue. Returns its ticket and the commands."""
        ticket = self._number()
        waiter = Waiter(ticket, request, now, deadline)
        self._waiters.add(waiter)
        return ticket, [*self._images.came(waiter, now), *self._settle(now)]

    def withdraw(self, ticket: int, now: float) -> list[Command]:
        """The waiter has left. A lease being requested for it is released when the container answers."""
        return self._forget(ticket, now) + self._settle(now)

    def dismiss_waiters(self, now: float) -> tuple[list[int], list[Command]]:
        """Empty the queue (closing, or no container can ever serve); returns the tickets, in order."""
        tickets = sorted(waiter.ticket for waiter in self._waiters.all())
        commands: list[Command] = []
        for ticket in reversed(tickets):  # from the queue's end: nothing behind it has to move up
            commands += self._forget(ticket, now)
        return tickets, commands

    def tick(self, now: float) -> list[Command]:
        """Expire waiters past their deadline."""
        return self._settle(now)

    def next_deadline(self) -> float | None:
        """Time at which tick() is due next; None if nobody waits."""
        return self._waiters.next_deadline()

    # -- leases -------------------------------------------------------------------------------

    def confirm(self, lease_id: int, now: float, epoch: int | None = None) -> list[Command]:
        """The container granted the lease, of this ``epoch`` of the slot if that is of interest."""
        commands = self._expire(now)
        lease = self._leases.get(lease_id)
        if lease is None:  # its container died meanwhile; the waiter is in the queue again
            return commands
        lease.epoch = epoch
        if lease.ticket is None:
            return commands + self._give_back(lease, LeaseState.released, now)
        lease.move(LeaseState.granted)
        waiter = self._waiter_of(lease)
        waiter.confirmed += 1
        return commands + self._hand_over(waiter, now) + self._settle(now) if waiter.complete else commands

    def refuse(self, lease_id: int, now: float) -> list[Command]:
        """The container did not grant the lease, or did not answer: the waiter gets its old place back."""
        lease = self._leases.get(lease_id)
        if lease is None:
            return self._settle(now)
        self._put_back(lease)
        return self._give_back(lease, LeaseState.lost, now) + self._settle(now)

    def ticket_of(self, lease_id: int) -> int | None:
        """The waiter this lease is being requested for; None if there is none (any more)."""
        lease = self._leases.get(lease_id)
        return None if lease is None else lease.ticket

    def release(self, lease_id: int, now: float) -> list[Command]:
        """The holder is done. No effect on a lease that has already ended."""
        lease = self._leases.get(lease_id)
        if lease is None or not lease.held:
            return []
        return self._give_back(lease, LeaseState.released, now)

    def stale(self, lease_id: int, now: float, why: AgentEnvError | None = None) -> list[Command]:
        """The container reports that this lease's epoch has ended, and possibly ``why`` the lease was lost."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.state is not LeaseState.granted:
            return []
        if not lease.held:  # its group was not complete yet
            self._put_back(lease)
            return self._give_back(lease, LeaseState.lost, now) + self._settle(now)
        error = why or StaleLeaseError(
            f"slot {lease.slot} of {lease.container} is no longer leased to {lease.trajectory!r}: its epoch ended",
            next_step="start the rollout again on a new slot",
        )
        return [EndLease(lease_id, error, lease), *self._give_back(lease, LeaseState.lost, now)]

    # -- slots --------------------------------------------------------------------------------

    def freed(self, container_id: str, slot: int, now: float) -> list[Command]:
        """The container reports the slot clean."""
        return self._reset_done(container_id, slot, SlotState.free, now)

    def quarantined(self, container_id: str, slot: int, now: float) -> list[Command]:
        """The container could not verify the reset. A container is retired when most of its slots are quarantined."""
        return self._let_one_gather(now) + self._reset_done(container_id, slot, SlotState.quarantined, now)

    def taken(self, container_id: str, slot: int, holder: Holder, now: float) -> list[Command]:
        """The container has leased a slot that was not requested here: a lease of ours from before a restart, or
        somebody else's. It counts to the holder's run, and ends as any other."""
        container = self._containers.get(container_id)
        if container is None or slot >= len(container.slots):
            return []
        if container.slots[slot].state not in (SlotState.free, SlotState.resetting):
            return []
        self._adopt(container, container.slots[slot], holder, now)
        return []

    def reported(
        self, container_id: str, slot: int, state: SlotState, epoch: int, holder: Holder | None, now: float
    ) -> list[Command]:
        """A container that is watched reports a slot, which may be no news. Reports about a slot come in order, but
        perhaps before the answer to a request of ours. A slot that is being reset is followed by whoever reclaims it.
        """
        container = self._containers.get(container_id)
        if container is None or slot >= len(container.slots):
            return []
        record = container.slots[slot]
        if record.lease is not None:
            lease = self._leases[record.lease]
            if lease.epoch is None or epoch < lease.epoch:
                return []
            over = epoch > lease.epoch or state not in (SlotState.free, SlotState.leased)
            return self.stale(lease.id, now) if over else []
        if record.state is not SlotState.free:
            return []
        if state is SlotState.leased and holder is not None:
            return self.taken(container_id, slot, holder, now)
        if state in (SlotState.resetting, SlotState.quarantined):
            self._counts.move_slot(container, record, SlotState.resetting, now)
            return [Reclaim(container_id, slot, None)]
        return []

    def _reset_done(self, container_id: str, index: int, state: SlotState, now: float) -> list[Command]:
        container = self._containers.get(container_id)
        if container is None or container.slots[index].state is not SlotState.resetting:
            return []
        self._reset_is_over(container.slots[index])
        self._counts.move_slot(container, container.slots[index], state, now)
        self._offer(container, now)
        return (self._retire_if_empty(container) or self._retire_if_spoiled(container)) + self._settle(now)

    # -- containers ---------------------------------------------------------------------------

    def started(self, container_id: str, index: int, node: str = "") -> list[Command]:
        """A container runs on a node; its slots are not known yet."""
        container = ContainerRecord(container_id, index, node)
        self._images.joined(container)
        self._containers[container_id] = container
        insort(self._ordered, container, key=lambda one: one.index)
        self._counts.started(container)
        if index >= self._bound:
            self._stop_leasing(container)
        return []

    def inventory(
        self, container_id: str, states: Iterable[SlotState], now: float, holders: Mapping[int, Holder] | None = None
    ) -> list[Command]:
        """The container's slots as it reports them. Leased ones are adopted if ``holders`` names their holder;
        otherwise they are others' and are waited for."""
        container = self._containers.get(container_id)
        if container is None or container.state is not ContainerState.starting:
            return []
        kept = (SlotState.free, SlotState.quarantined)
        self._counts.fill(container, (state if state in kept else SlotState.resetting for state in states), now)
        self._counts.move_container(container, ContainerState.ready)
        for index, holder in (holders or {}).items():
            self._adopt(container, container.slots[index], holder, now)
        self._offer(container, now)
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
        self._offer(container, now)
        return self._settle(now)

    def drain(self, container_id: str) -> list[Command]:
        """The container will be gone soon: no new leases, permanently."""
        container = self._containers.get(container_id)
        if container is not None:
            self._stop_leasing(container)
        return []

    def retire(self, container_id: str, reason: str) -> list[Command]:
        """Another container is wanted in its place: no new leases; it is replaced when every slot has come back."""
        container = self._containers.get(container_id)
        if container is None or container.unwanted:
            return []
        container.unwanted = reason
        self._stop_leasing(container)
        return self._retire_if_empty(container)

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
                lease = self._leases[slot.lease]
                self._forget_lease(lease)
                commands += self._lose_lease(lease, reason)
            slot.lease = None
            self._reset_is_over(slot)
            self._counts.move_slot(container, slot, SlotState.gone, now)
        self._counts.forget_gone()
        commands += self._refuse(self._images.gone(container, now), now)
        return commands + self._let_one_gather(now) + self._settle(now)

    # -- images -------------------------------------------------------------------------------

    def images(self, node: str, images: Iterable[str], now: float) -> list[Command]:
        """A node has these images, and no others."""
        self._images.report(node, images)
        return self._settle(now)

    def prefetch(self, images: Iterable[str], now: float) -> list[Command]:
        """These images are wanted soon."""
        return [*self._images.prefetch(images, now)]

    def fetched(self, node: str, image: str, now: float) -> list[Command]:
        """A node has fetched an image."""
        self._images.fetched(node, image)
        return self._settle(now)

    def fetch_failed(self, node: str, image: str, error: AgentEnvError, now: float) -> list[Command]:
        """A node could not fetch an image, or it cannot be used there: it is fetched elsewhere, or whoever waits for it
        gets ``error``."""
        return self._refuse(self._images.failed(node, image, error, now), now) + self._settle(now)

    def _refuse(self, refused: Mapping[int, AgentEnvError], now: float) -> list[Command]:
        commands: list[Command] = []
        for ticket, error in refused.items():
            commands += [Fail(ticket, error), *self._forget(ticket, now)]
        return commands

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
        return self._counts.load(self._waiters.slots_wanted, now)

    @property
    def waiting(self) -> int:
        """Number of waiters in the queue (without those whose slots are being requested)."""
        return len(self._waiters)

    def leases(self) -> Iterable[LeaseRecord]:
        """Every active lease."""
        return self._leases.values()

    def waiters(self) -> Iterable[Waiter]:
        """Every waiter without an answer, in the queue or with a slot being requested."""
        return self._waiters.all()

    def waiter(self, ticket: int) -> Waiter | None:
        """The waiter with this ticket, if it still waits."""
        return self._waiters.get(ticket)

    def position(self, ticket: int) -> int:
        """Place of a waiter in the queue: 1 is next, 0: its slots are being requested, or it does not wait."""
        waiter = self._waiters.get(ticket)
        return 0 if waiter is None else self._waiters.position(waiter)

    def aside(self, ticket: int) -> bool:
        """Whether a waiter has stepped aside until there is a slot with its image."""
        return ticket in self._waiters.aside

    def aside_slots(self, run: str) -> int:
        """Slots for which the waiters of a run wait aside, and not in the queue."""
        return self._waiters.aside.slots_of(run)

    def lease(self, lease_id: int) -> LeaseRecord | None:
        """The active lease of this number."""
        return self._leases.get(lease_id)

    def adopted(self, tags: Tags, trajectory: str) -> LeaseRecord | None:
        """The active lease of a trajectory with these tags (whichever token asked) that its container told of, and that
        was not requested here; of several the last one found."""
        return self._adopted.get((tags.without_tokens(), trajectory))

    def lease_on(self, container_id: str, slot: int) -> LeaseRecord | None:
        """The active lease on a slot."""
        container = self._containers.get(container_id)
        if container is None or slot >= len(container.slots) or (lease := container.slots[slot].lease) is None:
            return None
        return self._leases[lease]

    def __repr__(self) -> str:
        slots = ", ".join(f"{count} {state}" for state, count in sorted(self.slot_counts().items()))
        return f"<Ledger {len(self._ordered)} containers, {slots or 'no slots'}, {self.waiting} waiting>"

    # -- the rules ----------------------------------------------------------------------------

    def _settle(self, now: float) -> list[Command]:
        """Expire waiters past their deadline, then give free slots to those whose turn it is."""
        commands = self._expire(now) + self._fail_hopeless(now)
        while (waiter := self._waiters.next(self._room)) is not None:
            if waiter.request.image:
                commands += self._serve_where_its_image_is(waiter, now)
                continue
            for position in waiter.missing[: self._room(waiter.request.container)]:
                particular = waiter.request.container
                container = self._containers[particular] if particular else self._lowest_open()
                assert container is not None, "a slot is free"
                commands.append(self._grant(waiter, position, container, now))
        return commands

    def _serve_where_its_image_is(self, waiter: Waiter, now: float) -> list[Command]:
        containers, fetches = self._images.choose(waiter, now)
        places = list(zip(waiter.missing, containers, strict=False))
        grants = [self._grant(waiter, position, container, now) for position, container in places]
        if grants:
            self._images.served(waiter)
        return [*grants, *fetches]

    def _room(self, container_id: str) -> int:
        """Slots that can be leased now: of this container, or (empty) of all."""
        if not container_id:
            return self._counts.free
        container = self._containers.get(container_id)
        return container.free if container is not None else 0

    def _fail_hopeless(self, now: float) -> list[Command]:
        """Waiters that need a container that will never lease (again), or that has fewer slots than they want."""
        commands: list[Command] = []
        for waiter in list(self._waiters.particular):
            wanted = self._containers.get(waiter.request.container)
            if wanted is not None and not wanted.leaving and len(waiter.leases) <= (len(wanted.slots) or math.inf):
                continue
            why = "is gone" if wanted is None else "is leaving" if wanted.leaving else f"has {len(wanted.slots)} slots"
            error = CheckpointError(
                f"the checkpoint is in container {waiter.request.container}, which {why}",
                next_step="begin from the image again",
            )
            commands.append(Fail(waiter.ticket, error))
            commands += self._forget(waiter.ticket, now)
        return commands

    def _grant(self, waiter: Waiter, position: int, container: ContainerRecord, now: float) -> Grant:
        slot, request = container.lowest_free(), waiter.request
        trajectory, tags = request.trajectories[position], request.tags
        lease = LeaseRecord(self._number(), waiter.ticket, trajectory, slot, tags=tags, position=position)
        self._counts.move_slot(container, slot, SlotState.leased, now)
        slot.lease = lease.id
        self._leases[lease.id] = lease
        self._waiters.lease_requested(waiter, position, lease.id)
        return Grant(
            lease.id,
            container.id,
            slot.index,
            trajectory,
            waiter.deadline,
            tags,
            request.id_of(position),
            request.ttl_s,
            request.root,
        )

    def _expire(self, now: float) -> list[Command]:
        commands: list[Command] = []
        while (waiter := self._waiters.due(now)) is not None:
            commands.append(Expire(waiter.ticket, self._waiters.position(waiter), now - waiter.since))
            commands += self._forget(waiter.ticket, now)
        return commands

    def _forget(self, ticket: int, now: float) -> list[Command]:
        """The waiter gets nothing (more): what its group has so far is given back."""
        commands: list[Command] = []
        waiter = self._waiters.remove(ticket)
        if waiter is not None:
            self._images.left(waiter)
        for lease in self._leases_of(waiter) if waiter is not None else ():
            lease.ticket = None
            if lease.held:
                commands += self._give_back(lease, LeaseState.released, now)
        return commands

    def _hand_over(self, waiter: Waiter, now: float) -> list[Command]:
        self._waiters.remove(waiter.ticket)
        self._images.left(waiter)
        commands: list[Command] = []
        for lease in self._leases_of(waiter):
            lease.ticket, lease.held_since_s = None, now
            commands.append(HandOver(waiter.ticket, lease.id, lease.container, lease.trajectory))
        return commands

    def _leases_of(self, waiter: Waiter) -> list[LeaseRecord]:
        return [self._leases[lease] for lease in waiter.leases if lease is not None]

    def _waiter_of(self, lease: LeaseRecord) -> Waiter:
        waiter = self._waiters.get(lease.ticket) if lease.ticket is not None else None
        assert waiter is not None, "a lease names its waiter only while that waits"
        return waiter

    def _put_back(self, lease: LeaseRecord) -> None:
        """The lease will not be had: its waiter, if it still waits, gets another before anybody else does."""
        if lease.ticket is None:
            return
        waiter = self._waiter_of(lease)
        waiter.confirmed -= lease.state is LeaseState.granted
        self._waiters.lease_refused(waiter, lease.position)

    def _let_one_gather(self, now: float) -> list[Command]:
        """Slots are gone for good: of the groups that lack some, all but the first give back what they have. They keep
        their turn."""
        commands: list[Command] = []
        for waiter in self._waiters.gatherers()[1:]:
            for lease in self._leases_of(waiter):
                self._put_back(lease)
                if lease.state is LeaseState.granted:
                    commands += self._give_back(lease, LeaseState.released, now)
                else:  # it is given back when the container answers; until then it counts beside its waiter
                    self._queue_policy.took(lease.tags.run, lease.tags.kind, 1, caps_of(lease.tags))
                    lease.ticket = None
        return commands

    def _adopt(self, container: ContainerRecord, slot: SlotRecord, holder: Holder, now: float) -> None:
        lease = LeaseRecord(self._number(), None, holder.trajectory, slot, tags=holder.tags, state=LeaseState.granted)
        lease.epoch, lease.held_since_s = holder.epoch, now - holder.held_s
        self._reset_is_over(slot)
        self._counts.move_slot(container, slot, SlotState.leased, now)
        slot.since = now - holder.held_s
        slot.lease = lease.id
        self._leases[lease.id] = lease
        self._adopted[lease.tags.without_tokens(), lease.trajectory] = lease
        self.adopted_total += 1
        self._queue_policy.took(lease.tags.run, lease.tags.kind, 1, caps_of(lease.tags))

    def _give_back(self, lease: LeaseRecord, end: LeaseState, now: float) -> list[Command]:
        """End the lease; its slot is used again only after the container has reset it."""
        lease.move(end)
        self._line_gets_back(lease)
        self._forget_lease(lease)
        container = self._containers[lease.container]
        slot = container.slots[lease.slot]
        slot.lease = None
        if lease.ticket is None:
            slot.reset_for = lease.tags.run
            self._queue_policy.resetting(lease.tags.run, 1)
        self._counts.move_slot(container, slot, SlotState.resetting, now)
        return [Reclaim(lease.container, lease.slot, lease.id, lease.epoch), *self._retire_if_stuck(container)]

    def _forget_lease(self, lease: LeaseRecord) -> None:
        del self._leases[lease.id]
        key = (lease.tags.without_tokens(), lease.trajectory)
        if self._adopted.get(key) is lease:
            del self._adopted[key]

    def _lose_lease(self, lease: LeaseRecord, reason: str) -> list[Command]:
        held = lease.held
        self._put_back(lease)
        lease.move(LeaseState.lost)
        self._line_gets_back(lease)
        if not held:
            return []
        error = ContainerLostError(
            f"container {lease.container} is gone, with slot {lease.slot} of {lease.trajectory!r}: {reason}",
            next_step="start the rollout again on a new slot",
        )
        return [EndLease(lease.id, error, lease)]

    def _line_gets_back(self, lease: LeaseRecord) -> None:
        """A waiter put back keeps counting its slot as taken: it has had its turn."""
        if lease.ticket is None:
            self._queue_policy.gave(lease.tags.run, lease.tags.kind, 1, caps_of(lease.tags))

    def _reset_is_over(self, slot: SlotRecord) -> None:
        if slot.reset_for is not None:
            self._queue_policy.resetting(slot.reset_for, -1)
            slot.reset_for = None

    def _stop_leasing(self, container: ContainerRecord) -> None:
        if container.state is not ContainerState.draining:
            self._counts.move_container(container, ContainerState.draining)

    def _retire_if_stuck(self, container: ContainerRecord) -> list[Command]:
        leased = container.stuck and any(slot.state is SlotState.leased for slot in container.slots)
        return [] if leased or not container.stuck else [Retire(container.id, container.stuck)]

    def _retire_if_empty(self, container: ContainerRecord) -> list[Command]:
        return [] if container.busy or not container.unwanted else [Retire(container.id, container.unwanted)]

    def _retire_if_spoiled(self, container: ContainerRecord) -> list[Command]:
        """If most of its slots are quarantined: no new leases; replaced once its last lease has ended."""
        if container.quarantined * 2 <= len(container.slots):
            return []
        self._stop_leasing(container)
        reason = f"{container.quarantined} of {len(container.slots)} slots are quarantined"
        return [] if container.busy else [Retire(container.id, reason)]

    def _offer(self, container: ContainerRecord, now: float) -> None:
        if container.free:
            self._images.free(container, now)
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
