"""Histograms as Prometheus defines them, without depending on its client: durations and sizes counted in buckets."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

WAIT_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Upper bounds of the buckets for waits from a millisecond to minutes."""


@dataclass(frozen=True)
class Buckets:
    """A histogram at one moment. ``counts`` has one entry per bound, not cumulative, and one for larger values."""

    bounds: tuple[float, ...] = WAIT_BOUNDS_S
    counts: tuple[int, ...] = ()
    total: float = 0.0
    """The sum of all values."""

    @property
    def count(self) -> int:
        """Number of values."""
        return sum(self.counts)

    def cumulative(self) -> list[tuple[str, int]]:
        """Per bucket its upper bound as text, and the number of values up to it; the last is ``+Inf``."""
        counts = self.counts or (0,) * (len(self.bounds) + 1)
        names = [*(f"{bound:g}" for bound in self.bounds), "+Inf"]
        so_far, found = 0, []
        for name, count in zip(names, counts, strict=True):
            so_far += count
            found.append((name, so_far))
        return found


class Histogram:
    """Counts values as they come; adding one costs a search in a short tuple."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: Sequence[float] = WAIT_BOUNDS_S) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._total = 0.0

    def add(self, value: float) -> None:
        """Add one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def now(self) -> Buckets:
        """A snapshot of the counts."""
        return Buckets(self._bounds, tuple(self._counts), self._total)

    def __repr__(self) -> str:
        return f"<Histogram of {sum(self._counts)}>"
