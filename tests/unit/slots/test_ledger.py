"""The ledger, move by move."""

from __future__ import annotations

from collections import Counter

import pytest

from agentenv.errors import CheckpointError, ContainerLostError, StaleLeaseError
from agentenv.slots.commands import Command, EndLease, Expire, Fail, Grant, HandOver, Reclaim, Retire
from agentenv.slots.ledger import Ledger
from agentenv.slots.queue_policy import FirstCome
from agentenv.slots.records import ContainerRecord, Holder, LeaseRecord, SlotRecord
from agentenv.wire.leases import SlotRequest, Tags
from agentenv.wire.states import (
    CONTAINER_MOVES,
    LEASE_MOVES,
    POOL_SLOT_MOVES,
    ContainerState,
    IllegalMoveError,
    LeaseState,
    SlotState,
)


def _with(*containers: tuple[str, int, int]) -> Ledger:
    ledger = Ledger()
    for name, index, slots in containers:
        ledger.started(name, index)
        ledger.inventory(name, [SlotState.free] * slots, 0.0)
    return ledger


def _grants(commands: list[Command]) -> list[tuple[str, str, int]]:
    return [(one.trajectory, one.container, one.slot) for one in commands if isinstance(one, Grant)]


def _take(ledger: Ledger, trajectory: str, now: float = 0.0) -> int:
    """Ask and be handed a slot; the lease."""
    _, commands = ledger.enqueue(SlotRequest((trajectory,)), now, now + 100)
    (grant,) = [one for one in commands if isinstance(one, Grant)]
    (handed,) = ledger.confirm(grant.lease, now)
    assert isinstance(handed, HandOver)
    return grant.lease


def test_leases_are_packed_low() -> None:
    ledger = _with(("b", 1, 2), ("a", 0, 2))
    taken = [_grants(ledger.enqueue(SlotRequest((f"t{n}",)), 0, 10)[1])[0][1:] for n in range(4)]
    assert taken == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    assert repr(ledger) == "<Ledger 2 containers, 4 leased, 0 waiting>"


def test_a_freed_low_slot_is_taken_before_a_free_high_one() -> None:
    ledger = _with(("a", 0, 2), ("b", 1, 2))
    first = _take(ledger, "x")
    _take(ledger, "y")
    _take(ledger, "z")
    ledger.release(first, 1.0)
    ledger.freed("a", 0, 1.0)
    assert _grants(ledger.enqueue(SlotRequest(("w",)), 2.0, 10)[1]) == [("w", "a", 0)]


def test_waiters_are_served_in_order_and_only_by_clean_slots() -> None:
    ledger = _with(("a", 0, 1))
    lease = _take(ledger, "holder")
    ledger.enqueue(SlotRequest(("first",)), 1, 100)
    ledger.enqueue(SlotRequest(("second",)), 2, 100)
    assert ledger.release(lease, 3) == [Reclaim("a", 0, lease)]
    assert ledger.tick(4) == []
    assert _grants(ledger.freed("a", 0, 5)) == [("first", "a", 0)]
    assert ledger.waiting == 1


def test_a_refused_waiter_keeps_its_place() -> None:
    ledger = _with(("a", 0, 1))
    _, commands = ledger.enqueue(SlotRequest(("first",)), 0, 100)
    ledger.enqueue(SlotRequest(("second",)), 0, 100)
    grant = commands[0]
    assert isinstance(grant, Grant)
    assert ledger.refuse(grant.lease, 1) == [Reclaim("a", 0, grant.lease)]
    assert _grants(ledger.freed("a", 0, 2)) == [("first", "a", 0)]


def test_who_leaves_while_its_slot_is_asked_for_leaves_nothing_behind() -> None:
    ledger = _with(("a", 0, 1))
    ticket, commands = ledger.enqueue(SlotRequest(("gone",)), 0, 100)
    ledger.enqueue(SlotRequest(("next",)), 0, 100)
    grant = commands[0]
    assert isinstance(grant, Grant)
    assert ledger.withdraw(ticket, 1) == []
    assert ledger.confirm(grant.lease, 2) == [Reclaim("a", 0, grant.lease)]
    assert _grants(ledger.freed("a", 0, 3)) == [("next", "a", 0)]
    assert ledger.withdraw(ticket, 4) == []


