"""The batcher's promises, on random sequences of events under a manual clock."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentenv.executor.batcher import Batcher

WINDOW_S = 0.02


def make(max_calls: int = 200, max_bytes: int = 10**9) -> Batcher[str]:
    return Batcher(window_s=WINDOW_S, max_calls=max_calls, max_bytes=max_bytes)


def test_a_lone_call_leaves_at_once() -> None:
    batcher = make()
    batcher.add("a", 10, now=5.0)
    due = batcher.due(5.0)
    assert [(batch.number, batch.calls) for batch in due.batches] == [(1, ("a",))]
    assert due.wake_at is None


def test_the_next_waits_for_the_acknowledgement_and_then_leaves_together() -> None:
    batcher = make()
    batcher.add("a", 10, now=0.0)
    batcher.due(0.0)
    batcher.add("b", 10, now=0.001)
    batcher.add("c", 10, now=0.002)
    assert batcher.due(0.002).batches == ()
    assert batcher.due(0.002).wake_at == 0.001 + WINDOW_S
    assert batcher.accepted(1)
    assert [batch.calls for batch in batcher.due(0.003).batches] == [("b", "c")]


def test_without_acknowledgement_the_window_is_the_longest_wait() -> None:
    batcher = make()
    batcher.add("a", 10, now=0.0)
    batcher.due(0.0)
    batcher.add("b", 10, now=0.001)
    wake_at = batcher.due(0.001).wake_at
    assert wake_at is not None
    assert [batch.calls for batch in batcher.due(wake_at).batches] == [("b",)]


def test_a_full_batch_leaves_although_the_last_is_unacknowledged() -> None:
    batcher = make(max_calls=3)
    batcher.add("a", 10, now=0.0)
    batcher.due(0.0)
    for name in "bcde":
        batcher.add(name, 10, now=0.001)
    assert [batch.calls for batch in batcher.due(0.001).batches] == [("b", "c", "d")]
    assert batcher.waiting == 1


def test_bytes_bound_a_batch_and_a_giant_goes_alone() -> None:
    batcher = make(max_bytes=100)
    for name, size in (("a", 60), ("b", 60), ("giant", 500), ("c", 1)):
        batcher.add(name, size, now=0.0)
    sent = [batch.calls for batch in batcher.due(WINDOW_S).batches]
    assert sent == [("a",), ("b",), ("giant",), ("c",)]


def test_unknown_and_repeated_acknowledgements_are_told_apart() -> None:
    batcher = make()
    batcher.add("a", 1, now=0.0)
    batcher.due(0.0)
    assert not batcher.accepted(7)
    assert batcher.accepted(1)
    assert not batcher.accepted(1)


def test_a_refused_batch_gives_its_calls_back_and_holds_nothing_up() -> None:
    batcher = make()
    batcher.add("a", 1, now=0.0)
    batcher.due(0.0)
    assert batcher.refused(1) == ("a",)
    assert batcher.refused(1) == ()
    batcher.add("b", 1, now=0.0)
    assert [batch.calls for batch in batcher.due(0.0).batches] == [("b",)]


def test_repr_shows_the_state() -> None:
    batcher = make()
    batcher.add("a", 1, now=0.0)
    batcher.due(0.0)
    batcher.add("b", 1, now=0.0)
    assert repr(batcher) == "<Batcher 1 waiting, 1 batches unacknowledged>"


@dataclass
class World:
    """A batcher driven as the client drives it: due() after every event and at every wake-up."""

    batcher: Batcher[str]
    max_calls: int
    now: float = 0.0
    wake_at: float | None = None
    added: dict[str, float] = field(default_factory=dict)
    dropped: set[str] = field(default_factory=set)
    sent: list[tuple[float, int, tuple[str, ...]]] = field(default_factory=list)
    unacknowledged: list[int] = field(default_factory=list)

    def pump(self) -> None:
        idle = not self.unacknowledged
        due = self.batcher.due(self.now)
        for batch in due.batches:
            self.sent.append((self.now, batch.number, batch.calls))
            self.unacknowledged.append(batch.number)
        self.wake_at = due.wake_at
        assert not (idle and self.batcher.waiting and not due.batches), "calls wait although nothing is in flight"

    def advance(self, by_s: float) -> None:
        until = self.now + by_s
        while self.wake_at is not None and self.wake_at <= until:
            assert self.wake_at > self.now or self.batcher.waiting == 0, "a wake-up that leads nowhere"
            self.now = self.wake_at
            self.pump()
        self.now = until

    def left_at(self) -> dict[str, float]:
        times: dict[str, float] = {}
        for at, _, calls in self.sent:
            for call in calls:
                assert call not in times, f"{call} left twice"
                times[call] = at
        return times


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 120)),
        st.tuples(st.just("advance"), st.floats(0, 0.05)),
        st.tuples(st.just("accept"), st.integers(0, 5)),
        st.tuples(st.just("drop"), st.integers(0, 300)),
    ),
    max_size=120,
)


@settings(max_examples=300, deadline=None)
@given(EVENTS, st.integers(1, 8), st.integers(50, 400))
def test_no_call_waits_too_long_is_lost_doubled_or_overtaken(
    events: list[tuple[str, float]], max_calls: int, max_bytes: int
) -> None:
    world = World(make(max_calls, max_bytes), max_calls)
    sizes: dict[str, int] = {}
    for kind, amount in events:
        if kind == "add":
            name = f"call{len(world.added)}"
            world.added[name] = world.now
            sizes[name] = int(amount)
            world.batcher.add(name, int(amount), world.now)
        elif kind == "advance":
            world.advance(amount)
        elif kind == "accept" and world.unacknowledged:
            number = world.unacknowledged.pop(int(amount) % len(world.unacknowledged))
            assert world.batcher.accepted(number)
        elif kind == "drop" and world.added:
            # The very object that was added: calls are told apart by identity.
            name = list(world.added)[int(amount) % len(world.added)]
            if world.batcher.drop(name):
                world.dropped.add(name)
        world.pump()
    world.advance(1.0)

    left_at = world.left_at()
    assert left_at.keys() == world.added.keys() - world.dropped, "exactly the calls not taken back left"
    for name, at in left_at.items():
        assert at - world.added[name] <= WINDOW_S + 1e-9
    order = [name for _, _, calls in world.sent for name in calls]
    assert order == [name for name in world.added if name in left_at], "first come, first sent"
    for _, _, calls in world.sent:
        assert len(calls) <= max_calls
        assert len(calls) == 1 or sum(sizes[name] for name in calls) <= max_bytes
    assert [number for _, number, _ in world.sent] == list(range(1, len(world.sent) + 1))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0, 0.03), min_size=1, max_size=60))
def test_results_play_no_part_so_slow_calls_delay_nobody(gaps: list[float]) -> None:
    """Each batch is acknowledged at once and never answered: every call leaves the moment it comes."""
    batcher = make()
    now = 0.0
    for number, gap in enumerate(gaps, start=1):
        now += gap
        batcher.add(f"call{number}", 1, now)
        assert [batch.number for batch in batcher.due(now).batches] == [number]
        assert batcher.accepted(number)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 20), st.integers(0, 20), st.integers(1, 7))
def test_a_new_connection_asks_for_exactly_what_it_is_given(sent: int, waiting: int, max_calls: int) -> None:
    batcher = make(max_calls)
    names = [f"call{index}" for index in range(sent + waiting)]
    for name in names[:sent]:
        batcher.add(name, 1, now=0.0)
        batcher.due(WINDOW_S)
    for name in names[sent:]:
        batcher.add(name, 1, now=1.0)
    batcher.restart([(name, 1) for name in names], now=2.0)
    assert batcher.oldest_unacknowledged_at is None
    again = [call for batch in batcher.due(2.0 + WINDOW_S).batches for call in batch.calls]
    assert again == names


@pytest.mark.parametrize("count", [1, 5])
def test_bytes_are_forgotten_with_dropped_calls(count: int) -> None:
    batcher = make(max_bytes=100)
    batcher.add("first", 1, now=0.0)
    batcher.due(0.0)
    for index in range(count):
        name = f"big{index}"
        batcher.add(name, 99, now=0.0)
        assert batcher.drop(name)
    batcher.add("small", 2, now=0.0)
    assert batcher.due(0.0).batches == (), "nothing is full, and a batch is unacknowledged"


def test_an_acknowledgement_is_expected_from_when_a_batch_was_written() -> None:
    batcher: Batcher[str] = Batcher(window_s=1, max_calls=10, max_bytes=1000)
    batcher.add("a", 1, 0.0)
    (batch,) = batcher.due(0.0).batches
    batcher.written(batch.number, 30.0)
    assert batcher.oldest_unacknowledged_at == 30.0
    assert batcher.accepted(batch.number)
    batcher.written(batch.number, 40.0)
    assert batcher.oldest_unacknowledged_at is None
