"""Where a request with an image gets its slots."""

from __future__ import annotations

from agentenv.errors import BadImageError, ImageUnavailableError
from agentenv.image_placement.placement import rendezvous
from agentenv.slots.commands import Command, Fail, Fetch, Grant
from agentenv.slots.ledger import Ledger
from agentenv.slots.sharing import FairShare
from agentenv.wire.leases import SlotRequest, Tags
from agentenv.wire.roots import RootSpec
from agentenv.wire.states import SlotState

ONE, TWO = (f"sha256:{digit * 64}" for digit in "12")
UNAVAILABLE = ImageUnavailableError("no answer")


def _farm(*nodes: str, slots: int = 1, line: FairShare | None = None) -> Ledger:
    """A container on each node: ``c0`` on the first."""
    ledger = Ledger(line)
    for index, node in enumerate(nodes):
        ledger.started(f"c{index}", index, node)
        ledger.inventory(f"c{index}", [SlotState.free] * slots, 0.0)
    return ledger


def _ask(ledger: Ledger, image: str, *names: str, run: str = "", now: float = 0.0) -> list[Command]:
    root = RootSpec(image) if image else None
    return ledger.enqueue(SlotRequest(names, Tags(run=run), root=root), now, now + 1e6)[1]


def _grants(commands: list[Command]) -> dict[str, str]:
    return {one.trajectory: one.container for one in commands if isinstance(one, Grant)}


def _first_of(image: str, *nodes: str) -> str:
    return max(nodes, key=lambda node: rendezvous(image, node))


def test_slots_are_taken_where_the_image_is_lowest_container_first() -> None:
    ledger = _farm("a", "b", "b")
    ledger.images("b", [ONE], 0.0)
    assert [_grants(_ask(ledger, ONE, name)) for name in ("x", "y")] == [{"x": "c1"}, {"y": "c2"}]
    assert _grants(_ask(ledger, "", "plain")) == {"plain": "c0"}


def test_an_image_that_no_node_has_is_fetched_by_the_first_of_its_order_and_others_go_on() -> None:
    ledger = _farm("a", "b", "c")
    first = _first_of(ONE, "a", "b", "c")
    assert _ask(ledger, ONE, "x") == [Fetch(first, ONE)]
    assert _grants(_ask(ledger, "", "plain")) == {"plain": "c0"}
    commands = ledger.fetched(first, ONE, 1.0)
    assert list(_grants(commands)) == ["x"]


def test_a_request_whose_image_came_keeps_its_place() -> None:
    ledger = _farm("a")
    _ask(ledger, ONE, "first")
    _ask(ledger, ONE, "second")
    assert _grants(_ask(ledger, "", "plain")) == {"plain": "c0"}
    _ask(ledger, "", "later")
    assert ledger.fetched("a", ONE, 1.0) == []
    (lease,) = [one.id for one in ledger.leases()]
    ledger.confirm(lease, 1.0)
    ledger.release(lease, 2.0)
    assert _grants(ledger.freed("c0", 0, 3.0)) == {"first": "c0"}
    assert [ledger.position(waiter.ticket) for waiter in ledger.waiters()] == [0, 1, 2]


def test_more_nodes_fetch_only_for_those_that_the_first_has_no_slot_for() -> None:
    ledger = _farm("a", "b", "c", "d")
    fetches = [_ask(ledger, ONE, f"t{n}") for n in range(4)]
    assert [len(one) for one in fetches] == [1, 0, 0, 0]
    (first,) = fetches[0]
    assert isinstance(first, Fetch)
    commands = ledger.fetched(first.node, ONE, 1.0)
    assert list(_grants(commands)) == ["t0"]
    assert len([one for one in commands if isinstance(one, Fetch)]) == 1, "t1 needs another node"


def test_a_fetch_that_fails_is_tried_elsewhere_and_then_told() -> None:
    ledger = _farm("a", "b")
    first = _first_of(ONE, "a", "b")
    other = "b" if first == "a" else "a"
    assert _ask(ledger, ONE, "x") == [Fetch(first, ONE)]
    _ask(ledger, ONE, "y")
    assert ledger.fetch_failed(first, ONE, UNAVAILABLE, 1.0) == [Fetch(other, ONE)]
    refused = ledger.fetch_failed(other, ONE, UNAVAILABLE, 2.0)
    assert [one.error for one in refused if isinstance(one, Fail)] == [UNAVAILABLE, UNAVAILABLE]
    assert ledger.waiting == 0
    assert _ask(ledger, ONE, "z", now=3.0) == [Fetch(first, ONE)], "whoever asks next begins anew"


def test_an_image_that_is_broken_is_broken_everywhere() -> None:
    ledger = _farm("a", "b")
    _ask(ledger, ONE, "x")
    refused = ledger.fetch_failed(_first_of(ONE, "a", "b"), ONE, BadImageError("broken"), 1.0)
    assert [type(one) for one in refused] == [Fail]


def test_images_are_prefetched_to_as_many_nodes_as_copies_are_wanted() -> None:
    ledger = _farm("a", "b", "c", "d")
    fetches = ledger.prefetch([ONE, ONE, ONE, TWO], 0.0)
    by_image = [one.image for one in fetches if isinstance(one, Fetch)]
    assert by_image == [ONE, ONE, TWO]
    for fetch in fetches[:2]:
        assert isinstance(fetch, Fetch)
        ledger.fetched(fetch.node, ONE, 1.0)
    assert ledger.prefetch([ONE], 2.0) == []


