"""The ledger under random sequences of events, against its rules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from agentenv.slots.commands import Command, EndLease, Expire, Fail, Grant, HandOver, Reclaim, Retire
from agentenv.slots.counts import LONGEST_FREEING_S
from agentenv.slots.ledger import Ledger
from agentenv.slots.queue_policy import Ask, Caps, FirstCome
from agentenv.slots.records import Holder
from agentenv.slots.waiters import Waiter
from agentenv.wire.leases import RunKind, SlotRequest, Tags
from agentenv.wire.states import ContainerState, LeaseState, SlotState

FOUND = (SlotState.free,) * 4 + (SlotState.leased, SlotState.resetting, SlotState.quarantined)
BUSY = (SlotState.leased, SlotState.resetting)


GUEST = Holder("guest", Tags(run="guest"), epoch=1)


class CountingLine(FirstCome):
    """Counts the slots that its runs hold."""

    held = 0

    def pick(self, free: int) -> Ask | None:
        ask = super().pick(free)
        self.held += 0 if ask is None else ask.slots
        return ask

    def took(self, run: str, kind: RunKind, slots: int = 1, caps: Caps = ()) -> None:
        self.held += slots

    def gave(self, run: str, kind: RunKind, slots: int = 1, caps: Caps = ()) -> None:
        self.held -= slots


class LedgerMachine(RuleBasedStateMachine):
    """Plays pool and containers; keeps its own simple account of what must be true."""

    containers = Bundle("containers")

    def __init__(self) -> None:
        super().__init__()
        self.line = CountingLine()
        self.ledger = Ledger(self.line)
        self.now = 0.0
        self.started = 0
        self.asked: dict[int, float] = {}
        """Unanswered tickets and their deadlines."""
        self.sizes: dict[int, int] = {}
        """How many slots each ticket asked for."""
        self.wanted: dict[int, str] = {}
        """The container that each ticket needs; empty: any."""
        self.gathered: dict[int, Grant] = {}
        """Leases that a container granted and whose group is not complete."""
        self.asking: dict[int, Grant] = {}
        """Leases under way at a container."""
        self.held: dict[int, tuple[str, int]] = {}
        """Leases in somebody's hands: where."""
        self.dirty: set[tuple[str, int]] = set()
        """Slots whose reset was ordered and not answered."""
        self.dirty_since: dict[tuple[str, int], float] = {}
        self.alive: set[str] = set()
        self.accepting = True
        self.bound = 4
        """Containers of this index and above take no new leases."""

    # -- performing, as the pool would ---------------------------------------------------------

    def perform(self, commands: Iterable[Command]) -> None:
        commands = list(commands)
        whole = Counter(command.ticket for command in commands if isinstance(command, HandOver))
        assert all(self.sizes[ticket] == leases for ticket, leases in whole.items()), "a part of a group"
        for ticket in whole:
            assert self.asked.pop(ticket) > self.now, "handed over at or after the deadline"
        for command in commands:
            match command:
                case Grant():
                    self.check_grant(command)
                    self.asking[command.lease] = command
                case HandOver(_, lease, container, _):
                    grant = self.gathered.pop(lease)
                    assert grant.container == container
                    self.held[lease] = (container, grant.slot)
                    if not self.accepting:
                        self.let_go(lease)
                case Expire(ticket):
                    assert self.asked.pop(ticket) <= self.now, "expired before its deadline"
                case Fail(ticket):
                    del self.asked[ticket]
                    wanted, size = self.wanted[ticket], self.sizes[ticket]
                    found = next((one for one in self.ledger.containers() if one.id == wanted), None)
                    assert found is None or found.leaving or len(found.slots) < size, "it could have been served"
                case EndLease(lease):
                    del self.held[lease]
                case Reclaim(container, slot, lease):
                    assert lease not in self.held
                    assert (container, slot) not in self.dirty
                    self.dirty.add((container, slot))
                    self.dirty_since[container, slot] = self.now
                    self.asking.pop(lease or -1, None)
                    self.gathered.pop(lease or -1, None)
                case Retire(container, _):
                    self.lose(container)

    def check_grant(self, grant: Grant) -> None:
        where = (grant.container, grant.slot)
        assert where not in self.held.values(), "a slot has two leases"
        assert where not in {(one.container, one.slot) for one in (*self.asking.values(), *self.gathered.values())}
        assert where not in self.dirty, "leased before its container said it was clean"
        assert grant.deadline > self.now
        served = next(waiter.ticket for waiter in self.ledger.waiters() if grant.lease in waiter.leases)
        assert self.wanted[served] in ("", grant.container), "leased where its checkpoint is not"
        waiting = [waiter.ticket for waiter in self.ledger.waiters() if waiter.missing and not self.is_aside(waiter)]
        assert all(served <= ticket for ticket in waiting), "somebody who asked later was served first"
        container = next(one for one in self.ledger.containers() if one.id == grant.container)
        assert container.state is ContainerState.ready, "a new lease on a container that is not ready"
        assert container.index < self.bound, "a new lease on a container that is to go"

    def is_aside(self, waiter: Waiter) -> bool:
        """Whether the only container that can serve it has too little room."""
        wanted = waiter.request.container
        room = sum(one.free for one in self.ledger.containers() if one.id == wanted)
        return bool(wanted) and room < (1 if waiter.served else len(waiter.leases))

    def lose(self, container: str) -> None:
        self.alive.discard(container)
        self.dirty = {where for where in self.dirty if where[0] != container}
        commands = self.ledger.lose(container, "lost", self.now)
        ended = {one.lease for one in commands if isinstance(one, EndLease)}
        assert ended == {lease for lease, where in self.held.items() if where[0] == container}
        self.asking = {lease: one for lease, one in self.asking.items() if one.container != container}
        self.gathered = {lease: one for lease, one in self.gathered.items() if one.container != container}
        self.perform(commands)

    def let_go(self, lease: int) -> None:
        del self.held[lease]
        self.perform(self.ledger.release(lease, self.now))

    # -- events --------------------------------------------------------------------------------

    @rule(target=containers, index=st.integers(0, 3), slots=st.lists(st.sampled_from(FOUND), min_size=1, max_size=4))
    def start(self, index: int, slots: list[SlotState]) -> str:
        self.started += 1
        name = f"c{self.started}"
        self.alive.add(name)
        self.perform(self.ledger.started(name, index))
        self.perform(self.ledger.inventory(name, slots, self.now))
        return name

    @rule(patience=st.floats(0.1, 8), size=st.sampled_from([1, 1, 2, 3]))
    def ask(self, patience: float, size: int) -> None:
        self.ask_of("", patience, size)

    @rule(container=containers, patience=st.floats(0.1, 8), size=st.sampled_from([1, 1, 2]))
    def ask_for_a_container(self, container: str, patience: float, size: int) -> None:
        self.ask_of(container, patience, size)

    @rule(patience=st.floats(0.1, 8))
    def ask_for_a_container_that_is_gone(self, patience: float) -> None:
        before = set(self.asked)
        self.ask_of("gone", patience, 1)
        assert set(self.asked) <= before, "it fails at once"

    def ask_of(self, container: str, patience: float, size: int) -> None:
        request = SlotRequest(tuple(f"t{number}" for number in range(size)), container=container)
        ticket, commands = self.ledger.enqueue(request, self.now, self.now + patience)
        self.asked[ticket] = self.now + patience
        self.sizes[ticket] = size
        self.wanted[ticket] = container
        self.perform(commands)

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.asked)))
        del self.asked[ticket]
        self.perform(self.ledger.withdraw(ticket, self.now))

    @precondition(lambda self: self.asking)
    @rule(data=st.data(), yes=st.booleans(), accepting=st.booleans())
    def answer(self, data: st.DataObject, yes: bool, accepting: bool) -> None:
        lease = data.draw(st.sampled_from(sorted(self.asking)))
        self.accepting = accepting
        if yes:
            self.gathered[lease] = self.asking.pop(lease)
            self.perform(self.ledger.confirm(lease, self.now))
        else:
            self.perform(self.ledger.refuse(lease, self.now))
        self.accepting = True

    @rule(container=containers, slot=st.integers(0, 3))
    def taken_by_others(self, container: str, slot: int) -> None:
        """Somebody leases a slot beside us: it becomes a lease that we only watch."""
        known = next((one for one in self.ledger.containers() if one.id == container), None)
        able = known is not None and slot < len(known.slots) and known.slots[slot].state in (
            SlotState.free, SlotState.resetting
        )  # fmt: skip
        self.perform(self.ledger.taken(container, slot, GUEST, self.now))
        if able:
            self.dirty.discard((container, slot))
            lease = self.ledger.lease_on(container, slot)
            assert lease is not None
            assert lease.held
            self.held[lease.id] = (container, slot)

    @rule(lease=st.integers(0, 60))
    def late_answer(self, lease: int) -> None:
        """An answer to a lease that is no longer asked for changes nothing."""
        if lease not in self.asking and lease not in self.gathered:
            self.perform(self.ledger.tick(self.now))
            before = self.snapshot()
            if lease not in self.held:
                self.perform(self.ledger.refuse(lease, self.now))
            self.perform(self.ledger.confirm(lease, self.now) if lease not in self.held else [])
            assert self.snapshot() == before

    @precondition(lambda self: self.gathered)
    @rule(data=st.data())
    def end_while_gathering(self, data: st.DataObject) -> None:
        """A lease ends while its group waits for the others: nobody had it, another takes its place."""
        lease = data.draw(st.sampled_from(sorted(self.gathered)))
        commands = self.ledger.stale(lease, self.now)
        assert not [command for command in commands if isinstance(command, EndLease)]
        self.perform(commands)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), stale=st.booleans())
    def end(self, data: st.DataObject, stale: bool) -> None:
        lease = data.draw(st.sampled_from(sorted(self.held)))
        if stale:
            self.perform(self.ledger.stale(lease, self.now))
            assert lease not in self.held
        else:
            self.let_go(lease)

    @precondition(lambda self: self.dirty)
    @rule(data=st.data(), proved=st.booleans())
    def reset(self, data: st.DataObject, proved: bool) -> None:
        where = data.draw(st.sampled_from(sorted(self.dirty)))
        self.dirty.discard(where)
        done = self.ledger.freed if proved else self.ledger.quarantined
        self.perform(done(*where, self.now))

    @rule(container=containers, event=st.sampled_from(["suspect", "recovered", "drain", "inventory"]))
    def health(self, container: str, event: str) -> None:
        """Early, late or repeated: it may bring new leases, it never changes one."""
        held, asking = dict(self.held), set(self.asking)
        match event:
            case "suspect":
                self.perform(self.ledger.suspect(container))
            case "recovered":
                self.perform(self.ledger.recovered(container, self.now))
            case "drain":
                self.perform(self.ledger.drain(container))
            case "inventory":
                self.perform(self.ledger.inventory(container, [SlotState.free] * 4, self.now))
        assert self.held == held
        assert asking <= set(self.asking)

    @rule(index=st.integers(0, 4))
    def move_the_goal(self, index: int) -> None:
        self.bound = index
        self.perform(self.ledger.drain_from(index))

    @rule(container=consumes(containers))
    def die(self, container: str) -> None:
        self.lose(container)

    @rule(seconds=st.floats(0, 5))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.perform(self.ledger.tick(self.now))

    @rule(seconds=st.floats(0, 5))
    def time_passes_unseen(self, seconds: float) -> None:
        """The upkeep has not run yet when the next event comes."""
        self.now += seconds

    # -- what must be true at every moment -----------------------------------------------------

    def snapshot(self) -> tuple[object, ...]:
        return (repr(self.ledger), dict(self.held), set(self.asking), set(self.gathered), dict(self.asked))

    @invariant()
    def nobody_is_forgotten(self) -> None:
        assert {waiter.ticket for waiter in self.ledger.waiters()} == set(self.asked)

    @invariant()
    def leases_agree(self) -> None:
        leases = {lease.id: lease for lease in self.ledger.leases()}
        assert set(leases) == set(self.held) | set(self.asking) | set(self.gathered)
        for lease_id, where in self.held.items():
            assert (leases[lease_id].container, leases[lease_id].slot) == where
            assert leases[lease_id].state is LeaseState.granted
        places = [(lease.container, lease.slot) for lease in leases.values()]
        assert len(places) == len(set(places))

    @invariant()
    def counts_are_consistent(self) -> None:
        found: Counter[SlotState] = Counter()
        for container in self.ledger.containers():
            states = Counter(slot.state for slot in container.slots)
            found += states
            assert container.busy == sum(states[state] for state in BUSY)
            assert container.quarantined == states[SlotState.quarantined]
            assert container.free == (states[SlotState.free] if container.state is ContainerState.ready else 0)
            assert (container.idle_since is None) == (container.busy > 0 or not container.slots)
        assert self.ledger.slot_counts() == dict(found)
        assert found[SlotState.leased] == len(self.held) + len(self.asking) + len(self.gathered)
        assert found[SlotState.resetting] == len(self.dirty)
        assert {one.id for one in self.ledger.containers()} == self.alive
        assert self.ledger.container_counts() == dict(Counter(one.state for one in self.ledger.containers()))

    @invariant()
    def the_load_is_what_the_slots_are(self) -> None:
        load, containers = self.ledger.load(self.now), self.ledger.containers()
        anywhere = [waiter for waiter in self.ledger.waiters() if not waiter.request.container]
        assert load.waiting == sum(len(waiter.missing) for waiter in anywhere)
        assert load.free == sum(container.free for container in containers)
        assert load.leased == len(self.held) + len(self.asking) + len(self.gathered)
        assert load.freeing + load.stuck == len(self.dirty)
        young = {where for where, since in self.dirty_since.items() if self.now - since < LONGEST_FREEING_S}
        leasing = {container.id for container in containers if container.state is ContainerState.ready}
        assert load.freeing <= len([1 for where in self.dirty & young if where[0] in leasing])
        assert load.serving == sum(container.serving for container in containers)
        assert load.draining == sum(container.leaving for container in containers)

    @invariant()
    def nobody_waits_beside_enough_free_slots(self) -> None:
        waiting = [waiter for waiter in self.ledger.waiters() if waiter.missing and not self.is_aside(waiter)]
        if waiting:
            first = min(waiting, key=lambda waiter: waiter.ticket)
            free = sum(container.free for container in self.ledger.containers())
            assert free < (1 if first.served else len(first.leases))

    @invariant()
    def nobody_waits_for_a_container_that_is_gone(self) -> None:
        needed = {waiter.request.container for waiter in self.ledger.waiters()} - {""}
        assert needed <= self.alive

    @invariant()
    def the_line_knows_what_its_runs_hold(self) -> None:
        ours = sum(lease.ticket is None for lease in self.ledger.leases())
        getting = sum(len(waiter.leases) for waiter in self.ledger.waiters() if waiter.served)
        assert self.line.held == ours + getting


LedgerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestLedgerRandom = LedgerMachine.TestCase