def test_a_waiter_expires_with_its_position_and_is_never_granted_afterwards() -> None:
    ledger = _with(("a", 0, 1))
    lease = _take(ledger, "holder")
    ledger.enqueue(SlotRequest(("long",)), 0, 100)
    ticket, _ = ledger.enqueue(SlotRequest(("short",)), 1, 5)
    assert ledger.next_deadline() == 5
    assert ledger.tick(4.99) == []
    assert ledger.tick(5.0) == [Expire(ticket, 2, 4.0)]
    ledger.release(lease, 6)
    assert _grants(ledger.freed("a", 0, 6)) == [("long", "a", 0)]


def test_a_confirmation_at_the_deadline_comes_too_late() -> None:
    ledger = _with(("a", 0, 1))
    ticket, commands = ledger.enqueue(SlotRequest(("late",)), 0, 5)
    grant = commands[0]
    assert isinstance(grant, Grant)
    assert ledger.confirm(grant.lease, 5.0) == [Expire(ticket, 0, 5.0), Reclaim("a", 0, grant.lease)]


def test_a_lost_container_ends_leases_and_puts_waiters_back() -> None:
    ledger = _with(("a", 0, 2))
    held = _take(ledger, "holder")
    _, commands = ledger.enqueue(SlotRequest(("asking",)), 0, 100)
    grant = commands[0]
    assert isinstance(grant, Grant)
    (ended,) = ledger.lose("a", "killed", 1)
    assert isinstance(ended, EndLease)
    assert ended.lease == held
    assert isinstance(ended.error, ContainerLostError)
    assert "killed" in str(ended.error)
    assert ledger.waiting == 1
    assert ledger.confirm(grant.lease, 2) == []  # the late answer of a dead container
    assert ledger.lose("a", "again", 2) == []
    ledger.started("b", 0)
    assert _grants(ledger.inventory("b", [SlotState.free], 3)) == [("asking", "b", 0)]
    assert ledger.slot_counts() == {SlotState.leased: 1}


def test_suspect_takes_no_new_leases_and_keeps_its_old() -> None:
    ledger = _with(("a", 0, 2))
    held = _take(ledger, "holder")
    ledger.suspect("a")
    assert _grants(ledger.enqueue(SlotRequest(("new",)), 0, 100)[1]) == []
    assert [lease.id for lease in ledger.leases()] == [held]
    assert _grants(ledger.recovered("a", 1)) == [("new", "a", 1)]


def test_late_health_changes_no_lease() -> None:
    ledger = _with(("a", 0, 1))
    held = _take(ledger, "holder")
    before = [repr(lease) for lease in ledger.leases()]
    for late in (ledger.recovered("a", 1), ledger.inventory("a", [SlotState.free], 1), ledger.freed("a", 0, 1)):
        assert late == []
    assert [repr(lease) for lease in ledger.leases()] == before == [f"<Lease {held} granted a/0 'holder'>"]
    assert ledger.recovered("never-seen", 1) == ledger.freed("never-seen", 0, 1) == []


def test_a_draining_container_takes_no_new_leases_and_never_returns() -> None:
    ledger = _with(("a", 0, 1))
    ledger.drain("a")
    ledger.drain("a")
    assert ledger.recovered("a", 1) == []
    assert _grants(ledger.enqueue(SlotRequest(("new",)), 0, 100)[1]) == []
    assert ledger.container_counts() == {ContainerState.draining: 1}


def test_a_stale_lease_ends_typed_and_its_slot_is_reclaimed() -> None:
    ledger = _with(("a", 0, 1))
    held = _take(ledger, "holder")
    ended, reclaim = ledger.stale(held, 1)
    assert isinstance(ended, EndLease)
    assert isinstance(ended.error, StaleLeaseError)
    assert reclaim == Reclaim("a", 0, held)
    assert ledger.stale(held, 2) == ledger.release(held, 2) == []


def test_mostly_quarantined_containers_are_retired_once_empty() -> None:
    ledger = _with(("a", 0, 3))
    leases = [_take(ledger, f"t{n}") for n in range(3)]
    for slot, lease in enumerate(leases[:2]):
        ledger.release(lease, 1)
        assert not any(isinstance(one, Retire) for one in ledger.quarantined("a", slot, 1))
    assert _grants(ledger.enqueue(SlotRequest(("new",)), 1, 100)[1]) == []
    ledger.release(leases[2], 2)
    assert ledger.freed("a", 2, 2) == [Retire("a", "2 of 3 slots are quarantined")]


