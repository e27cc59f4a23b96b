"""Whose turn it is in a farm that several runs share."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.slots.queue_policy import Ask, QueuePolicy
from agentenv.slots.sharing import FairShare, RunView, Share, fair_shares
from agentenv.wire.leases import RunKind

KINDS: tuple[RunKind, ...] = ("train", "eval", "interactive")
PLENTY = 10_000


class Farm:
    """A line with asks numbered as they come."""

    def __init__(self, default: Share | None = None, **shares: Share) -> None:
        self.line = FairShare(default, shares)
        self._tickets = count(1)

    def ask(self, run: str, slots: int = 1, kind: RunKind = "train", times: int = 1) -> list[int]:
        tickets = [next(self._tickets) for _ in range(times)]
        for ticket in tickets:
            self.line.push(Ask(ticket, slots, run, kind))
        return tickets

    def served(self, times: int, free: int = PLENTY) -> list[str]:
        """The runs of the next picks."""
        asks = [self.line.pick(free) for _ in range(times)]
        return [ask.run for ask in asks if ask is not None]


def test_it_is_a_line() -> None:
    made: QueuePolicy = FairShare()
    assert (made.pick(10), len(made), list(made), made.slots_wanted, made.position(1)) == (None, 0, [], 0, 0)


# -- the order --------------------------------------------------------------------------------


def test_runs_of_equal_weight_take_turns_whoever_asked_first() -> None:
    farm = Farm()
    farm.ask("a", times=4)
    farm.ask("b", times=4)
    assert farm.served(8) == ["a", "b"] * 4


def test_slots_go_by_weight() -> None:
    farm = Farm(c=Share(weight=2.0))
    for run in ("a", "b", "c"):
        farm.ask(run, times=100)
    assert Counter(farm.served(80)) == {"a": 20, "b": 20, "c": 40}


def test_slots_that_a_run_had_already_count() -> None:
    """As after a restart: what counts is who holds how much now."""
    farm = Farm()
    farm.line.took("a", "train", 3)
    farm.ask("a", times=2)
    farm.ask("b", times=5)
    assert farm.served(5) == ["b", "b", "b", "a", "b"]
    assert farm.line.held("a") == 4


def test_a_slot_returned_makes_its_run_next() -> None:
    farm = Farm()
    farm.ask("a", times=5)
    farm.ask("b", times=5)
    farm.served(4)
    farm.line.gave("b", "train")
    assert farm.served(1) == ["b"]


def test_below_its_guarantee_a_run_comes_first() -> None:
    farm = Farm(small=Share(weight=0.1, guaranteed=3))
    farm.ask("big", times=5)
    farm.ask("small", times=5)
    assert farm.served(4) == ["small", "small", "small", "big"]


def test_a_group_that_goes_beyond_the_guarantee_has_no_precedence() -> None:
    farm = Farm(a=Share(guaranteed=3))
    farm.line.took("a", "train", 2)
    farm.ask("a", slots=2)
    farm.ask("b")
    assert farm.served(1) == ["b"]


def test_what_is_guaranteed_and_not_used_is_lent() -> None:
    farm = Farm(a=Share(guaranteed=5))
    farm.ask("b", times=5)
    assert farm.served(5) == ["b"] * 5


def test_among_equals_the_one_served_longest_ago_comes_first() -> None:
    farm = Farm()
    for run in ("a", "b", "c"):
        farm.ask(run, times=2)
    farm.served(3)
    for run in ("c", "a", "b"):
        farm.line.gave(run, "train")
    assert farm.served(3) == ["a", "b", "c"]


def test_a_run_that_comes_and_goes_does_not_overtake_one_that_waits() -> None:
    """Its history is forgotten with it; that must not be to its advantage."""
    farm = Farm()
    farm.ask("patient", times=2)
    farm.ask("hasty")
    assert farm.served(2) == ["patient", "hasty"]
    farm.line.gave("patient", "train")
    farm.line.gave("hasty", "train")
    assert set(farm.line.runs()) == {"patient"}
    farm.ask("hasty")
    assert farm.served(1) == ["patient"]


def test_kinds_share_their_run_by_weight() -> None:
    farm = Farm()
    for kind in KINDS:
        farm.ask("a", kind=kind, times=100)
    for _ in range(50):
        farm.line.pick(1)
    assert farm.line.runs()["a"].held == {"train": 30, "eval": 10, "interactive": 10}


def test_weights_of_kinds_can_be_set() -> None:
    farm = Farm()
    farm.line.set_shares(Share(), {}, {"train": 1.0, "eval": 1.0, "interactive": 2.0})
    farm.line.set_shares(Share(), {})
    for kind in KINDS:
        farm.ask("a", kind=kind, times=100)
    for _ in range(40):
        farm.line.pick(1)
    assert farm.line.runs()["a"].held == {"train": 10, "eval": 10, "interactive": 20}


def test_weights_of_kinds_can_be_set_while_asks_wait() -> None:
    farm = Farm()
    for kind in KINDS:
        farm.ask("a", kind=kind, times=100)
    farm.line.set_shares(Share(), {}, {"train": 1.0, "eval": 3.0, "interactive": 1.0})
    for _ in range(50):
        farm.line.pick(1)
    assert farm.line.runs()["a"].held == {"train": 10, "eval": 30, "interactive": 10}


def test_among_equal_kinds_the_one_served_longest_ago_comes_first() -> None:
    farm = Farm()
    older = farm.ask("a", kind="eval", times=3)
    younger = farm.ask("a", kind="interactive", times=2)
    for expected in (older[0], younger[0], older[1], younger[1], older[2]):
        assert next(iter(farm.line.upcoming())) == expected
        ask = farm.line.pick(1)
        assert ask is not None
        assert ask.ticket == expected
        farm.line.gave("a", ask.kind)


def test_kinds_do_not_change_what_a_run_gets() -> None:
    farm = Farm()
    farm.ask("a", times=20)
    for kind in KINDS:
        farm.ask("b", kind=kind, times=20)
    assert Counter(farm.served(30)) == {"a": 15, "b": 15}


def test_a_kind_is_served_in_order_of_arrival() -> None:
    farm = Farm()
    tickets = farm.ask("a", times=5)
    picked = [farm.line.pick(1) for _ in range(2)]
    for ask in picked:
        assert ask is not None
        farm.line.gave("a", "train")
        farm.line.push(ask)  # the container refused it
    assert [ask and ask.ticket for ask in (farm.line.pick(1) for _ in range(5))] == tickets


# -- groups -----------------------------------------------------------------------------------


def test_the_group_in_turn_gathers_and_nobody_overtakes_it() -> None:
    farm = Farm()
    farm.line.took("b", "train")
    farm.ask("a", slots=8)
    farm.ask("b")
    for free in range(8):
        assert farm.line.pick(free) is None
    assert farm.served(2, free=8) == ["a", "b"]
    assert farm.line.held("a") == 8


def test_one_that_holds_less_is_before_a_group_that_gathers() -> None:
    farm = Farm()
    farm.line.took("a", "train")
    farm.ask("a", slots=8)
    assert farm.line.pick(4) is None
    farm.ask("b")
    assert farm.served(2, free=4) == ["b"]


@given(
    others=st.lists(st.tuples(st.integers(1, 8), st.sampled_from([0.5, 1.0, 4.0])), min_size=1, max_size=6),
    size=st.integers(1, 8),
    chance=st.randoms(use_true_random=False),
)
def test_a_run_that_holds_nothing_waits_for_one_ask_of_each_other(
    others: list[tuple[int, float]], size: int, chance: random.Random
) -> None:
    """Whatever they do: they ask again at once, come and go, return whatever slots, in groups of any size."""
    farm = Farm(**{f"r{number}": Share(weight) for number, (_, weight) in enumerate(others)})
    held: list[tuple[str, int]] = []
    free = total = 8
    late = None
    before: Counter[str] = Counter()
    for step in range(200):
        for number, (slots, _) in enumerate(others):
            if len(farm.line) < 20:
                farm.ask(f"r{number}", slots=slots)
        if step == 20:
            (late,) = farm.ask("late", slots=size)
        while (ask := farm.line.pick(free)) is not None:
            if ask.ticket == late:
                assert all(asks == 1 for asks in before.values())
                return
            free -= ask.slots
            held.append((ask.run, ask.slots))
            if late is not None:
                before[ask.run] += 1
        run, slots = held.pop(chance.randrange(len(held)))
        free += slots
        farm.line.gave(run, "train", slots)
        assert free <= total
    pytest.fail("it was never served")


# -- caps and pauses --------------------------------------------------------------------------


def test_no_more_than_its_cap() -> None:
    farm = Farm(a=Share(cap=3))
    farm.ask("a", times=5)
    farm.ask("b", times=9)
    assert Counter(farm.served(20)) == {"a": 3, "b": 9}
    assert farm.line.pick(PLENTY) is None
    farm.line.gave("a", "train")
    assert farm.served(2) == ["a"]


def test_a_group_waits_below_the_cap_and_its_run_with_it() -> None:
    """Else a stream of single asks could keep the run's own groups waiting for ever."""
    farm = Farm(a=Share(cap=4))
    farm.line.took("a", "train", 3)
    (group,) = farm.ask("a", slots=2)
    (single,) = farm.ask("a")
    assert farm.line.pick(PLENTY) is None
    assert farm.line.why(group) == farm.line.why(single) == "cap"
    farm.line.gave("a", "train")
    assert farm.served(1) == ["a"]
    assert farm.line.why(single) == "cap"


