"""The figures of a run so far: how many rollouts have a score, which, and what ended the others. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from agentenv.agent.failure_log import same_kind
from agentenv.agent.transcript import Transcript

MOST_ERRORS = 100
"""Number of different errors that are told apart."""


@dataclass
class DistinctError:
    """Errors that differ in nothing but numbers. ``text`` and ``trajectory`` are of the first one."""

    fault: str
    text: str
    trajectory: str
    count: int = 0


@dataclass
class DistinctErrors:
    """The different errors that ended rollouts; further ones than :data:`MOST_ERRORS` are only counted."""

    omitted: int = 0
    _by_kind: dict[tuple[str, str], DistinctError] = field(default_factory=dict)

    def add(self, fault: str, text: str, trajectory: str) -> None:
        """One more error."""
        key = (fault, same_kind(text))
        if key not in self._by_kind and len(self._by_kind) >= MOST_ERRORS:
            self.omitted += 1
            return
        self._by_kind.setdefault(key, DistinctError(fault, text, trajectory)).count += 1

    def most_frequent(self) -> list[DistinctError]:
        """All of them, the most frequent first."""
        return sorted(self._by_kind.values(), key=lambda error: -error.count)


@dataclass
class Results:
    """Gathers rollouts; keeps numbers and texts of errors only."""

    groups: int = 0
    """Groups with a scored member."""
    rollouts: int = 0
    scored: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    """Rollouts by whose fault ended them."""
    errors: DistinctErrors = field(default_factory=DistinctErrors)
    _mean: float = 0.0
    _squares: float = 0.0
    """Sum of squared differences from the mean (Welford's algorithm)."""

    def add(self, transcripts: Iterable[Transcript]) -> None:
        """Add a finished group."""
        scored_before = self.scored
        for transcript in transcripts:
            self.rollouts += 1
            if transcript.fault != "none":
                self.faults[transcript.fault] += 1
            if transcript.error:
                self.errors.add(transcript.fault, transcript.error, transcript.trajectory)
            if transcript.score is not None:
                self.scored += 1
                before = transcript.score - self._mean
                self._mean += before / self.scored
                self._squares += before * (transcript.score - self._mean)
        self.groups += self.scored > scored_before

    @property
    def mean(self) -> float | None:
        """Mean of the scores; None without any."""
        return self._mean if self.scored else None

    @property
    def deviation(self) -> float | None:
        """Standard deviation of the scores (of a sample); None for fewer than two."""
        return math.sqrt(self._squares / (self.scored - 1)) if self.scored > 1 else None

    def metrics(self) -> dict[str, float]:
        """For a file of an evaluation. Unscored rollouts are counted, but are in no mean."""
        found = {"items": float(self.rollouts), "scored": float(self.scored)}
        if self.mean is not None:
            found["mean_score"] = self.mean
        if self.deviation is not None:
            found["sd_score"] = self.deviation
        return found | {f"fault_{fault}": float(count) for fault, count in self.faults.items()}


def faults_text(faults: Counter[str]) -> str:
    """``3 infra, 1 task``; ``none`` if there were none."""
    return ", ".join(f"{count} {fault}" for fault, count in faults.most_common()) or "none"


def scores_text(transcripts: Sequence[Transcript], most: int = 8) -> str:
    """The members' scores in order, a dash for those without, ``most`` at most."""
    shown = " ".join("–" if t.score is None else f"{t.score:.3g}" for t in transcripts[:most])
    return shown + (f" … ({len(transcripts)})" if len(transcripts) > most else "")