def test_a_container_with_half_its_slots_quarantined_goes_on_being_leased() -> None:
    ledger = _with(("a", 0, 2))
    leases = [_take(ledger, f"t{n}") for n in range(2)]
    for lease in leases:
        ledger.release(lease, 1)
    assert ledger.quarantined("a", 0, 1) == []
    ledger.freed("a", 1, 1)
    assert _grants(ledger.enqueue(SlotRequest(("new",)), 1, 100)[1])[0][1:] == ("a", 1)


def test_a_container_that_is_not_wanted_is_retired_once_every_slot_has_come_back() -> None:
    """Not before: whoever releases its last lease waits at the container for the reset."""
    ledger = _with(("a", 0, 2), ("b", 1, 2))
    lease = _take(ledger, "t")
    assert ledger.retire("a", "drained") == ledger.retire("a", "again") == []
    assert _grants(ledger.enqueue(SlotRequest(("u",)), 1, 10)[1]) == [("u", "b", 0)]
    assert ledger.release(lease, 2) == [Reclaim("a", 0, lease, None)]
    assert ledger.freed("a", 0, 3) == [Retire("a", "drained")]
    assert ledger.retire("b", "drained") == [], "its lease is being requested"
    assert _with(("c", 0, 2)).retire("c", "drained") == [Retire("c", "drained")]


def test_slots_of_somebody_else_are_waited_for() -> None:
    ledger = Ledger()
    ledger.started("a", 0)
    found = [SlotState.leased, SlotState.quarantined, SlotState.free, SlotState.resetting]
    assert ledger.inventory("a", found, 0) == [Reclaim("a", 0, None), Reclaim("a", 3, None)]
    assert ledger.slot_counts() == {SlotState.resetting: 2, SlotState.quarantined: 1, SlotState.free: 1}


def test_draining_from_an_index_spares_the_lower_ones() -> None:
    ledger = _with(("a", 0, 1), ("b", 1, 1), ("c", 2, 1))
    ledger.drain_from(1)
    states = [(one.id, one.state) for one in ledger.containers()]
    assert states == [("a", ContainerState.ready), ("b", ContainerState.draining), ("c", ContainerState.draining)]


def test_many_cycles_keep_the_books_small() -> None:
    ledger = _with(("a", 0, 2))
    for now in range(500):
        lease = _take(ledger, "t", now)
        ledger.release(lease, now)
        ledger.freed("a", 0, now)
    assert len(ledger._open) <= 1


@pytest.mark.parametrize("moves", [POOL_SLOT_MOVES, CONTAINER_MOVES, LEASE_MOVES])
def test_every_state_has_its_row_and_can_end(moves: dict[str, frozenset[str]]) -> None:
    ends = {state for state, to in moves.items() if not to}
    assert ends
    assert {state for to in moves.values() for state in to} <= set(moves)


def test_illegal_moves_raise_and_change_nothing() -> None:
    slot = SlotRecord("a", 3)
    with pytest.raises(IllegalMoveError, match="<Slot a/3 free> cannot go from free to quarantined"):
        slot.move(SlotState.quarantined)
    assert slot.state is SlotState.free
    lease = LeaseRecord(1, 2, "t", slot)
    lease.move(LeaseState.lost)
    with pytest.raises(IllegalMoveError):
        lease.move(LeaseState.granted)
    assert lease.state is LeaseState.lost


def test_a_container_moves_slots_only_legally() -> None:
    container = ContainerRecord("a", 0)
    container.fill([SlotState.free, SlotState.leased], 0)
    container.move(ContainerState.ready)
    before = repr(container), container.free, container.busy
    with pytest.raises(IllegalMoveError):
        container.move_slot(container.slots[1], SlotState.free, 1)
    assert (repr(container), container.free, container.busy) == before
    assert repr(container) == "<Container a #0 ready 1/2 busy>"


