"""What the server counts, as plain integers: an increment is all a call pays for it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


@dataclass(slots=True)
class Statistics:
    """Counters since the server process started; from ``held_bytes`` on, gauges."""

    calls: int = 0
    calls_cold: int = 0
    """Bash calls that found no spare shell."""
    calls_timed_out: int = 0
    calls_cancelled: int = 0
    calls_oom_killed: int = 0
    calls_faulted: int = 0
    """Results with a fault other than ``none``."""
    calls_asked_again: int = 0
    batches: int = 0
    messages_refused: int = 0
    results_bytes: int = 0
    leases_granted: int = 0
    leases_expired: int = 0
    slots_lost: int = 0
    held_bytes: int = 0
    """What the calls that wait or run were sent as, in bytes of JSON."""
    streams: int = 0
    slots_free: int = 0
    slots_leased: int = 0
    calls_running: int = 0
    calls_queued: int = 0

    def as_dict(self) -> dict[str, int]:
        """For ``GET /v1/statistics``."""
        return dataclasses.asdict(self)
