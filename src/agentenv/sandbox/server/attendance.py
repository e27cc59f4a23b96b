"""Whether anybody still uses this container: one that outlives its starter ends itself when nobody does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Attendance:
    """Authenticated requests, as far as they show that somebody is there. Pure but for the clock."""

    def __init__(self, after_s: float, clock: Callable[[], float]) -> None:
        """``after_s``: how long a container may be unattended; 0: for ever."""
        self._after_s = after_s
        self._clock = clock
        self._open = 0
        self._last_at_s = clock()

    @contextmanager
    def request(self) -> Iterator[None]:
        """During one request. A long one (a watch, a stream) attends to the container until it ends."""
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1
            self._last_at_s = self._clock()

    def is_over(self, *, leased: bool) -> bool:
        """Whether the container has been unattended for too long. Never while a slot is ``leased``."""
        if not self._after_s or self._open or leased:
            return False
        return self._clock() - self._last_at_s >= self._after_s
