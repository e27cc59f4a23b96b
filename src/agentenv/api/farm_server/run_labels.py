"""Which runs are named in a farm's metrics: a bounded number of them, so that no series grows without end. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Final

MOST_RUNS: Final = 200
IDLE_S: Final = 600.0
"""A run that has neither held nor waited for slots for this long gives up its label."""
OTHER: Final = "other"
"""The label of all runs without one of their own."""


class RunCounts:
    """Counts by run. A run gets a label of its own when it is first counted, if one is left, and keeps it; what is
    counted to OTHER stays there, so that no count ever falls but by ending."""

    def __init__(self, most: int = MOST_RUNS) -> None:
        self._most = most
        self._live_at: dict[str, float | None] = {}
        """Runs with a label, and when they were last seen (None: not yet)."""
        self.counts: Counter[str] = Counter()
        """By label."""

    def label(self, run: str) -> str:
        """The label of a run."""
        if run not in self._live_at:
            if len(self._live_at) >= self._most or run in ("", OTHER):
                return OTHER
            self._live_at[run] = None
        return run

    def add(self, run: str, count: int) -> None:
        """Count so many to a run."""
        self.counts[self.label(run)] += count

    def forget(self, live: Collection[str], now: float) -> None:
        """``live``: the runs that hold or wait for slots now. Others lose their label after IDLE_S."""
        for run, at in list(self._live_at.items()):
            if run in live or at is None:
                self._live_at[run] = now
            elif now - at >= IDLE_S:
                del self._live_at[run]
                del self.counts[run]