@pytest.mark.parametrize("end", ["stale", "lose"])
def test_an_adopted_lease_is_found_by_its_tags_and_trajectory_as_long_as_it_lasts(end: str) -> None:
    ledger = Ledger()
    ledger.started("a", 0)
    mine, others = Holder("t", Tags(run="mine"), 7), Holder("t", Tags(run="others"), 3)
    ledger.inventory("a", [SlotState.leased, SlotState.leased, SlotState.free], 0.0, {0: mine, 1: others})
    found = ledger.adopted(Tags(run="mine"), "t")
    assert found is not None
    assert (found.slot, found.epoch) == (0, 7)
    assert ledger.adopted(Tags(run="mine"), "u") is None
    _take(ledger, "requested here")
    assert ledger.adopted(Tags(run=""), "requested here") is None
    if end == "stale":
        ledger.stale(found.id, 1.0)
        assert ledger.adopted(Tags(run="others"), "t") is not None
    else:
        ledger.lose("a", "gone", 1.0)
        assert ledger.adopted(Tags(run="others"), "t") is None
    assert ledger.adopted(Tags(run="mine"), "t") is None


def _take_of(ledger: Ledger, container: str, trajectory: str) -> int:
    (grant,) = [one for one in _ask_of(ledger, container, trajectory) if isinstance(one, Grant)]
    ledger.confirm(grant.lease, 0)
    return grant.lease


def _ask_of(ledger: Ledger, container: str, *trajectories: str) -> list[Command]:
    return ledger.enqueue(SlotRequest(trajectories, container=container), 0, 100)[1]


def test_a_lease_of_a_particular_container_is_made_there_only() -> None:
    ledger = _with(("a", 0, 2), ("b", 1, 2))
    assert _grants(_ask_of(ledger, "b", "x", "y")) == [("x", "b", 0), ("y", "b", 1)]


def test_who_needs_a_full_container_steps_aside_and_comes_back_to_the_old_place() -> None:
    ledger = _with(("a", 0, 2), ("b", 1, 2))
    x, y = _take_of(ledger, "b", "x"), _take_of(ledger, "b", "y")
    assert _grants(_ask_of(ledger, "b", "aside")) == []
    assert (ledger.waiting, ledger.load(0).waiting) == (1, 0), "another container would not help"
    assert _grants(_ask_of(ledger, "", "other", "second")) == [("other", "a", 0), ("second", "a", 1)]
    assert _grants(_ask_of(ledger, "", "last")) == []
    assert [ledger.position(waiter.ticket) for waiter in ledger.waiters() if waiter.missing] == [1, 1]
    ledger.release(x, 1)
    assert _grants(ledger.freed("b", 0, 1)) == [("aside", "b", 0)], "it came before `last`"
    ledger.release(y, 2)
    assert _grants(ledger.freed("b", 1, 2)) == [("last", "b", 1)]


def test_who_has_come_back_to_the_line_steps_aside_again() -> None:
    ledger = _with(("a", 0, 2), ("b", 1, 1))
    x = _take_of(ledger, "b", "x")
    a = [_take(ledger, "1"), _take(ledger, "2")]
    _ask_of(ledger, "", "g1", "g2")  # gathers at the head of the line
    _ask_of(ledger, "b", "aside")
    ledger.release(x, 1)
    assert _grants(ledger.freed("b", 0, 1)) == [], "the group comes first"
    ledger.release(a[0], 2)
    assert _grants(ledger.freed("a", 0, 2)) == [("g1", "a", 0), ("g2", "b", 0)]
    _ask_of(ledger, "", "other")
    ledger.release(a[1], 3)
    assert _grants(ledger.freed("a", 1, 3)) == [("other", "a", 1)], "`aside` is not in its way"
    assert [waiter.served for waiter in ledger.waiters() if waiter.request.container] == [False]


@pytest.mark.parametrize("how", ["it was never there", "it has died", "it is draining", "it is too small"])
def test_who_needs_a_container_that_cannot_serve_fails_at_once(how: str) -> None:
    ledger = _with(("a", 0, 2), ("b", 1, 2))
    _take_of(ledger, "b", "x")
    _take_of(ledger, "b", "y")
    commands = _ask_of(ledger, {"it was never there": "c"}.get(how, "b"), *("123" if how == "it is too small" else "1"))
    if how == "it has died":
        commands = ledger.lose("b", "", 1)
    if how == "it is draining":
        ledger.drain("b")
        commands = ledger.tick(1)
    (failed,) = [command for command in commands if isinstance(command, Fail)]
    assert isinstance(failed.error, CheckpointError)
    assert not list(ledger.waiters())


def test_a_refused_lease_of_a_particular_container_holds_up_nobody() -> None:
    ledger = _with(("a", 0, 2), ("b", 1, 1))
    (grant,) = [command for command in _ask_of(ledger, "b", "x") if isinstance(command, Grant)]
    ledger.refuse(grant.lease, 1)
    assert _grants(_ask_of(ledger, "", "other")) == [("other", "a", 0)]
    assert _grants(ledger.freed("b", 0, 2)) == [("x", "b", 0)]


