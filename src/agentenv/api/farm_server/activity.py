"""What happens in a farm's containers, by the counters of their watches: totals for ``/metrics``, rates for the page.

A container's counters end with it, and begin again with its server. Here they go on.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from agentenv.slots.container_link import ContainerLink
from agentenv.slots.histogram import Buckets
from agentenv.slots.watched_link import WatchedLink
from agentenv.wire.sight import RatesSight
from agentenv.wire.watch import CALL_BOUNDS_S

COUNTERS: Final = (
    "calls", "calls_timed_out", "calls_oom_killed", "calls_cancelled", "calls_faulted", "leases_expired", "slots_lost"
)  # fmt: skip
GAUGES: Final = ("calls_running", "calls_queued", "held_bytes")
_FAULTS: Final = ("calls_timed_out", "calls_oom_killed", "calls_faulted", "leases_expired", "slots_lost")
"""Counters that the page shows among the faults."""

SAMPLE_S: Final = 2.0
_WINDOW: Final = 5
"""Samples over which rates are taken: 10 s, so that a line is no saw."""
_KEPT: Final = 150
"""Samples of the last five minutes."""
_NO_CALLS: Final = (0,) * (len(CALL_BOUNDS_S) + 1)


@dataclass(frozen=True)
class _Read:
    """A container's counters when they were read last."""

    counters: tuple[int, ...]
    call_counts: tuple[int, ...]
    call_total_s: float


@dataclass(frozen=True)
class _Mark:
    """All counters at the moment of a sample."""

    at_s: float
    granted: int
    totals: Counter[str]
    call_counts: tuple[int, ...]
    faults: Counter[str]


class Activity:
    """Totals since this process began, and samples of the last five minutes."""

    def __init__(self) -> None:
        self.totals: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self.gauges: Counter[str] = Counter(dict.fromkeys(GAUGES, 0))
        self.samples: deque[RatesSight] = deque(maxlen=_KEPT)
        self._call_counts = list(_NO_CALLS)
        self._call_total_s = 0.0
        self._read: dict[str, _Read] = {}
        self._marks: deque[_Mark] = deque(maxlen=_WINDOW + 1)

    @property
    def call_times(self) -> Buckets:
        """How long calls ran."""
        return Buckets(CALL_BOUNDS_S, tuple(self._call_counts), self._call_total_s)

    def read(self, links: Mapping[str, ContainerLink]) -> None:
        """Take in what the last beats of these containers said. Those that are not among them are gone."""
        self._read = {container: read for container, read in self._read.items() if container in links}
        gauges: Counter[str] = Counter(dict.fromkeys(GAUGES, 0))
        for container, link in links.items():
            if isinstance(link, WatchedLink) and link.statistics:
                for name in GAUGES:
                    gauges[name] += link.statistics.get(name, 0)
                self._add(container, link)
        self.gauges = gauges

    def _add(self, container: str, link: WatchedLink) -> None:
        counters = tuple(link.statistics.get(name, 0) for name in COUNTERS)
        times = link.call_times
        now = _Read(counters, times.counts or _NO_CALLS, times.total_s)
        before = self._read.get(container)
        self._read[container] = now
        if before is None:  # what it had counted before this farm came
            return
        if counters[0] < before.counters[0]:  # its server was restarted
            before = _Read((0,) * len(COUNTERS), _NO_CALLS, 0.0)
        for name, value, former in zip(COUNTERS, counters, before.counters, strict=True):
            self.totals[name] += max(0, value - former)
        for at, (count, former) in enumerate(zip(now.call_counts, before.call_counts, strict=True)):
            self._call_counts[at] += max(0, count - former)
        self._call_total_s += max(0.0, now.call_total_s - before.call_total_s)

    def sample(self, now: float, granted: int, faults: Mapping[str, int]) -> None:
        """Note the rates, if the last time was SAMPLE_S ago. ``granted``: leases so far; ``faults``: of the manager, by
        code."""
        last = self._marks[-1] if self._marks else None
        if last is not None and now - last.at_s < SAMPLE_S:
            return
        every = Counter(dict(faults)) + Counter({name: self.totals[name] for name in _FAULTS})
        mark = _Mark(now, granted, Counter(self.totals), tuple(self._call_counts), every)
        self._marks.append(mark)
        if last is not None:
            self.samples.append(self._rates(self._marks[0], last, mark))

    def _rates(self, first: _Mark, last: _Mark, now: _Mark) -> RatesSight:
        took_s = now.at_s - first.at_s
        ended = [count - former for count, former in zip(now.call_counts, first.call_counts, strict=True)]
        return RatesSight(
            at_s=now.at_s,
            calls_per_s=(now.totals["calls"] - first.totals["calls"]) / took_s,
            call_p50_s=quantile(0.5, CALL_BOUNDS_S, ended),
            call_p99_s=quantile(0.99, CALL_BOUNDS_S, ended),
            leases_per_s=(now.granted - first.granted) / took_s,
            calls_running=self.gauges["calls_running"],
            faults=dict(now.faults - last.faults),
        )

    def __repr__(self) -> str:
        return f"<Activity {self.totals['calls']} calls, {len(self._read)} containers>"


def quantile(share: float, bounds: Sequence[float], counts: Sequence[int]) -> float | None:
    """The value that ``share`` of those counted do not exceed, as Prometheus' histogram_quantile estimates it: evenly
    spread within each bucket, and the highest bound for those above it. None if nothing was counted."""
    rank, so_far = share * sum(counts), 0
    if not any(counts):
        return None
    for at, (bound, count) in enumerate(zip(bounds, counts, strict=False)):
        if count and so_far + count >= rank:
            below = bounds[at - 1] if at else 0.0
            return below + (bound - below) * (rank - so_far) / count
        so_far += count
    return bounds[-1]