def test_paused_runs_keep_what_they_hold_and_get_nothing() -> None:
    farm = Farm()
    (ticket,) = farm.ask("a")
    farm.line.took("a", "train", 2)
    farm.line.set_shares(Share(), {"a": Share(guaranteed=9, paused=True)})
    assert farm.line.pick(PLENTY) is None
    assert (farm.line.why(ticket), farm.line.held("a"), farm.line.slots_wanted) == ("paused", 2, 0)
    farm.line.set_shares(Share(), {})
    assert farm.line.why(ticket) == "queue"
    assert farm.served(1) == ["a"]
    assert farm.line.why(ticket) is None


def test_the_default_share_is_of_runs_that_have_none() -> None:
    farm = Farm(Share(cap=1), a=Share(cap=2))
    farm.ask("a", times=5)
    farm.ask("b", times=5)
    assert Counter(farm.served(10)) == {"a": 2, "b": 1}
    farm.line.set_shares(Share(cap=3), {})
    assert Counter(farm.served(10)) == {"a": 1, "b": 2}


def test_asks_that_can_never_be_served_are_named() -> None:
    farm = Farm(a=Share(cap=4), off=Share(cap=0))
    fits, large = farm.ask("a", slots=4) + farm.ask("a", slots=5)
    (giant,) = farm.ask("b", slots=11)
    farm.ask("off", slots=2)
    assert farm.line.too_large(10) == [large, giant]
    assert farm.line.too_large(3) == [fits, large, giant]
    farm.line.withdraw(large)
    farm.line.withdraw(giant)
    assert farm.line.too_large(10) == []
    assert fits in farm.line


