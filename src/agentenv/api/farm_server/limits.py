"""How fast each token may ask: a sliding window per token, in memory."""

from __future__ import annotations

import threading
import time
from typing import Final

from limits import RateLimitItem, RateLimitItemPerSecond
from limits.storage import MemoryStorage
from limits.strategies import SlidingWindowCounterRateLimiter

from agentenv.api.farm_server.settings import AskLimits

_LEAST_WAIT_S: Final = 0.05


class AskLimiter:
    """Limits asks by token. Memory: two counters for each token used within two windows (``burst / asks_per_s``).

    The window is whole seconds, at least one: within it, ``asks_per_s`` times its length may come, all at once if
    they like. Whoever uses that up may have to wait for a whole window.
    """

    def __init__(self, limits: AskLimits) -> None:
        self._storage = _Counters()
        self._windows = SlidingWindowCounterRateLimiter(self._storage)
        self._limit = _window(limits)

    def set_limits(self, limits: AskLimits) -> None:
        """Other limits from now on; if they differ, everybody begins anew."""
        self._limit = _window(limits)

    def hit(self, key: str, cost: int = 1) -> float | None:
        """Count ``cost`` asks of a token. None: they are within its limit. Otherwise they were not counted, and may
        be tried again after so many seconds.

        ``key`` is the id of a token that was verified; others must not be counted, for there may be any number. A
        request of more asks than the limit counts as many as that: otherwise it could never be made.
        """
        self._storage.drop_expired(self._limit.get_expiry())
        cost = min(cost, self._limit.amount)
        if self._windows.hit(self._limit, key, cost=cost):
            return None
        return self._wait_s(key, cost)

    def full(self, key: str) -> float | None:
        """As :meth:`hit`, and counts nothing."""
        return None if self._windows.test(self._limit, key) else self._wait_s(key, 1)

    def _wait_s(self, key: str, cost: int) -> float:
        window_s = self._limit.get_expiry()
        before, _, now, now_expires_s = self._storage.get_sliding_window(self._limit.key_for(key), window_s)
        room = self._limit.amount - cost
        return max(_LEAST_WAIT_S, wait_s(room, window_s, before, now, ends_s=now_expires_s - window_s))


class _NoTimer(threading.Timer):
    """Never started, and never to be replaced."""

    def is_alive(self) -> bool:
        """As far as the storage asks, it runs."""
        return True


class _Counters(MemoryStorage):
    """Without the thread that its base starts for each hit to drop expired counters: the thread shares the counters
    with us, and dies by a KeyError when we drop one at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.timer.cancel()
        self.timer.join()
        self.timer = _NoTimer(0, self.reset)
        self._dropped_s = time.monotonic()

    def drop_expired(self, every_s: float) -> None:
        """Drop them, if it was not done for this long."""
        if (now_s := time.monotonic()) - self._dropped_s < every_s:
            return
        self._dropped_s = now_s
        for key in tuple(self.expirations):
            self.get(key)  # drops it if it has expired


def wait_s(room: int, window_s: float, before: int, now: int, *, ends_s: float) -> float:
    """Seconds until what is counted has fallen to ``room``, if nothing more comes.

    Counted are ``now``, in this window, which ends in ``ends_s``, and of the ``before`` in the window before it as
    large a part as a window that ends at this moment covers of it.
    """
    if now <= room:
        return max(0.0, ends_s - (room - now) * window_s / before) if before else 0.0
    return ends_s + window_s - room * window_s / now


def _window(limits: AskLimits) -> RateLimitItem:
    window_s = max(1, round(limits.burst / limits.asks_per_s))
    return RateLimitItemPerSecond(max(1, round(limits.asks_per_s * window_s)), window_s)
