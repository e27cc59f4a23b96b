"""Counting in buckets."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agentenv.slots.histogram import WAIT_BOUNDS_S, Buckets, Histogram


def test_an_empty_one_has_every_bucket() -> None:
    for empty in (Buckets(), Histogram().now()):
        assert [count for _, count in empty.cumulative()] == [0] * (len(WAIT_BOUNDS_S) + 1)
        assert (empty.count, empty.total) == (0, 0.0)


def test_a_bound_belongs_to_its_bucket() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (1.0, 1.5, 2.0, 9.0):
        histogram.add(value)
    assert histogram.now().cumulative() == [("1", 1), ("2", 3), ("+Inf", 4)]
    assert histogram.now().total == 13.5


@given(st.lists(st.floats(0, 1000)))
def test_each_bucket_counts_what_is_at_most_its_bound(values: list[float]) -> None:
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    for bound, count in histogram.now().cumulative():
        assert count == sum(value <= float(bound) for value in values)
