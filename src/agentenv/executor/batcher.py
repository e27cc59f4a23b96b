"""Decides when a batch of calls is sent to its container. Pure: no clock, no I/O.

A batch is sent when its first call has waited for the window, when it is full, or when no earlier batch is
unacknowledged. Batches wait only for *acknowledgements*, never for results: a slow call delays no other, and a lone
call never waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Batched(Generic[T]):
    """A batch to send now. Numbers increase by one from 1."""

    number: int
    calls: tuple[T, ...]


@dataclass(frozen=True, slots=True)
class Due(Generic[T]):
    """Batches to send now, in order, and the latest time of the next look (None: at the next event)."""

    batches: tuple[Batched[T], ...]
    wake_at: float | None


class Batcher(Generic[T]):
    """Queue of the calls for one container, and its unacknowledged batches.

    ``now`` is any monotonic clock in seconds. A batch holds at most ``max_calls`` calls and ``max_bytes`` bytes,
    except that a larger single call is sent alone.
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
        """Number of calls not sent yet."""
        return len(self._waiting)

    @property
    def oldest_unacknowledged_at(self) -> float | None:
        """When the oldest unacknowledged batch was written; None if there is none."""
        return next((sent_at for sent_at, _ in self._sent.values()), None)

    def written(self, number: int, now: float) -> None:
        """The batch was written to the connection: from now on its acknowledgement is expected."""
        if number in self._sent:
            self._sent[number] = (now, self._sent[number][1])

    def add(self, call: T, size_bytes: int, now: float) -> None:
        """Add a call. It is sent with the first batch that :meth:`due` releases."""
        self._waiting.append((call, size_bytes, now))
        self._waiting_bytes += size_bytes

    def drop(self, call: T) -> bool:
        """Withdraw a call that was not sent. False: it was sent, or is unknown."""
        for place, (waiting, size, _) in enumerate(self._waiting):
            if waiting is call:
                del self._waiting[place]
                self._waiting_bytes -= size
                return True
        return False

    def accepted(self, number: int) -> bool:
        """The container has acknowledged this batch. False: no such batch is unacknowledged."""
        return self._sent.pop(number, None) is not None

    def refused(self, number: int) -> tuple[T, ...]:
        """The container runs nothing of this batch; returns its calls, none if it is not unacknowledged."""
        return self._sent.pop(number, (0.0, ()))[1]

    def restart(self, calls: Iterable[tuple[T, int]], now: float) -> None:
        """A new connection: nothing is unacknowledged, and exactly ``calls`` wait, in this order."""
        self._sent.clear()
        self._waiting = deque((call, size, now) for call, size in calls)
        self._waiting_bytes = sum(size for _, size, _ in self._waiting)

    def due(self, now: float) -> Due[T]:
        """The batches to send at ``now``; from here on they count as sent and unacknowledged."""
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
