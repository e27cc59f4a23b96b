"""Estimates from the scores of a run, and from two runs' on the same items. Pure.

Attempts at one item are alike, so the independent observations are the items, not the rollouts: every standard error
is clustered by item and every bootstrap draws whole items (E. Miller, "Adding Error Bars to Evals", 2024,
arXiv:2411.00640). A rollout without a score is no observation: it is left out before anything here is called, and
counted by the caller.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from agentenv.agent.estimates import PASSED, Attempts, pass_at

RESAMPLES: Final = 1000
SEED: Final = 20240
"""Of the bootstrap: the same scores have the same interval every time."""
MOST_RESAMPLED: Final = 1000
"""Items above which an interval is the normal approximation, to which the bootstrap converges."""
Z_95: Final = 1.959964
"""Standard deviations of a normal distribution within which 95 % of it lie."""
SUCCESS: Final = PASSED
"""The score from which on an attempt is a success, unless a caller says otherwise."""


class Interval(NamedTuple):
    """A 95 % confidence interval."""

    low: float
    high: float


@dataclass(frozen=True)
class PassAtK:
    """The estimated probability that at least one of ``k`` attempts at an item succeeds."""

    k: int
    value: float
    interval: Interval
    items: int
    """Items with at least ``k`` scored attempts: the others are not in the estimate."""


@dataclass(frozen=True)
class Difference:
    """The mean over items of the second run's mean score minus the first's."""

    value: float
    interval: Interval | None
    """None if fewer than two items, or all of them differ by the same: nothing varies to estimate it from."""
    items: int
    """Items with a score in both runs."""
    better: list[str]
    """Items whose mean score is higher in the second run, the largest difference first."""
    worse: list[str]


def mean_and_standard_error(scores_per_item: Iterable[Sequence[float]]) -> tuple[float | None, float | None]:
    """The mean of all scores and its standard error, clustered by item; None where there are too few.

    The error is sqrt(G / (G - 1) * sum over items of (sum over attempts of (score - mean)) ** 2) / n, for n scores of
    G items. It is the usual standard error if every item has one attempt, and that of the items' means if all have
    the same number.
    """
    attempts = Attempts()
    for number, scores in enumerate(scores_per_item):
        attempts.add(str(number), scores)
    return attempts.mean(), attempts.stderr()


def pass_at_k(scores_per_item: Iterable[Sequence[float]], k: int, *, success: float = SUCCESS) -> float | None:
    """The unbiased estimate of pass@k, the mean over items of 1 - C(n - c, k) / C(n, k) for c successes among n
    attempts (M. Chen et al., "Evaluating Large Language Models Trained on Code", 2021, arXiv:2107.03374).

    An attempt with a score of at least ``success`` is one. None if no item has ``k`` attempts.
    """
    values = _passes(scores_per_item, k, success)
    return math.fsum(values) / len(values) if values else None


def estimate_pass_at_k(
    scores_per_item: Iterable[Sequence[float]], k: int, *, success: float = SUCCESS
) -> PassAtK | None:
    """:func:`pass_at_k` with its interval: :func:`bootstrap` over items, or :func:`wilson` where that is exact (``k``
    is 1 and every item has one attempt) or where every item has the same value, of which a bootstrap has no width."""
    items = [scores for scores in scores_per_item if len(scores) >= k]
    values = _passes(items, k, success)
    if not values:
        return None
    value = math.fsum(values) / len(values)
    is_single = k == 1 and all(len(scores) == 1 for scores in items)
    interval = None if is_single else bootstrap(values)
    return PassAtK(k, value, interval or wilson(math.fsum(values), len(values)), len(values))


def paired_difference(first: Mapping[str, Sequence[float]], second: Mapping[str, Sequence[float]]) -> Difference | None:
    """``second`` minus ``first``, over the items with a score in both. What items have in common, how hard they are,
    cancels out, so the interval is narrower than one of the two means' errors. None without a common item."""
    differences = {
        item: math.fsum(second[item]) / len(second[item]) - math.fsum(scores) / len(scores)
        for item, scores in first.items()
        if scores and second.get(item)
    }
    if not differences:
        return None
    return Difference(
        value=math.fsum(differences.values()) / len(differences),
        interval=bootstrap(list(differences.values())),
        items=len(differences),
        better=sorted((item for item, by in differences.items() if by > 0), key=lambda item: -differences[item]),
        worse=sorted((item for item, by in differences.items() if by < 0), key=lambda item: differences[item]),
    )


def bootstrap(values: Collection[float]) -> Interval | None:
    """The 95 % interval of the mean of independent values: the 2.5th and 97.5th percentile of the means of
    :data:`RESAMPLES` resamples (B. Efron's percentile method), with a fixed seed. None if the values do not vary."""
    count = len(values)
    drawn_from = sorted(values)
    if count < 2 or drawn_from[0] == drawn_from[-1]:
        return None
    if count > MOST_RESAMPLED:
        mean = math.fsum(drawn_from) / count
        error = math.sqrt(math.fsum((value - mean) ** 2 for value in drawn_from) / (count - 1) / count)
        return Interval(max(drawn_from[0], mean - Z_95 * error), min(drawn_from[-1], mean + Z_95 * error))
    draw = random.Random(SEED)  # noqa: S311 - a resample, not a secret
    means = sorted(sum(draw.choices(drawn_from, k=count)) / count for _ in range(RESAMPLES))
    return Interval(means[round(0.025 * RESAMPLES)], means[round(0.975 * RESAMPLES) - 1])


def wilson(successes: float, trials: int) -> Interval:
    """Wilson's 95 % score interval of a proportion. Of a mean of values between 0 and 1, whose variance is at most
    that of a proportion, it is on the safe side."""
    share, square = successes / trials, Z_95**2
    centre = share + square / (2 * trials)
    half = Z_95 * math.sqrt(share * (1 - share) / trials + square / (4 * trials**2))
    whole = 1 + square / trials
    return Interval(max(0.0, (centre - half) / whole), min(1.0, (centre + half) / whole))


def _passes(scores_per_item: Iterable[Sequence[float]], k: int, success: float) -> list[float]:
    """Per item with enough attempts, the share of choices of ``k`` of them that contain a success."""
    if k < 1:
        raise ValueError(f"k is at least 1, not {k}")
    enough = (scores for scores in scores_per_item if len(scores) >= k)
    return [pass_at(k, len(scores), sum(score >= success for score in scores)) for scores in enough]
