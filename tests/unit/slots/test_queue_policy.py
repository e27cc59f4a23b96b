"""First come, first served."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agentenv.slots.queue_policy import Ask, FirstCome, QueuePolicy


def line(*asks: Ask) -> FirstCome:
    made = FirstCome()
    for ask in asks:
        made.push(ask)
    return made


def test_it_is_a_line() -> None:
    made: QueuePolicy = FirstCome()
    assert (made.pick(10), len(made), list(made), made.slots_wanted, made.position(1)) == (None, 0, [], 0, 0)


def test_asks_are_served_in_order_of_arrival_whoever_asks() -> None:
    made = line(*(Ask(ticket, run=f"r{ticket % 2}") for ticket in (1, 2, 3)))
    made.took("r1", "train", 100)
    assert [made.position(ticket) for ticket in (1, 2, 3, 4)] == [1, 2, 3, 0]
    assert [made.pick(1) for _ in range(4)] == [Ask(1, run="r1"), Ask(2, run="r0"), Ask(3, run="r1"), None]


def test_a_group_gathers_and_nobody_overtakes_it() -> None:
    made = line(Ask(1, slots=3), Ask(2))
    assert made.pick(2) is None
    assert made.slots_wanted == 4
    assert made.pick(3) == Ask(1, slots=3)
    assert made.slots_wanted == 1


def test_one_that_is_put_back_has_its_old_place() -> None:
    made = line(Ask(1), Ask(2))
    first = made.pick(1)
    assert first is not None
    made.gave("", "train")
    made.push(first)
    assert list(made) == [1, 2]
    assert made.position(1) == 1


def test_a_copy_is_another_line() -> None:
    made = line(Ask(1), Ask(2, slots=2))
    copied = made.copy()
    assert copied.pick(1) == Ask(1)
    copied.withdraw(2)
    assert (list(made), made.slots_wanted) == ([1, 2], 3)
    assert (list(copied), copied.slots_wanted) == ([], 0)


@given(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 4)), max_size=60))
def test_it_agrees_with_a_sorted_list(moves: list[tuple[int, int]]) -> None:
    """An event for a ticket in the line withdraws it, another adds it; every third is followed by a pick."""
    made, waiting = FirstCome(), dict[int, Ask]()
    for number, (ticket, slots) in enumerate(moves):
        if waiting.pop(ticket, None) is not None:
            made.withdraw(ticket)
        else:
            waiting[ticket] = Ask(ticket, slots)
            made.push(waiting[ticket])
        made.withdraw(100)
        if number % 3 == 0:
            first = min(waiting, default=None)
            fits = first is not None and waiting[first].slots <= 2
            assert made.pick(2) == (waiting.pop(first) if fits and first is not None else None)
        assert list(made) == sorted(waiting)
        assert len(made) == len(waiting)
        assert made.slots_wanted == sum(ask.slots for ask in waiting.values())
        assert [made.position(one) for one in sorted(waiting)] == list(range(1, len(waiting) + 1))
        assert list(made.asks()) == [waiting[one] for one in sorted(waiting)]
