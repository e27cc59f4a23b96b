"""Counters of a pool and their snapshot."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from agentenv.slots.histogram import Buckets, Histogram
from agentenv.slots.ledger import Ledger
from agentenv.wire.states import ContainerState, SlotState

_KEPT = 2048
"""Durations remembered per kind: enough for a p99, and bounded."""


@dataclass(frozen=True)
class PoolStatistics:
    """Snapshot of a pool. Percentiles are over the last 2,048 events, None before the first.

    ``resets``: from asking a container to release a slot until it was reported free. ``acquire_wait``: from
    requesting a slot until the lease was handed over. ``faults`` counts errors by their code.
    """

    containers: Mapping[ContainerState, int] = field(default_factory=lambda: MappingProxyType({}))
    slots: Mapping[SlotState, int] = field(default_factory=lambda: MappingProxyType({}))
    waiting: int = 0
    goal_containers: int = 0
    max_containers: int = 0
    leases_granted: int = 0
    leases_released: int = 0
    leases_lost: int = 0
    reset_p50_s: float | None = None
    reset_p99_s: float | None = None
    acquire_wait_p50_s: float | None = None
    acquire_wait_p99_s: float | None = None
    resets: Buckets = field(default_factory=Buckets)
    """All resets since the pool was created, in seconds."""
    acquire_waits: Buckets = field(default_factory=Buckets)
    """All leases handed over since the pool was created, in seconds."""
    faults: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def slots_total(self) -> int:
        """Slots of all containers that are not gone."""
        return sum(self.slots.values())

    @property
    def leased(self) -> int:
        """Slots under a lease (requested or held)."""
        return self.slots.get(SlotState.leased, 0)

    def __str__(self) -> str:
        total = sum(self.containers.values())
        states = list(self.containers.items())
        detail = states[0][0] if len(states) == 1 else ", ".join(f"{count} {state}" for state, count in states)
        plural = "" if total == 1 else "s"
        shown = f"{total} container{plural}" + (f" ({detail})" if detail else "")
        return f"{shown}, {self.leased}/{self.slots_total} slots leased, {self.waiting} waiting"


class Durations:
    """The last durations of one kind, and a histogram of all of them."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=_KEPT)
        self._histogram = Histogram()

    def add(self, seconds: float) -> None:
        """Add one duration."""
        self._seconds.append(seconds)
        self._histogram.add(seconds)

    def quantile(self, share: float) -> float | None:
        """The smallest remembered duration not exceeded by ``share`` of them; None if there are none."""
        if not self._seconds:
            return None
        ordered = sorted(self._seconds)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    def buckets(self) -> Buckets:
        """Histogram of all durations so far."""
        return self._histogram.now()


class Tally:
    """Running counts of a pool, from which a :class:`PoolStatistics` is made."""

    def __init__(self) -> None:
        self.granted = 0
        self.released = 0
        self.lost = 0
        self.resets = Durations()
        self.waits = Durations()
        self.faults: Counter[str] = Counter()

    def counts(self) -> dict[str, Any]:
        """The fields of a :class:`PoolStatistics` that are counted here."""
        return {
            "leases_granted": self.granted,
            "leases_released": self.released,
            "leases_lost": self.lost,
            "reset_p50_s": self.resets.quantile(0.5),
            "reset_p99_s": self.resets.quantile(0.99),
            "acquire_wait_p50_s": self.waits.quantile(0.5),
            "acquire_wait_p99_s": self.waits.quantile(0.99),
            "resets": self.resets.buckets(),
            "acquire_waits": self.waits.buckets(),
            "faults": MappingProxyType(dict(self.faults)),
        }

    def statistics(self, ledger: Ledger, goal_containers: int, max_containers: int) -> PoolStatistics:
        """A snapshot of all counts."""
        return PoolStatistics(
            containers=MappingProxyType(ledger.container_counts()),
            slots=MappingProxyType(ledger.slot_counts()),
            waiting=ledger.waiting,
            goal_containers=goal_containers,
            max_containers=max_containers,
            **self.counts(),
        )
