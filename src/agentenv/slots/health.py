"""When a silent container becomes suspect, and when it is given up. Pure."""

from __future__ import annotations

from enum import StrEnum


class Verdict(StrEnum):
    """State of a container judged by its silence."""

    well = "well"
    suspect = "suspect"
    gone = "gone"


class Silence:
    """Time for which one container has not answered, excluding time in which *we* were not asking.

    A process whose event loop was blocked for half a minute has received nothing either, which is no evidence
    against a container. So time counts in steps of at most ``step_s``: the rest of a longer gap between two ticks
    was our own delay.
    """

    def __init__(self, suspect_after_s: float, gone_after_s: float, now: float) -> None:
        self._suspect_after_s = suspect_after_s
        self._gone_after_s = gone_after_s
        self._last = now
        self._silent_s = 0.0
        self.step_s = suspect_after_s / 4
        """Expected interval between calls of tick()."""

    @property
    def silent_s(self) -> float:
        """Seconds of silence so far."""
        return self._silent_s

    def answered(self, now: float) -> None:
        """The container answered."""
        self._last = now
        self._silent_s = 0.0

    def tick(self, now: float) -> Verdict:
        """Time has passed without an answer; return the verdict."""
        self._silent_s += min(max(0.0, now - self._last), 2 * self.step_s)
        self._last = now
        if self._silent_s >= self._gone_after_s:
            return Verdict.gone
        return Verdict.suspect if self._silent_s >= self._suspect_after_s else Verdict.well

    def __repr__(self) -> str:
        return f"<Silence {self._silent_s:.1f} s of {self._gone_after_s:.1f} s>"
