"""How much of a slot's the server takes on: so much at once, and from then on so much per second. Pure."""

from __future__ import annotations


class Allowance:
    """Full at first. What is taken beyond it is waited for."""

    __slots__ = ("_burst", "_left", "_per_s", "_since_s")

    def __init__(self, per_s: float, burst: float) -> None:
        self._per_s = per_s
        self._burst = burst
        self._left = burst
        self._since_s = 0.0

    def take(self, amount: float, now_s: float) -> float:
        """Take it, whether or not there is so much; how long to take nothing then, in seconds."""
        earned = (now_s - self._since_s) * self._per_s
        self._since_s = now_s
        self._left = min(self._left + earned, self._burst) - amount
        return max(0.0, -self._left / self._per_s)
