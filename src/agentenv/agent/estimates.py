"""What several attempts at each item say about a model: its mean score with the error of that, and pass@k. Pure.

Attempts at one item are alike, so they are one cluster: 4 attempts at 100 items are not 400 independent scores. The
standard error of the mean is clustered by item (Miller, "Adding Error Bars to Evals", 2024, arXiv:2411.00640, section
2.2), with the usual correction for a finite number of clusters, so that with one attempt per item it is the ordinary
one. pass@k is the unbiased estimate of Chen et al., "Evaluating Large Language Models Trained on Code", 2021,
arXiv:2107.03374, section 2.1; the plain 1 - (1 - p)^k is too low.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

PASSED: Final = 1.0
"""The least score of an attempt that has passed."""


def pass_at(k: int, attempts: int, passed: int) -> float:
    """The chance that at least one of ``k`` attempts passes, estimated from ``attempts``, of which ``passed`` did.
    Raises: ValueError with fewer attempts than ``k``."""
    if not 0 < k <= attempts:
        raise ValueError(f"{attempts} attempts say nothing about {k}")
    return 1.0 - math.comb(attempts - passed, k) / math.comb(attempts, k)


class Attempts:
    """The scores of an evaluation by item. Three numbers are kept of each."""

    def __init__(self) -> None:
        self._items: dict[str, tuple[int, float, int]] = {}
        """Item → attempts with a score, the sum of their scores, those that have passed."""

    def add(self, item: str, scores: Iterable[float]) -> None:
        """More attempts at an item; those without a score are left out."""
        number, total, passed = self._items.get(item, (0, 0.0, 0))
        for score in scores:
            number, total, passed = number + 1, total + score, passed + (score >= PASSED)
        self._items[item] = number, total, passed

    @property
    def most(self) -> int:
        """The largest number of scored attempts at an item."""
        return max((number for number, _, _ in self._items.values()), default=0)

    def mean(self) -> float | None:
        """The mean of all scores; None without one."""
        attempts = sum(number for number, _, _ in self._items.values())
        return math.fsum(total for _, total, _ in self._items.values()) / attempts if attempts else None

    def stderr(self) -> float | None:
        """The standard error of the mean score, clustered by item; None for fewer than two items with a score."""
        clusters = [(number, total) for number, total, _ in self._items.values() if number]
        if len(clusters) < 2:
            return None
        attempts = sum(number for number, _ in clusters)
        mean = math.fsum(total for _, total in clusters) / attempts
        squares = math.fsum((total - number * mean) ** 2 for number, total in clusters)
        return math.sqrt(squares * len(clusters) / (len(clusters) - 1)) / attempts

    def pass_at(self, k: int) -> tuple[float, int] | None:
        """pass@k, and the number of items it is the mean of: those with at least ``k`` scored attempts. None if there
        are none."""
        found = [pass_at(k, number, passed) for number, _, passed in self._items.values() if number >= k]
        return (math.fsum(found) / len(found), len(found)) if found else None

    @property
    def items(self) -> int:
        """Number of items, those without a score included."""
        return len(self._items)
