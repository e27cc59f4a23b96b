"""How fast a token may ask, on a clock of the test's own."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.api.farm_server.access import AskLimiter, wait_s
from agentenv.api.farm_server.settings import AskLimits


class Clock:
    def __init__(self, now_s: float = 1_000_000_000.0) -> None:
        self.now_s = now_s

    def time(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("limits.storage.memory.time", SimpleNamespace(time=clock.time))
    return clock


def test_a_burst_is_taken_and_the_next_is_told_when_to_come(clock: Clock) -> None:
    limiter = AskLimiter(AskLimits(asks_per_s=200, burst=2000))
    assert [limiter.hit("a", 250) for _ in range(8)] == [None] * 8
    wait = limiter.hit("a")
    assert wait is not None
    assert limiter.hit("b", 2000) is None  # another token has a window of its own
    clock.now_s += wait / 2
    assert limiter.hit("a") is not None
    clock.now_s += wait / 2 + 0.001
    assert limiter.hit("a") is None


def test_on_average_it_is_the_rate(clock: Clock) -> None:
    limiter = AskLimiter(AskLimits(asks_per_s=20, burst=100))
    taken = 0
    for _ in range(10_000):
        taken += limiter.hit("a") is None
        clock.now_s += 0.01
    assert 100 * 20 * 0.95 <= taken <= 100 * 20 + 100


@pytest.mark.parametrize(("per_s", "burst", "cost"), [(200, 50, 256), (0.5, 1, 10), (10, 15, 3)])
def test_whoever_waits_as_told_is_served(clock: Clock, per_s: float, burst: int, cost: int) -> None:
    limiter = AskLimiter(AskLimits(asks_per_s=per_s, burst=burst))
    served = 0
    for _ in range(100):
        wait = limiter.hit("a", cost)
        served += wait is None
        assert wait is None or 0 < wait <= 2 * max(1, burst / per_s)
        clock.now_s += 0.0 if wait is None else wait + 1e-4
    assert served >= 49


def test_other_limits_apply_at_once(clock: Clock) -> None:
    limiter = AskLimiter(AskLimits(asks_per_s=1, burst=1))
    assert limiter.hit("a") is None
    assert limiter.hit("a") is not None
    limiter.set_limits(AskLimits(asks_per_s=1, burst=1))
    assert limiter.hit("a") is not None
    limiter.set_limits(AskLimits(asks_per_s=10, burst=10))
    assert [limiter.hit("a") for _ in range(10)] == [None] * 10


def test_tokens_that_stay_away_are_forgotten(clock: Clock) -> None:
    limiter = AskLimiter(AskLimits(asks_per_s=10, burst=100))
    threads = threading.active_count()
    for number in range(1000):
        limiter.hit(f"token-{number}")
    assert len(limiter._storage.storage) == 1000
    assert threading.active_count() == threads
    clock.now_s += 100
    limiter._storage.drop_expired(0)
    assert (len(limiter._storage.storage), len(limiter._storage.expirations), len(limiter._storage.locks)) == (0, 0, 0)


@given(st.integers(0, 50), st.integers(0, 100), st.integers(0, 100), st.floats(0.01, 10))
def test_after_the_wait_there_is_room_and_not_before(room: int, before: int, now: int, ends_s: float) -> None:
    window_s = 10.0

    def counted(after_s: float) -> float:
        if after_s < ends_s:
            return before * (ends_s - after_s) / window_s + now
        return max(0.0, now * (1 - (after_s - ends_s) / window_s))

    wait = wait_s(room, window_s, before, now, ends_s=ends_s)
    assert counted(wait) <= room + 1e-6
    assert wait == 0 or counted(max(0.0, wait - 0.01)) >= room
