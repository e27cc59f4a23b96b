"""The clock of one trajectory: seconds since its start, and the phases of the waterfall."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from agentenv.agent.transcript import Phase, PhaseName, Step

TOTALS = {"slot_wait": "slot_wait_s", "prepare": "prepare_s", "model": "model_s", "verify": "verify_s"}


class Timeline:
    """Measures phases, starting at its creation. Monotonic; ``began_unix_s`` anchors it to the wall clock."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._zero = clock()
        self.began_unix_s = time.time()
        self.phases: list[Phase] = []

    def now(self) -> float:
        """Seconds since the trajectory started."""
        return self._clock() - self._zero

    @contextmanager
    def phase(self, name: PhaseName, label: str = "") -> Iterator[float]:
        """Record the block as one phase, however it ends. ``as``: when it started."""
        started_s = self.now()
        try:
            yield started_s
        finally:
            self.record(name, started_s, label)

    def record(self, name: PhaseName, started_s: float, label: str = "") -> None:
        """Add a phase from ``started_s`` until now."""
        self.phases.append(Phase(name=name, label=label, started_s=started_s, ended_s=self.now()))


def totals(phases: list[Phase], steps: list[Step], total_s: float) -> dict[str, float]:
    """Seconds by kind, as ``Transcript.totals`` names them."""
    sums = dict.fromkeys([*TOTALS.values(), "batch_wait_s", "queue_s", "run_s"], 0.0)
    for phase in phases:
        if key := TOTALS.get(phase.name):
            sums[key] += phase.ended_s - phase.started_s
    for call in (call for step in steps for call in step.tool_calls):
        sums["batch_wait_s"] += call.batch_wait_s
        sums["queue_s"] += call.result.queue_s if call.result else 0.0
        sums["run_s"] += call.result.duration_s if call.result else 0.0
    return {**sums, "total_s": total_s}
