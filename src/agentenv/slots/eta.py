"""How long an ask will probably wait. Pure: no clock of its own, times are monotonic seconds."""

from __future__ import annotations

import math

WINDOW_S = 120.0
"""Slots freed this long ago count e times less than those freed now: some stays long, so that a step's end is not
taken for the rate of the farm, and short enough to notice that a run has ended."""


class FreedRate:
    """Slots freed per second, recent ones counting most (an exponentially weighted average)."""

    def __init__(self, now: float, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._since = self._last = now
        self._recent = 0.0
        """Slots freed, each worth less with time."""

    def freed(self, now: float, slots: int = 1) -> None:
        """So many slots became free. ``now`` never decreases."""
        self._recent = self._faded(now) + slots
        self._last = now

    def per_s(self, now: float) -> float | None:
        """The rate; None if less than one recent slot is known, which is too few to tell."""
        recent = self._faded(now)
        if recent < 1.0 or now <= self._since:
            return None
        # What a rate of 1 would have come to since the start, which is less than the window at first.
        return recent / (self._window_s * -math.expm1((self._since - now) / self._window_s))

    def _faded(self, now: float) -> float:
        return self._recent * math.exp((self._last - now) / self._window_s)


def eta_s(
    missing: int | None, freed_per_s: float | None, growth: int = 0, start_s: float | None = None
) -> float | None:
    """Seconds until ``missing`` slots have become free: those granted before the ask and its own, less those that are
    free. None if it cannot be told.

    ``growth``: slots of the containers that are starting or may still be started, which come after ``start_s``, the
    median time of recent starts (None: unknown, then they are not reckoned with). It assumes that slots go on being
    freed at the same rate and that nobody comes who is served before the ask; an estimate for people.
    """
    if missing is None:
        return None
    if missing <= 0:
        return 0.0
    by_leases = missing / freed_per_s if freed_per_s else math.inf
    if start_s is None or growth <= 0 or by_leases <= start_s:
        found = by_leases
    else:
        left = max(0, missing - growth)
        found = max(start_s, left / freed_per_s if freed_per_s else (math.inf if left else 0.0))
    return found if math.isfinite(found) else None
