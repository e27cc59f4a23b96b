"""The estimators, against enumeration, simulation and published values."""

from __future__ import annotations

import itertools
import math
import random
import statistics

import pytest

from agentenv.runs.statistics import (
    MOST_RESAMPLED,
    Interval,
    bootstrap,
    estimate_pass_at_k,
    mean_and_standard_error,
    paired_difference,
    pass_at_k,
    wilson,
)


def test_one_attempt_each_is_the_usual_standard_error() -> None:
    scores = [0.0, 1.0, 1.0, 0.25, 0.5]
    mean, error = mean_and_standard_error([[score] for score in scores])
    assert mean == pytest.approx(statistics.mean(scores))
    assert error == pytest.approx(statistics.stdev(scores) / math.sqrt(5))


def test_equal_numbers_of_attempts_are_that_of_the_items_means() -> None:
    items = [[1.0, 0.0, 1.0], [0.0, 0.0, 0.0], [1.0, 1.0, 0.5], [0.5, 0.5, 0.5]]
    means = [statistics.mean(item) for item in items]
    mean, error = mean_and_standard_error(items)
    assert mean == pytest.approx(statistics.mean(means))
    assert error == pytest.approx(statistics.stdev(means) / 2)


def test_attempts_that_always_agree_add_nothing() -> None:
    once = [[0.0], [1.0], [1.0], [0.0], [1.0]]
    often = [item * 16 for item in once]
    assert mean_and_standard_error(often) == pytest.approx(mean_and_standard_error(once))


@pytest.mark.parametrize(
    ("items", "expected"), [([], (None, None)), ([[]], (None, None)), ([[0.5, 1.0]], (0.75, None))]
)
def test_too_few_items_have_no_error(items: list[list[float]], expected: tuple[float | None, float | None]) -> None:
    assert mean_and_standard_error(items) == expected


def test_pass_at_k_is_the_share_of_choices_with_a_success() -> None:
    items = [[1.0, 0.0, 0.0, 0.0], [0.0] * 4, [1.0, 1.0, 0.0, 0.5, 1.0], [1.0] * 4]
    for k in range(1, 5):
        shares = [
            statistics.mean(any(score >= 1 for score in chosen) for chosen in itertools.combinations(item, k))
            for item in items
        ]
        assert pass_at_k(items, k) == pytest.approx(statistics.mean(shares))


def test_items_with_fewer_attempts_than_k_are_left_out_and_counted() -> None:
    items = [[1.0, 0.0], [1.0], []]
    found = estimate_pass_at_k(items, 2)
    assert found is not None
    assert (found.value, found.items) == (1.0, 1)
    assert pass_at_k(items, 3) is None
    assert estimate_pass_at_k(items, 3) is None
    with pytest.raises(ValueError, match="at least 1"):
        pass_at_k(items, 0)


def test_a_success_is_what_the_caller_says() -> None:
    assert pass_at_k([[0.5], [0.4]], 1) == 0
    assert pass_at_k([[0.5], [0.4]], 1, success=0.5) == 0.5


def test_wilson_is_as_published() -> None:
    """Of R. Newcombe, "Two-sided confidence intervals for the single proportion", 1998, table I."""
    for successes, trials, low, high in ((81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611)):
        assert wilson(successes, trials) == pytest.approx((low, high), abs=5e-5)


def test_single_attempts_have_wilsons_interval() -> None:
    found = estimate_pass_at_k([[1.0]] * 15 + [[0.0]] * 133, 1)
    assert found is not None
    assert found.interval == wilson(15, 148)


def test_items_that_all_pass_have_an_interval_with_a_width() -> None:
    found = estimate_pass_at_k([[1.0, 1.0]] * 20, 1)
    assert found is not None
    assert (found.value, found.interval) == (1.0, wilson(20, 20))
    assert found.interval.low < 0.9


def test_the_bootstrap_is_the_same_every_time_and_covers_the_truth() -> None:
    draw = random.Random(7)
    covered = 0
    for _ in range(100):
        values = [draw.choice([0.0, 0.0, 0.5, 1.0]) for _ in range(40)]
        found = bootstrap(values)
        assert found == bootstrap(list(reversed(values)))
        assert found is not None
        covered += found.low <= 0.375 <= found.high
    assert covered >= 85


def test_many_items_have_nearly_the_interval_of_the_bootstrap() -> None:
    draw = random.Random(3)
    values = [draw.choice([0.0, 0.25, 1.0]) for _ in range(MOST_RESAMPLED + 1)]
    assert bootstrap(values) == pytest.approx(bootstrap(values[:-1]), abs=0.01)


def test_values_that_do_not_vary_have_no_interval() -> None:
    assert bootstrap([]) is None
    assert bootstrap([0.5]) is None
    assert bootstrap([0.5] * 10) is None


def test_items_are_paired_by_name() -> None:
    first = {"a": [0.0, 0.0], "b": [1.0], "c": [0.5], "d": [1.0], "e": []}
    second = {"a": [1.0, 0.0], "b": [0.0], "c": [0.5], "x": [1.0], "e": [1.0]}
    found = paired_difference(first, second)
    assert found is not None
    assert found.value == pytest.approx((0.5 - 1 + 0) / 3)
    assert (found.items, found.better, found.worse) == (3, ["a"], ["b"])
    assert isinstance(found.interval, Interval)
    assert found.interval.low <= found.value <= found.interval.high
    assert paired_difference({"a": [1.0]}, {"b": [1.0]}) is None


def test_pairing_is_sharper_than_two_errors() -> None:
    draw = random.Random(5)
    first = {str(n): [float(draw.random() < 0.5)] for n in range(200)}
    second = {item: [1.0] if int(item) % 10 == 0 else scores for item, scores in first.items()}
    found = paired_difference(first, second)
    assert found is not None
    assert found.interval is not None
    assert found.interval.low > 0
    assert found.worse == []
    (_, error) = mean_and_standard_error(first.values())
    assert error is not None
    assert found.interval.high - found.interval.low < 2 * 1.96 * error
