"""Estimates of how long an ask will wait."""

from __future__ import annotations

import pytest

from agentenv.slots.eta import FreedRate, eta_s


def test_the_rate_of_a_steady_farm_is_found_soon_and_kept() -> None:
    rate = FreedRate(now=1000.0, window_s=100.0)
    found = {}
    for second in range(1, 401):
        rate.freed(1000.0 + second, 3)
        found[second] = rate.per_s(1000.0 + second)
    assert [found[second] for second in (10, 100, 400)] == pytest.approx([3.0] * 3, rel=0.1)


def test_a_change_is_noticed_within_a_few_windows() -> None:
    rate = FreedRate(now=0.0, window_s=10.0)
    for second in range(1, 101):
        rate.freed(float(second), 10)
    for second in range(101, 141):
        rate.freed(float(second), 2)
    assert rate.per_s(140.0) == pytest.approx(2.0, rel=0.15)


def test_no_rate_of_a_farm_that_has_freed_nothing_lately() -> None:
    rate = FreedRate(now=0.0, window_s=10.0)
    assert rate.per_s(0.0) is None
    assert rate.per_s(5.0) is None
    rate.freed(5.0, 2)
    assert rate.per_s(5.0) is not None
    assert rate.per_s(50.0) is None


@pytest.mark.parametrize(
    ("missing", "freed_per_s", "growth", "start_s", "expected"),
    [
        (None, 1.0, 0, None, None),  # further than anybody looked, or held back by its cap
        (0, None, 0, None, 0.0),
        (-3, 1.0, 0, None, 0.0),
        (10, 2.0, 0, 30.0, 5.0),
        (10, None, 0, 30.0, None),
        (10, None, 10, 30.0, 30.0),
        (10, None, 9, 30.0, None),
        (10, None, 10, None, None),
        (10, 2.0, 100, 30.0, 5.0),  # leases end before the container has started
        (100, 2.0, 20, 30.0, 40.0),  # new containers bring a part of it
        (100, 2.0, 90, 30.0, 30.0),
    ],
)
def test_an_estimate(
    missing: int | None, freed_per_s: float | None, growth: int, start_s: float | None, expected: float | None
) -> None:
    assert eta_s(missing, freed_per_s, growth, start_s) == expected
