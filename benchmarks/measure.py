"""Percentiles, memory of process trees, and the record each target leaves."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

MIB = 1024 * 1024


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
class Beside:
    """The workload itself, in its own unit, beside the same done by the baselines (None: it makes no sense there)."""

    unit: str
    ours: float
    bare: float | None = None
    bwrap_per_call: float | None = None


def beside(unit: str, ours: Sequence[float], bare: Sequence[float] = (), bwrap: Sequence[float] = ()) -> Beside:
    """The medians, one value per round."""
    medians = [round(statistics.median(values), 3) if values else None for values in (ours, bare, bwrap)]
    assert medians[0] is not None
    return Beside(unit, medians[0], medians[1], medians[2])


@dataclass(frozen=True)
class Outcome:
    """One entry of results.json: what was reached, what was the goal, whether it holds, and what is beside it."""

    target: str
    what: str
    value: float
    unit: str
    goal: str
    holds: bool
    beside: Beside | None = None
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Goal:
    """What a target asks for."""

    target: str
    what: str
    unit: str
    bound: float
    least: bool = False
    """The bound is a lower one."""

    def outcome(self, values: Sequence[float], beside: Beside | None = None, **details: Any) -> Outcome:
        """The median of ``values`` (one per round) against the bound."""
        value = statistics.median(values)
        holds = value >= self.bound if self.least else value <= self.bound
        goal = f"{'>=' if self.least else '<='} {self.bound:g}"
        rounds = {"rounds": list(values), **details}
        return Outcome(self.target, self.what, round(value, 3), self.unit, goal, holds, beside, rounds)


def at_least(target: str, what: str, unit: str, bound: float) -> Goal:
    """A lower bound."""
    return Goal(target, what, unit, bound, least=True)


def at_most(target: str, what: str, unit: str, bound: float) -> Goal:
    """An upper bound."""
    return Goal(target, what, unit, bound)