def test_groups_that_lose_slots_do_not_wait_for_each_others() -> None:
    ledger = _with(("a", 0, 2), ("b", 1, 2), ("c", 2, 2))
    _take(ledger, "single")
    _, first = ledger.enqueue(SlotRequest(("p", "q")), 0, 100)
    _, second = ledger.enqueue(SlotRequest(("r", "s")), 0, 100)
    assert _grants(first) == [("p", "a", 1), ("q", "b", 0)]
    assert _grants(second) == [("r", "b", 1), ("s", "c", 0)]
    kept, given = first[1], second[0]
    assert isinstance(kept, Grant)
    assert isinstance(given, Grant)
    ledger.confirm(kept.lease, 1)
    assert ledger.lose("c", "gone", 2) == [], "it takes the slot that it was about to have"
    ledger.confirm(given.lease, 3)
    lost = ledger.lose("a", "gone", 4)
    assert Reclaim("b", 1, given.lease) in lost
    granted = ledger.freed("b", 1, 5)
    assert _grants(granted) == [("p", "b", 1)]
    (again,) = [one for one in granted if isinstance(one, Grant)]
    assert {one.trajectory for one in ledger.confirm(again.lease, 6) if isinstance(one, HandOver)} == {"p", "q"}
    for lease in (kept.lease, again.lease):
        ledger.release(lease, 7)
    assert [*_grants(ledger.freed("b", 0, 8)), *_grants(ledger.freed("b", 1, 8))] == [("r", "b", 0), ("s", "b", 1)]


def test_what_a_group_asks_for_and_is_to_give_back_is_given_back_when_it_comes() -> None:
    ledger = _with(("a", 0, 1), ("b", 1, 2), ("c", 2, 1))
    ledger.enqueue(SlotRequest(("p", "q")), 0, 100)
    _, second = ledger.enqueue(SlotRequest(("r", "s")), 0, 100)
    asked = second[0]
    assert isinstance(asked, Grant)
    ledger.lose("c", "gone", 1)
    assert ledger.lose("a", "gone", 1) == []
    assert ledger.confirm(asked.lease, 2) == [Reclaim("b", 1, asked.lease)]
    assert _grants(ledger.freed("b", 1, 3)) == [("p", "b", 1)]


class _Charges(FirstCome):
    """Counts the slots in reset of each run."""

    def __init__(self) -> None:
        super().__init__()
        self.in_reset: Counter[str] = Counter()

    def resetting(self, run: str, slots: int) -> None:
        self.in_reset[run] += slots


@pytest.mark.parametrize("end", ["freed", "quarantined", "lose", "taken"])
def test_a_slot_in_reset_is_charged_to_the_run_that_had_it_until_it_is_over(end: str) -> None:
    line = _Charges()
    ledger = Ledger(line)
    ledger.started("a", 0)
    ledger.inventory("a", [SlotState.free] * 4, 0.0)
    _, commands = ledger.enqueue(SlotRequest(("t",), Tags(run="churns")), 0.0, 100.0)
    (grant,) = [one for one in commands if isinstance(one, Grant)]
    ledger.confirm(grant.lease, 0.0)
    assert line.in_reset["churns"] == 0
    ledger.release(grant.lease, 1.0)
    assert line.in_reset["churns"] == 1
    match end:
        case "freed":
            ledger.freed("a", grant.slot, 2.0)
        case "quarantined":
            ledger.quarantined("a", grant.slot, 2.0)
        case "lose":
            ledger.lose("a", "it is gone", 2.0)
        case _:
            ledger.taken("a", grant.slot, Holder("u", Tags(run="other"), 2), 2.0)
    assert line.in_reset["churns"] == 0


def test_who_was_refused_is_first_in_the_queue() -> None:
    ledger = _with(("a", 0, 1))
    first, (grant,) = ledger.enqueue(SlotRequest(("first",)), 0, 100)
    second, _ = ledger.enqueue(SlotRequest(("second",)), 0, 100)
    assert isinstance(grant, Grant)
    assert [ledger.position(ticket) for ticket in (first, second)] == [0, 1]
    assert _grants(ledger.refuse(grant.lease, 1)) == []
    assert [ledger.position(ticket) for ticket in (first, second)] == [1, 2]
