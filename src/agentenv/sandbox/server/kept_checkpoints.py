"""Whose checkpoints a container keeps, so that those of a run that is gone do not take the room of others. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

KEEP_S: Final = 1800.0
"""How long a run's checkpoints are kept while it has no lease in the container."""


class KeptCheckpoints:
    """The checkpoints made for runs of a farm, and when each run was seen last. Those of no run, whose container is its
    pool's own, are kept as long as that."""

    def __init__(self, keep_s: float = KEEP_S) -> None:
        self._keep_s = keep_s
        self._runs: dict[str, str] = {}
        """By checkpoint."""
        self._seen: dict[str, float] = {}

    def made(self, checkpoint: str, run: str, now: float) -> None:
        """A checkpoint was made of a slot that the run has leased."""
        if run:
            self._runs[checkpoint] = run
            self._seen[run] = now

    def dropped(self, checkpoint: str) -> None:
        """It is forgotten; no effect for one that is not known."""
        self._runs.pop(checkpoint, None)

    def seen(self, run: str, now: float) -> None:
        """The run has a lease in the container."""
        if run in self._seen:
            self._seen[run] = now

    def stale(self, leasing: Iterable[str], now: float) -> list[str]:
        """Checkpoints of runs that have not been seen for too long and are not ``leasing`` now, which are forgotten."""
        for run in leasing:
            self.seen(run, now)
        gone = {run for run, seen in self._seen.items() if now - seen > self._keep_s}
        found = [checkpoint for checkpoint, run in self._runs.items() if run in gone]
        for checkpoint in found:
            del self._runs[checkpoint]
        for run in gone:
            del self._seen[run]
        return found
