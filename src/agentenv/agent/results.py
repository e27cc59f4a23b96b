"""The figures of a run so far: how many rollouts have a score, which, and what ended the others. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from agentenv.agent.estimates import Attempts
from agentenv.agent.failure_log import same_kind
from agentenv.agent.parsers import format_of
from agentenv.agent.program_totals import ProgramTotals
from agentenv.agent.transcript import Transcript
from agentenv.errors import InfraError, TaskError

MOST_ERRORS = 100
"""Number of different errors that are distinguished."""
MOST_NAMED = 5
"""Items without a score that are named; further ones are counted."""
MOST_READ = 20
"""Rollouts without a call whose first answer is searched for calls that the model's server did not parse."""
TOKENS = ("prompt", "completion")
ERROR_CHARACTERS = 300
"""Characters of an error that are shown in one line."""


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
class Missing:
    """What a command should have delivered and did not."""

    unscored: int = 0
    """Items that were dropped without a score."""
    named: list[str] = field(default_factory=list)
    """The first of them."""
    faults: Counter[str] = field(default_factory=Counter)
    lost: DistinctErrors = field(default_factory=DistinctErrors)
    """What could not be written, in the singular ("record"), and why."""
    _errors: DistinctErrors = field(default_factory=DistinctErrors)

    def no_score(self, item: str, transcripts: Iterable[Transcript]) -> None:
        """An item has no score, and is not tried again. ``transcripts``: its last rollouts."""
        self.unscored += 1
        if len(self.named) < MOST_NAMED:
            self.named.append(item)
        for transcript in transcripts:
            self.faults[transcript.fault] += 1
            if transcript.error:
                self._errors.add(transcript.fault, transcript.error, transcript.trajectory)

    def rows(self) -> list[tuple[str, str]]:
        """(name, text) of the lines at the end of a command; empty if nothing is missing."""
        dropped = [("dropped", self._unscored_text())] if self.unscored else []
        return dropped + [("lost", text) for text in self._lost_texts()]

    def text(self, *, scores: bool = True) -> str:
        """All of it in one line, with the most frequent error; empty if nothing is missing. Without ``scores``: what
        was lost."""
        texts = [f"lost {text}" for text in self._lost_texts()]
        if scores and self.unscored:
            cause = "".join(f" ({each.count} × {one_line(each.text)})" for each in self._errors.most_frequent()[:1])
            texts.insert(0, self._unscored_text() + cause)
        return "; ".join(texts)

    def check(self, *, scores: bool = True) -> None:
        """Raise the error of a command that ends with something missing (without ``scores``: lost): TaskError if only
        scores are, and all faults were the task's; otherwise InfraError."""
        if text := self.text(scores=scores):
            of_task = set(self.faults) == {"task"} and not self.lost.most_frequent()
            raise (TaskError if of_task else InfraError)(text)

    def _unscored_text(self) -> str:
        more = f" and {self.unscored - len(self.named)} more" if self.unscored > len(self.named) else ""
        return f"{counted(self.unscored, 'item')} without a score: {', '.join(self.named)}{more}"

    def _lost_texts(self) -> list[str]:
        return [f"{counted(each.count, each.fault)}: {one_line(each.text)}" for each in self.lost.most_frequent()]


def counted(number: int, what: str) -> str:
    """``1 item``, ``2 items``."""
    return f"{number} {what}{'s' * (number != 1)}"


