"""Rate limit for the server's work for a slot: a burst, then an amount per second. Pure."""

from __future__ import annotations


class Allowance:
    """A token bucket, full at first. Excess is paid for by waiting."""

    __slots__ = ("_burst", "_left", "_per_s", "_since_s")

    def __init__(self, per_s: float, burst: float) -> None:
        self._per_s = per_s
        self._burst = burst
        self._left = burst
        self._since_s = 0.0

    def take(self, amount: float, now_s: float) -> float:
        """Take an amount, whether or not it is available; returns how long to take nothing afterwards, in seconds."""
        earned = (now_s - self._since_s) * self._per_s
        self._since_s = now_s
        self._left = min(self._left + earned, self._burst) - amount
        return max(0.0, -self._left / self._per_s)
