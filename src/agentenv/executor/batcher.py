"""When a batch of calls leaves for its container. Pure: no clock, no I/O.

A batch leaves when its first call has waited the window, or it is full, or no earlier batch is
unacknowledged. Only *acknowledgements* hold a batch back, never results: a slow call delays nobody,
and a lone call never waits for company.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Batched(Generic[T]):
    """One batch to send now. Numbers rise by one from 1."""

    number: int
    calls: tuple[T, ...]


@dataclass(frozen=True, slots=True)
class Due(Generic[T]):
    """What to send now, in order, and when to ask again at the latest (None: after the next event)."""

    batches: tuple[Batched[T], ...]
    wake_at: float | None


class Batcher(Generic[T]):
    """The calls waiting for one container, and the batches it has not acknowledged.

    ``now`` is any monotonic clock in seconds. A batch holds at most ``max_calls`` calls and
    ``max_bytes`` bytes, except that a single larger call goes alone.
    """

    def __init__(self, *, window_s: float, max_calls: int, max_bytes: int) -> None:
        self._window_s = window_s
        self._max_calls = max_calls
        self._max_bytes = max_bytes
        self._waiting: deque[tuple[T, int, float]] = deque()
        self._waiting_bytes = 0
        self._sent: dict[int, tuple[float, tuple[T, ...]]] = {}
        self._number = 0

    def __repr__(self) -> str:
        return f"<Batcher {len(self._waiting)} waiting, {len(self._sent)} batches unacknowledged>"

    @property
    def waiting(self) -> int:
        """How many calls have not left."""
        return len(self._waiting)

    @property
    def oldest_unacknowledged_at(self) -> float | None:
        """When the oldest unacknowledged batch was written; None when there is none."""
        return next((sent_at for sent_at, _ in self._sent.values()), None)

    def written(self, number: int, now: float) -> None:
        """The connection took this batch: only from here on may its acknowledgement be expected."""
        if number in self._sent:
            self._sent[number] = (now, self._sent[number][1])

    def add(self, call: T, size_bytes: int, now: float) -> None:
        """One more call. It leaves with the first batch that :meth:`due` says may go."""
        self._waiting.append((call, size_bytes, now))
        self._waiting_bytes += size_bytes

    def drop(self, call: T) -> bool:
        """Take back a call that has not left. False: it has, or was never here."""
        for place, (waiting, size, _) in enumerate(self._waiting):
            if waiting is call:
                del self._waiting[place]
                self._waiting_bytes -= size
                return True
        return False

    def accepted(self, number: int) -> bool:
        """The container has this batch. False: no such batch is unacknowledged."""
        return self._sent.pop(number, None) is not None

    def refused(self, number: int) -> tuple[T, ...]:
        """The container will run nothing of this batch: its calls; none when it is not unacknowledged."""
        return self._sent.pop(number, (0.0, ()))[1]

    def restart(self, calls: Iterable[tuple[T, int]], now: float) -> None:
        """A new connection: nothing is unacknowledged, and exactly ``calls`` wait, in this order."""
        self._sent.clear()
        self._waiting = deque((call, size, now) for call, size in calls)
        self._waiting_bytes = sum(size for _, size, _ in self._waiting)

    def due(self, now: float) -> Due[T]:
        """The batches that leave at ``now``; they count as sent and unacknowledged from here on."""
        batches: list[Batched[T]] = []
        while self._waiting and self._may_leave(now):
            self._number += 1
            batch = Batched(self._number, self._take())
            self._sent[batch.number] = (now, batch.calls)
            batches.append(batch)
        return Due(tuple(batches), self._waiting[0][2] + self._window_s if self._waiting else None)

    def _may_leave(self, now: float) -> bool:
        return (
            not self._sent
            or len(self._waiting) >= self._max_calls
            or self._waiting_bytes >= self._max_bytes
            or now >= self._waiting[0][2] + self._window_s
        )

    def _take(self) -> tuple[T, ...]:
        taken: list[T] = []
        taken_bytes = 0
        while self._waiting and len(taken) < self._max_calls:
            call, size, _ = self._waiting[0]
            if taken and taken_bytes + size > self._max_bytes:
                break
            self._waiting.popleft()
            taken.append(call)
            taken_bytes += size
        self._waiting_bytes -= taken_bytes
        return tuple(taken)