def test_a_group_gets_its_slots_together_over_nodes() -> None:
    ledger = _farm("a", "b", slots=2)
    ledger.images("a", [ONE], 0.0)
    assert _ask(ledger, ONE, "x", "y", "z") == [Fetch("b", ONE)]
    assert list(_grants(ledger.fetched("b", ONE, 1.0))) == ["x", "y", "z"]


def test_a_group_that_can_have_no_more_nodes_takes_slots_as_they_come() -> None:
    ledger = _farm("a", "b", slots=2)
    ledger.images("a", [ONE], 0.0)
    _ask(ledger, "", "plain")
    _ask(ledger, ONE, "x", "y")
    commands = ledger.fetch_failed("b", ONE, UNAVAILABLE, 1.0)
    assert _grants(commands) == {"x": "c0"}
    assert _grants(_ask(ledger, "", "other")) == {"other": "c1"}
    plain = next(one.id for one in ledger.leases() if one.trajectory == "plain")
    ledger.confirm(plain, 2.0)
    ledger.release(plain, 2.0)
    assert _grants(ledger.freed("c0", 0, 3.0)) == {"y": "c0"}


def test_slots_on_the_own_machine_have_every_image() -> None:
    ledger = _farm("")
    assert _grants(_ask(ledger, ONE, "x")) == {"x": "c0"}


def test_who_is_aside_holds_nothing_of_its_runs_share() -> None:
    line = FairShare()
    ledger = _farm("a", slots=2, line=line)
    _ask(ledger, ONE, "x", run="r")
    assert line.held("r") == 0
    ledger.fetched("a", ONE, 1.0)
    assert line.held("r") == 1


def test_slots_wanted_count_those_who_are_aside() -> None:
    ledger = _farm("a", slots=2)
    _ask(ledger, ONE, "x", "y")
    assert (ledger.waiting, ledger.load(0.0).waiting) == (1, 2)


def test_who_is_aside_has_a_place_among_those_of_its_run() -> None:
    ledger = _farm("a")
    for name, run in (("x", "r"), ("y", "r"), ("z", "s")):
        _ask(ledger, ONE, name, run=run)
    x, y, z = (waiter.ticket for waiter in ledger.waiters())
    assert [ledger.position(ticket) for ticket in (x, y, z)] == [1, 2, 1]
    assert [ledger.aside_slots(run) for run in "rs"] == [2, 1]
    ledger.withdraw(x, 1.0)
    assert [ledger.aside_slots(run) for run in "rs"] == [1, 1]
    assert ledger.position(y) == 1


def test_who_is_behind_one_that_leaves_is_next() -> None:
    ledger = _farm("a", slots=2)
    _ask(ledger, ONE, "x", "y")
    _ask(ledger, ONE, "z")
    assert _grants(_ask(ledger, "", "plain")) == {"plain": "c0"}
    group = next(iter(ledger.waiters())).ticket
    assert _grants(ledger.fetched("a", ONE, 1.0)) == {}, "one slot is too few for the group"
    assert _grants(ledger.withdraw(group, 2.0)) == {"z": "c0"}


def test_a_group_that_gathers_waits_for_what_is_refused_again() -> None:
    ledger = _farm("a", "b", slots=2)
    ledger.images("a", [ONE], 0.0)
    _ask(ledger, "", "plain")
    _ask(ledger, ONE, "x", "y")
    ledger.fetch_failed("b", ONE, UNAVAILABLE, 1.0)
    (group,) = (waiter for waiter in ledger.waiters() if len(waiter.leases) == 2)
    assert (ledger.aside(group.ticket), ledger.load(1.0).waiting) == (True, 1)
    lease = next(one.id for one in ledger.leases() if one.trajectory == "x")
    assert _grants(ledger.refuse(lease, 2.0)) == {}
    assert (ledger.aside(group.ticket), ledger.load(2.0).waiting) == (True, 2)
    assert _grants(ledger.freed("c0", 1, 3.0)) == {"x": "c0"}


def test_whoever_asks_after_a_failure_begins_anew_though_another_s_slot_is_being_requested() -> None:
    ledger = _farm("a", slots=2)
    ledger.images("a", [ONE], 0.0)
    _ask(ledger, "", "plain")
    assert _grants(_ask(ledger, ONE, "x")) == {"x": "c0"}
    assert _ask(ledger, ONE, "y") == []
    refused = ledger.fetch_failed("a", ONE, BadImageError("broken"), 1.0)
    assert [type(one) for one in refused] == [Fail]
    assert _ask(ledger, ONE, "z", now=2.0) == [Fetch("a", ONE)]


def test_an_image_is_wanted_until_the_last_who_waits_for_it_has_left() -> None:
    ledger = _farm("a", "b")
    (fetch,) = _ask(ledger, ONE, "x")
    _ask(ledger, ONE, "y")
    assert isinstance(fetch, Fetch)
    (again,) = ledger.fetch_failed(fetch.node, ONE, UNAVAILABLE, 1.0)
    assert isinstance(again, Fetch)
    assert again.node != fetch.node
    ledger.withdraw(next(iter(ledger.waiters())).ticket, 2.0)
    lost = ledger.lose(f"c{'ab'.index(again.node)}", "gone", 3.0)
    assert [one.error for one in lost if isinstance(one, Fail)] == [UNAVAILABLE], "for `y`"