def one_line(text: str) -> str:
    """The text in one line of at most ERROR_CHARACTERS."""
    text = " ".join(text.split())
    return text if len(text) <= ERROR_CHARACTERS else f"{text[:ERROR_CHARACTERS]} …"


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
    missing: Missing = field(default_factory=Missing)
    attempts: Attempts | None = None
    """Scores by item, where they are wanted."""
    tokens: Counter[str] = field(default_factory=Counter)
    """``prompt`` and ``completion`` tokens of all turns, as the model's server counts them."""
    programs: ProgramTotals = field(default_factory=ProgramTotals)
    partial: int = 0
    """Rollouts without a score in groups that have one."""
    could_call: int = 0
    """Rollouts that were offered tools, and had a turn."""
    calls: int = 0
    """Tool calls, refused and unreadable ones included."""
    unparsed: str = ""
    """The parser that finds calls in the text of answers, if no call came as one."""
    returned: dict[str, float] | None = None
    """The numbers that an ``evaluate()`` of the environment's own has returned; None with any other command."""
    _sum: Fraction = Fraction(0)
    """Of the scores; exact, so that it does not depend on the order in which groups end."""
    _squares: Fraction = Fraction(0)

    @classmethod
    def of(cls, verb: str) -> Results:
        """Of a command, before its first group: an evaluation has attempts at its items."""
        return cls(attempts=Attempts() if verb == "evaluate" else None)

    def add(self, transcripts: Iterable[Transcript]) -> None:
        """Add a finished group."""
        scored_before, rollouts_before = self.scored, self.rollouts
        for transcript in transcripts:
            self.rollouts += 1
            self._count_calls(transcript)
            self.programs.add(transcript)
            if self.attempts is not None:
                self.attempts.add(transcript.item_id, [] if transcript.score is None else [transcript.score])
            if transcript.fault != "none":
                self.faults[transcript.fault] += 1
            if transcript.error:
                self.errors.add(transcript.fault, transcript.error, transcript.trajectory)
            if transcript.score is not None:
                self.scored += 1
                score = Fraction(transcript.score)
                self._sum += score
                self._squares += score * score
        if self.scored > scored_before:
            self.groups += 1
            self.partial += (self.rollouts - rollouts_before) - (self.scored - scored_before)

    def _count_calls(self, transcript: Transcript) -> None:
        for step in transcript.steps:
            self.calls += len(step.tool_calls)
            for kind in TOKENS:
                if isinstance(count := (step.usage or {}).get(f"{kind}_tokens"), int):
                    self.tokens[kind] += count
        if transcript.tools and transcript.steps:
            self.could_call += 1
            if not self.calls and not self.unparsed and self.could_call <= MOST_READ:
                self.unparsed = format_of(transcript.steps[0].assistant_message)

    @property
    def mean(self) -> float | None:
        """Mean of the scores; None without any."""
        return float(self._sum / self.scored) if self.scored else None

    @property
    def deviation(self) -> float | None:
        """Standard deviation of the scores (of a sample); None for fewer than two."""
        if self.scored < 2:
            return None
        return math.sqrt((self._squares - self._sum * self._sum / self.scored) / (self.scored - 1))

    @property
    def stderr(self) -> float | None:
        """Standard error of the mean, clustered by item; None unless scores are kept by item."""
        return self.attempts.stderr() if self.attempts is not None else None

    def pass_at(self) -> dict[int, tuple[float, int]]:
        """pass@k for every k, and of how many items that is; empty unless there are several attempts at an item."""
        if self.attempts is None or (most := self.attempts.most) < 2:
            return {}
        found = ((k, self.attempts.pass_at(k)) for k in range(1, most + 1))
        return {k: each for k, each in found if each is not None}

    def document(self) -> dict[str, Any]:
        """For programs: what the lines at the end of a command say. ``programs`` and ``dialects`` only where agent
        programs have played."""
        return {
            "groups": self.groups,
            "rollouts": self.rollouts,
            "scored": self.scored,
            "mean": self.mean,
            "sd": self.deviation,
            "stderr": self.stderr,
            "pass_at": {str(k): estimate for k, (estimate, _) in self.pass_at().items()},
            "tokens": dict(self.tokens),
            **self.programs.document(),
            "missing": [{"what": name, "text": text} for name, text in self.missing.rows()],
            "faults": dict(self.faults),
            "errors": [
                {"count": error.count, "fault": error.fault, "text": one_line(error.text)}
                for error in self.errors.most_frequent()
            ],
            "warnings": self.warnings(),
            "returned": self.returned or {},
        }

    def warnings(self) -> list[str]:
        """What is odd about the rollouts: none has called a tool that it was offered."""
        if not self.could_call or self.calls:
            return []
        if not self.unparsed:
            return ["no rollout called a tool"]
        return [
            f"no rollout called a tool; the answers look like unparsed {self.unparsed} calls: start the model's server "
            f"with --enable-auto-tool-choice --tool-call-parser {self.unparsed} (vLLM; --tool-call-parser alone: "
            "SGLang)"
        ]

    def metrics(self) -> dict[str, float]:
        """For a file of an evaluation. Unscored rollouts are counted, but are in no mean."""
        items = self.rollouts if self.attempts is None else self.attempts.items
        found = {"items": float(items), "scored": float(self.scored)}
        if self.mean is not None:
            found["mean_score"] = self.mean
        if self.deviation is not None:
            found["sd_score"] = self.deviation
        if (stderr := self.stderr) is not None:
            found["stderr_score"] = stderr
        found |= {f"pass_at_{k}": estimate for k, (estimate, _) in self.pass_at().items()}
        return found | {f"fault_{fault}": float(count) for fault, count in self.faults.items()}


def faults_text(faults: Counter[str]) -> str:
    """``3 infra, 1 task``; ``none`` if there were none."""
    return ", ".join(f"{count} {fault}" for fault, count in faults.most_common()) or "none"


def scored_text(scored: int, rollouts: int, *, own: bool = False) -> str:
    """``3 of 4 rollouts``. ``own``: an ``evaluate()`` of the environment's own, whose rollouts need not be known."""
    if rollouts:
        return f"{scored} of {counted(rollouts, 'rollout')}"
    return "no rollout is counted: evaluate() is your own" if own else "no rollout has ended"


def scores_text(transcripts: Sequence[Transcript], most: int = 8) -> str:
    """The members' scores in order, a dash for those without, ``most`` at most."""
    shown = " ".join("–" if t.score is None else f"{t.score:.3g}" for t in transcripts[:most])
    return shown + (f" … ({len(transcripts)})" if len(transcripts) > most else "")
