"""When a silent container is suspect, and when it is given up. Pure."""

from __future__ import annotations

from enum import StrEnum


class Verdict(StrEnum):
    """What its silence so far says of a container."""

    well = "well"
    suspect = "suspect"
    gone = "gone"


class Silence:
    """How long one container has not answered, not counting time in which *we* were not asking.

    A process whose event loop was blocked for half a minute has not heard anything either; that is no
    evidence against a container. So time counts only in steps of at most ``step_s``: a longer gap
    between two ticks was our own doing.
    """

    def __init__(self, suspect_after_s: float, gone_after_s: float, now: float) -> None:
        self._suspect_after_s = suspect_after_s
        self._gone_after_s = gone_after_s
        self._last = now
        self._silent_s = 0.0
        self.step_s = suspect_after_s / 4
        """How often tick() wants to be called."""

    @property
    def silent_s(self) -> float:
        """Seconds of silence counted so far."""
        return self._silent_s

    def heard(self, now: float) -> None:
        """It answered."""
        self._last = now
        self._silent_s = 0.0

    def tick(self, now: float) -> Verdict:
        """Time has passed without an answer."""
        self._silent_s += min(max(0.0, now - self._last), 2 * self.step_s)
        self._last = now
        if self._silent_s >= self._gone_after_s:
            return Verdict.gone
        return Verdict.suspect if self._silent_s >= self._suspect_after_s else Verdict.well

    def __repr__(self) -> str:
        return f"<Silence {self._silent_s:.1f} s of {self._gone_after_s:.1f} s>"
