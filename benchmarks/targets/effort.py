"""How much is measured, of which farms, and the figures of each round while they are collected."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from benchmarks.measure import Beside, Goal, Outcome, beside

BARE = "bare bash"


@dataclass(frozen=True)
class Effort:
    """Rounds per figure, calls per trajectory, slots, and the backends measured beside each other."""

    rounds: int = 3
    calls: int = 100
    slots: int = 20
    kills_s: float = 300.0
    """For how long a farm service is killed again and again."""
    away_s: float = 600.0
    """For how long there is none."""
    backends: tuple[str, ...] = ("local",)

    def named(self, target: str, backend: str) -> str:
        """The first backend's entry has the target's own id, the others say which they are."""
        return target if backend == self.backends[0] else f"{target}@{backend}"


@dataclass
class Rounds:
    """Values by what was measured and of whom, one per round."""

    effort: Effort
    values: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, what: str, whose: str, value: float) -> None:
        """One round's value."""
        self.values[what, whose].append(value)

    def of(self, what: str, whose: str) -> list[float]:
        """A copy of the values so far."""
        return list(self.values.get((what, whose), ()))

    def beside(self, what: str, unit: str, backend: str, bwrap: str) -> Beside:
        """A backend's own figure beside that of the baselines."""
        return beside(unit, self.of(what, backend), self.of(what, BARE), self.of(what, bwrap))

    def outcomes(self, goal: Goal, what: str, made: Callable[[str], Beside | None] | None = None) -> list[Outcome]:
        """The goal against each backend's values of ``what``; ``made`` says what goes beside."""
        found = []
        for backend in self.effort.backends:
            if values := self.of(what, backend):
                named = replace(goal, target=self.effort.named(goal.target, backend))
                found.append(named.outcome(values, made(backend) if made else None))
        return found
