"""A clock that stands still until it is told to move."""

from __future__ import annotations


class ManualClock:
    """Monotonic seconds, moved by hand. Call it to read it."""

    def __init__(self, now: float = 1_000.0) -> None:
        self._now = now

    def __call__(self) -> float:
        return self._now

    def advance(self, seconds: float) -> float:
        """Move forward; the new time. Raises ValueError for a move back."""
        if seconds < 0:
            raise ValueError(f"a monotonic clock cannot move by {seconds}")
        self._now += seconds
        return self._now

    def __repr__(self) -> str:
        return f"<ManualClock {self._now:.3f}>"
