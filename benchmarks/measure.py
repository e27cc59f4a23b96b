"""Percentiles, memory of process trees, and the record each target leaves."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


def percentile(values: Sequence[float], share: float) -> float:
    """The nearest-rank percentile (``share`` 0.99 for p99); ``values`` must not be empty."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]


@dataclass
class Latencies:
    """Seconds per call of one workload, and how long the whole of it took."""

    seconds: list[float] = field(default_factory=list)
    total_s: float = 0.0

    @property
    def rate(self) -> float:
        """Calls per second."""
        return len(self.seconds) / self.total_s

    @property
    def p50_ms(self) -> float:
        return 1e3 * percentile(self.seconds, 0.5)

    @property
    def p99_ms(self) -> float:
        return 1e3 * percentile(self.seconds, 0.99)


@dataclass(frozen=True)
class Outcome:
    """One line of results.json: what was reached, what was the goal, whether it holds."""

    target: str
    what: str
    value: float
    unit: str
    goal: str
    holds: bool
    details: dict[str, Any] = field(default_factory=dict)


def at_least(target: str, what: str, values: Sequence[float], unit: str, goal: float, **details: Any) -> Outcome:
    """The median of ``values`` (one per round) against a lower bound."""
    value = statistics.median(values)
    return Outcome(target, what, round(value, 3), unit, f">= {goal:g}", value >= goal, {"rounds": values, **details})


def at_most(target: str, what: str, values: Sequence[float], unit: str, goal: float, **details: Any) -> Outcome:
    """The median of ``values`` (one per round) against an upper bound."""
    value = statistics.median(values)
    return Outcome(target, what, round(value, 3), unit, f"<= {goal:g}", value <= goal, {"rounds": values, **details})


def pss_bytes(pid: int) -> int:
    """Proportional set size of one process; 0 when it has ended meanwhile."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


@dataclass(frozen=True)
class Process:
    """One row of the process table."""

    pid: int
    parent: int
    uid: int
    command: str


def process_tree(root: int) -> list[Process]:
    """``root`` and all its descendants, as the host sees them."""
    table: dict[int, Process] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = dict(line.split(":\t", 1) for line in (entry / "status").read_text().splitlines() if ":\t" in line)
            table[int(entry.name)] = Process(
                int(entry.name), int(fields["PPid"]), int(fields["Uid"].split()[0]), fields["Name"]
            )
        except (OSError, KeyError, ValueError):
            continue
    found: list[Process] = []
    wanted = {root}
    while True:
        more = [p for p in table.values() if (p.parent in wanted or p.pid == root) and p not in found]
        if not more:
            return found
        found.extend(more)
        wanted |= {p.pid for p in more}
