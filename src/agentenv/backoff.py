"""Pauses between attempts: exponential backoff, used everywhere. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

_MOST_DOUBLINGS = 30


def pause_s(first_s: float, longest_s: float, failures: int) -> float:
    """The pause after ``failures`` (1 or more) in a row: ``first_s``, doubled each time, ``longest_s`` at most."""
    return min(longest_s, first_s * 2.0 ** min(failures - 1, _MOST_DOUBLINGS))


@dataclass
class Backoff:
    """Counts consecutive failures for :func:`pause_s`."""

    first_s: float
    longest_s: float
    failures: int = 0

    def next_s(self) -> float:
        """Another attempt failed; return the pause before the next one."""
        self.failures += 1
        return pause_s(self.first_s, self.longest_s, self.failures)

    def reset(self) -> None:
        """An attempt succeeded."""
        self.failures = 0