@pytest.mark.parametrize(
    "bad", [{"weight": 0}, {"weight": -1}, {"weight": float("nan")}, {"guaranteed": -1}, {"cap": -1}]
)
def test_shares_are_checked(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must"):
        Share(**bad)  # type: ignore[arg-type]


def test_every_kind_has_a_positive_weight() -> None:
    for bad in ({"train": 1.0}, {"train": 1.0, "eval": 0.0, "interactive": 1.0}):
        with pytest.raises(ValueError, match="positive weight"):
            FairShare().set_shares(Share(), {}, bad)  # type: ignore[arg-type]


# -- accounts ---------------------------------------------------------------------------------


def test_slots_wanted_are_those_that_could_be_granted() -> None:
    farm = Farm(a=Share(cap=10), b=Share(paused=True), c=Share(cap=3))
    farm.ask("a", slots=4, times=5)
    farm.ask("b", times=5)
    farm.ask("c", slots=4)
    farm.ask("d", slots=2, times=2)
    assert farm.line.slots_wanted == 8 + 4
    farm.line.took("a", "train", 2)
    assert farm.line.slots_wanted == 8 + 4
    farm.line.took("a", "train", 5)
    assert farm.line.slots_wanted == 4
    assert len(farm.line) == 13


def test_returning_more_than_is_held_is_an_error() -> None:
    farm = Farm()
    farm.line.took("a", "eval", 2)
    farm.line.took("a", "train")
    for run, kind, slots in (("a", "eval", 3), ("a", "train", 2), ("a", "interactive", 1), ("b", "train", 1)):
        with pytest.raises(ValueError, match="it holds"):
            farm.line.gave(run, kind, slots)  # type: ignore[arg-type]
    assert farm.line.held("a") == 3


def test_runs_that_hold_and_want_nothing_are_forgotten() -> None:
    farm = Farm()
    for number in range(100):
        (ticket,) = farm.ask(f"r{number}")
        if number % 2:
            farm.line.withdraw(ticket)
        else:
            farm.served(1)
            farm.line.gave(f"r{number}", "train")
    assert farm.line.runs() == {}


def test_a_run_is_shown_as_it_is() -> None:
    share = Share(weight=2.0)
    farm = Farm(a=share)
    farm.line.took("a", "eval", 2)
    first, *_ = farm.ask("a", slots=3, times=2)
    farm.ask("a", kind="eval")
    assert farm.line.runs() == {"a": RunView(share, {"eval": 2}, 3, 7, first)}
    assert farm.line.runs()["a"].slots_held == 2


def test_a_place_in_the_line_is_among_the_same_run_and_kind() -> None:
    farm = Farm()
    farm.ask("b", times=3)
    tickets = farm.ask("a", times=3)
    (other,) = farm.ask("a", kind="eval")
    assert [farm.line.position(ticket) for ticket in (*tickets, other, 99)] == [1, 2, 3, 1, 0]
    assert list(farm.line) == [1, 2, 3, *tickets, other]


def test_slots_ahead_are_those_of_who_is_served_before() -> None:
    farm = Farm(capped=Share(cap=1))
    groups = farm.ask("a", slots=4, times=3)
    singles = farm.ask("b", times=6)
    (never,) = farm.ask("capped", slots=2)
    assert [farm.line.slots_ahead(ticket) for ticket in groups] == [0, 8, 14]
    assert [farm.line.slots_ahead(ticket) for ticket in singles] == [4, 5, 6, 7, 12, 13]
    assert farm.line.slots_ahead(groups[-1], limit=14) == 14
    assert farm.line.slots_ahead(groups[-1], limit=13) is None
    assert farm.line.slots_ahead(never) is None
    assert len(farm.line) == 10


# -- shares -----------------------------------------------------------------------------------


def view(share: Share, held: int, waiting: int) -> RunView:
    return RunView(share, {"train": held}, waiting, waiting, 1 if waiting else None)


def test_fair_shares_leave_what_one_does_not_want_to_the_others() -> None:
    runs = {
        "modest": view(Share(), 5, 5),
        "single": view(Share(), 0, 500),
        "double": view(Share(weight=2.0), 500, 500),
        "capped": view(Share(weight=8.0, cap=20), 0, 500),
        "paused": view(Share(weight=8.0, paused=True), 10, 500),
        "guaranteed": view(Share(weight=0.01, guaranteed=60), 0, 500),
    }
    expected = {"modest": 10, "single": 100, "double": 200, "capped": 20, "paused": 10, "guaranteed": 60}
    assert fair_shares(runs, 400) == pytest.approx(expected)


def test_fair_shares_are_what_runs_wait_for_if_there_is_enough() -> None:
    assert fair_shares({"a": view(Share(), 1, 4), "b": view(Share(weight=3.0), 0, 0)}, 100) == {"a": 5, "b": 0}
    assert fair_shares({}, 100) == {}


def test_guarantees_that_exceed_the_farm_are_divided_by_weight() -> None:
    runs = {"a": view(Share(guaranteed=60), 0, 99), "b": view(Share(weight=2.0, guaranteed=60), 0, 99)}
    assert fair_shares(runs, 60) == pytest.approx({"a": 20, "b": 40})


def test_slot_seconds_follow_the_weights() -> None:
    """Four runs that always want more, of stays and groups that differ, on 240 slots."""
    weights = {"a": 1.0, "b": 1.0, "c": 2.0, "d": 4.0}
    stays_s = {"a": 20.0, "b": 60.0, "c": 20.0, "d": 40.0}
    sizes = {"a": 1, "b": 8, "c": 4, "d": 1}
    farm = Farm(**{run: Share(weight) for run, weight in weights.items()})
    chance = random.Random(0)
    slot_s: Counter[str] = Counter()
    free, ends = 240, list[tuple[float, str]]()
    for run, size in sizes.items():
        farm.ask(run, slots=size, times=300)
    now = 0.0
    while now < 600.0:
        while (ask := farm.line.pick(free)) is not None:
            free -= ask.slots
            farm.ask(ask.run, slots=ask.slots)
            for _ in range(ask.slots):
                heapq.heappush(ends, (now + chance.expovariate(1 / stays_s[ask.run]), ask.run))
        before, (now, run) = now, heapq.heappop(ends)
        free += 1
        farm.line.gave(run, "train")
        if before > 120.0:
            for name in weights:
                slot_s[name] += (now - before) * farm.line.held(name)  # type: ignore[assignment]
    for run, weight in weights.items():
        assert slot_s[run] / slot_s.total() == pytest.approx(weight / 8.0, rel=0.1), run


# -- reclaiming -------------------------------------------------------------------------------


def test_only_guarantees_are_reclaimed() -> None:
    farm = Farm()
    farm.line.took("a", "train", 100)
    farm.ask("b", times=10)
    assert farm.line.to_reclaim(0) == []


def test_slots_are_reclaimed_from_the_run_most_above_its_guarantee_for_its_weight() -> None:
    farm = Farm(a=Share(guaranteed=2), b=Share(guaranteed=4), c=Share(weight=4.0))
    farm.line.took("b", "train", 9)
    farm.line.took("c", "train", 16)
    farm.line.took("c", "eval", 1)
    farm.line.took("c", "interactive", 1)
    farm.ask("a", times=9)
    assert farm.line.to_reclaim(0) == [("b", "train"), ("c", "eval")]
    assert farm.line.to_reclaim(1) == [("b", "train")]
    assert farm.line.to_reclaim(2) == []


def test_of_a_run_eval_goes_first_and_a_persons_session_last() -> None:
    farm = Farm(a=Share(guaranteed=9))
    for kind in KINDS:
        farm.line.took("b", kind)
    farm.ask("a", times=9)
    assert farm.line.to_reclaim(0) == [("b", "eval"), ("b", "train"), ("b", "interactive")]


def test_nobody_falls_below_a_guarantee() -> None:
    farm = Farm(a=Share(guaranteed=9), b=Share(guaranteed=3))
    farm.line.took("b", "train", 4)
    farm.ask("a", times=9)
    assert farm.line.to_reclaim(0) == [("b", "train")]


def test_slots_are_reclaimed_only_for_asks_that_have_waited() -> None:
    farm = Farm(a=Share(guaranteed=9))
    farm.line.took("b", "train", 20)
    old = farm.ask("a", slots=2, times=2)
    farm.ask("a", times=9)
    assert len(farm.line.to_reclaim(0)) == 9
    assert len(farm.line.to_reclaim(0, until=old[-1])) == 4
    assert len(farm.line.to_reclaim(1, until=old[0])) == 1
    assert farm.line.to_reclaim(0, until=0) == []


def test_nothing_is_reclaimed_for_a_group_beyond_the_guarantee() -> None:
    farm = Farm(a=Share(guaranteed=5))
    farm.line.took("b", "train", 20)
    farm.ask("a")
    farm.ask("a", slots=8)
    assert farm.line.to_reclaim(0) == [("b", "train")]


def test_reclaiming_comes_to_rest() -> None:
    """Both always want more: each gets its guarantee, and then nobody loses anything any more."""
    farm = Farm(a=Share(guaranteed=6), b=Share(guaranteed=8), c=Share())
    farm.line.took("c", "train", 20)
    for run in ("a", "b", "c"):
        farm.ask(run, times=50)
    free, rounds = 0, 0
    while found := farm.line.to_reclaim(free):
        rounds += 1
        for run, kind in found:
            farm.line.gave(run, kind)
            free += 1
        while (ask := farm.line.pick(free)) is not None:
            free -= ask.slots
    assert rounds == 1
    assert (farm.line.held("a"), farm.line.held("b"), farm.line.held("c")) == (6, 8, 6)


# -- teams ------------------------------------------------------------------------------------


def test_slots_are_divided_among_teams_and_then_among_their_runs() -> None:
    farm = Farm()
    many = [f"vision/{number}" for number in range(9)]
    for run in (*many, "text/only", "alone"):
        farm.ask(run, times=100)
    served = Counter(farm.served(270))
    assert (served["text/only"], served["alone"]) == (90, 90)
    assert {served[run] for run in many} == {10}


def test_teams_and_their_runs_have_weights() -> None:
    farm = Farm(**{"vision/a": Share(weight=3.0)})
    farm.line.set_shares(Share(), {"vision/a": Share(weight=3.0)}, teams={"vision": 2.0})
    for run in ("vision/a", "vision/b", "text/c"):
        farm.ask(run, times=100)
    assert Counter(farm.served(120)) == {"vision/a": 60, "vision/b": 20, "text/c": 40}
    assert farm.line.fair_shares(60) == pytest.approx({"vision/a": 30, "vision/b": 10, "text/c": 20})
    with pytest.raises(ValueError, match="team"):
        farm.line.set_shares(Share(), {}, teams={"vision": 0.0})


def test_what_is_upcoming_is_what_is_served() -> None:
    """With teams, where a pick moves the places of other runs too."""
    farm = Farm(**{"v/a": Share(guaranteed=3), "v/b": Share(weight=2.0), "t/c": Share(weight=0.5)})
    draw = random.Random(7)
    for _ in range(60):
        farm.ask(draw.choice(["v/a", "v/b", "t/c", "d"]), slots=draw.choice([1, 1, 3]))
    upcoming = list(farm.line.upcoming())
    assert upcoming == [ask.ticket for ask in iter(lambda: farm.line.pick(PLENTY), None)]


# -- what costs others and is charged ---------------------------------------------------------


def test_a_group_withdrawn_while_it_gathers_is_charged() -> None:
    """Nobody else was served meanwhile: until others have had as many slots, it is not in turn again."""
    farm = Farm(tiny=Share(weight=0.001), big=Share(weight=1000.0))
    farm.line.took("big", "train", 20)
    farm.ask("big", times=500)
    rounds, served = 0, 0
    for _ in range(10):
        (group,) = farm.ask("tiny", slots=20)
        while (ask := farm.line.pick(19)) is not None:
            served += ask.slots
            farm.line.gave("big", "train")
        rounds += 1
        farm.line.withdraw(group)
    assert served >= 19 * (rounds - 1)


def test_a_single_ask_and_one_that_steps_aside_may_leave_the_line_for_nothing() -> None:
    farm = Farm()
    farm.line.took("b", "train")
    (single,) = farm.ask("a")
    farm.line.withdraw(single)
    (group,) = farm.ask("a", slots=5)
    farm.line.withdraw(group, aside=True)
    farm.ask("a", slots=5)
    farm.ask("b")
    assert farm.served(1) == ["a"]


def test_a_run_that_owes_and_has_left_comes_back_with_its_new_weight() -> None:
    farm = Farm()
    [group] = farm.ask("a", 3)
    farm.line.withdraw(group)
    farm.line.set_shares(Share(), {"a": Share(weight=100)})
    farm.line.took("b", "train")
    farm.ask("b")
    farm.ask("a")
    assert farm.served(1) == ["a"], "two slots owed weigh 2/100 then, and one that is held 1"


def test_what_a_withdrawn_group_owes_is_forgotten_when_others_had_it() -> None:
    farm = Farm()
    (group,) = farm.ask("a", slots=4)
    farm.line.withdraw(group)
    farm.ask("b", times=3)
    farm.served(3)
    assert set(farm.line.runs()) == {"b"}
    assert repr(farm.line) == "<FairShare 0 waiting, 1 runs>"


def test_slots_in_reset_are_charged_to_the_run_that_had_them() -> None:
    """A run that leases and releases at once holds nothing, and uses the farm as much as any other."""
    farm = Farm()
    farm.ask("churns", times=50)
    farm.ask("works", times=50)
    farm.line.took("works", "train", 3)
    for _ in range(3):
        assert farm.served(1) == ["churns"]
        farm.line.gave("churns", "train")
        farm.line.resetting("churns", 1)
    assert sorted(farm.served(2)) == ["churns", "works"]
    assert "churns" in farm.line.runs()
    farm.line.resetting("churns", -3)
    assert farm.served(1) == ["churns"]
