from __future__ import annotations

import itertools
import random
import statistics

import pytest

from agentenv.agent.estimates import Attempts, pass_at


@pytest.mark.parametrize(("attempts", "passed"), [(1, 0), (1, 1), (5, 2), (6, 0), (6, 6), (7, 3)])
def test_pass_at_k_is_the_share_of_choices_with_a_pass(attempts: int, passed: int) -> None:
    outcomes = [True] * passed + [False] * (attempts - passed)
    for k in range(1, attempts + 1):
        choices = list(itertools.combinations(outcomes, k))
        assert pass_at(k, attempts, passed) == pytest.approx(sum(map(any, choices)) / len(choices))


@pytest.mark.parametrize("k", [0, 3])
def test_pass_at_k_needs_k_attempts(k: int) -> None:
    with pytest.raises(ValueError, match=f"2 attempts say nothing about {k}"):
        pass_at(k, 2, 1)


def test_with_one_attempt_per_item_the_error_is_the_ordinary_one() -> None:
    scores = [0.0, 1.0, 0.25, 0.5, 1.0]
    attempts = Attempts()
    for number, score in enumerate(scores):
        attempts.add(f"item-{number}", [score])
    assert attempts.stderr() == pytest.approx(statistics.stdev(scores) / len(scores) ** 0.5)


def test_attempts_that_are_alike_are_no_further_evidence() -> None:
    once, often = Attempts(), Attempts()
    for number, score in enumerate([0.0, 1.0, 1.0, 0.0, 1.0]):
        once.add(f"item-{number}", [score])
        often.add(f"item-{number}", [score] * 10)
    assert often.stderr() == pytest.approx(once.stderr())
    assert often.most == 10


def test_the_error_is_that_of_repeated_evaluations() -> None:
    chance = random.Random(1)
    means, errors = [], []
    for _ in range(300):
        attempts, scores = Attempts(), []
        for item in range(40):
            ability = chance.random()
            mine = [float(chance.random() < ability) for _ in range(4)]
            attempts.add(f"item-{item}", mine)
            scores += mine
        means.append(statistics.fmean(scores))
        errors.append(attempts.stderr() or 0.0)
    assert statistics.fmean(errors) == pytest.approx(statistics.stdev(means), rel=0.15)


def test_items_with_too_few_scored_attempts_are_left_out_and_counted() -> None:
    attempts = Attempts()
    attempts.add("a", [1.0, 0.0, 0.0, 0.0])
    attempts.add("b", [1.0])
    attempts.add("c", [])
    assert attempts.pass_at(1) == pytest.approx(((0.25 + 1.0) / 2, 2))
    assert attempts.pass_at(2) == pytest.approx((0.5, 1))
    assert attempts.pass_at(5) is None
    assert attempts.items == 3


def test_one_item_has_no_error() -> None:
    attempts = Attempts()
    attempts.add("a", [1.0, 0.0])
    assert attempts.stderr() is None
