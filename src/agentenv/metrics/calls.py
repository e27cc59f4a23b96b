"""Counts an executor's calls: a few integer additions each, no locks, no I/O."""

from __future__ import annotations

from collections import Counter

from agentenv.errors import Fault
from agentenv.executor.observer import CallTiming
from agentenv.slots.histogram import Histogram

BATCH_BOUNDS_CALLS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0)
LATENCY_BOUNDS_S = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0
)  # fmt: skip
"""Bucket bounds for durations expected to be near zero; 0.02 is the default batch window."""


class CallCounts:
    """An :class:`agentenv.executor.observer.CallObserver` that counts. One event loop."""

    def __init__(self) -> None:
        self.ended: Counter[tuple[str, str]] = Counter()
        """By tool and fault."""
        self.given_up: Counter[str] = Counter()
        self.batch_sizes = Histogram(BATCH_BOUNDS_CALLS)
        self.batch_waits = Histogram(LATENCY_BOUNDS_S)
        self.queues = Histogram()
        self.runs: dict[str, Histogram] = {}
        self.overheads = Histogram(LATENCY_BOUNDS_S)

    def finished(self, tool: str, fault: Fault, timing: CallTiming | None) -> None:
        """See :class:`CallObserver`."""
        self.ended[tool, fault] += 1
        if timing is None:
            return
        self.batch_waits.add(timing.batch_wait_s)
        self.queues.add(timing.queue_s)
        run = self.runs.get(tool)
        if run is None:
            run = self.runs[tool] = Histogram()
        run.add(timing.run_s)
        # Durations are measured by two clocks: a value just below zero is possible.
        self.overheads.add(max(0.0, timing.total_s - timing.batch_wait_s - timing.queue_s - timing.run_s))

    def cancelled(self, tool: str) -> None:
        """See :class:`CallObserver`."""
        self.given_up[tool] += 1

    def batch_left(self, calls: int) -> None:
        """See :class:`CallObserver`."""
        self.batch_sizes.add(calls)

    def __repr__(self) -> str:
        return f"<CallCounts {sum(self.ended.values())} calls>"
