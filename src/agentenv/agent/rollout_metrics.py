"""Numbers and readable texts of rollouts for experiment trackers. Pure, independent of any tracker."""

from __future__ import annotations

import json
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from agentenv.agent.jsonable import jsonable
from agentenv.agent.observations import SESSION_TOOL_NAMES, cut_middle
from agentenv.agent.program_totals import ProgramTotals
from agentenv.agent.protocols import Message
from agentenv.agent.transcript import ToolRecord, Transcript

KEPT_VALUES = 10_000
"""Number of newest values that percentiles are computed from."""
TIMES = ("slot_wait_s", "model_s", "total_s")
CALL_FAULTS = ("model", "policy", "task")

READABLE_BYTES = 32 * 1024
MESSAGE_BYTES = 4 * 1024
MOST_TOOL_ERRORS = 50
"""Number of failed calls whose details are kept until a report."""
ERROR_BYTES = 300


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least ``percent`` of the values do not exceed. Raises: ValueError if there are
    none."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


class Series:
    """Count and sum of all values, and the newest values for percentiles."""

    def __init__(self) -> None:
        self.count = 0
        self._total = 0.0
        self._newest: deque[float] = deque(maxlen=KEPT_VALUES)

    def add(self, value: float) -> None:
        """Add one value."""
        self.count += 1
        self._total += value
        self._newest.append(value)

    @property
    def mean(self) -> float:
        """Mean of all values. Raises: ZeroDivisionError if there are none."""
        return self._total / self.count

    def spread(self, name: str) -> dict[str, float]:
        """Mean, median and 95th percentile; empty if there are no values."""
        if not self.count:
            return {}
        newest = tuple(self._newest)
        return {
            f"{name}_mean": self.mean,
            f"{name}_p50": percentile(newest, 50),
            f"{name}_p95": percentile(newest, 95),
        }


@dataclass
class _Gathered:
    """Numbers of the rollouts since the last drain; nothing else of a transcript is kept."""

    rollouts: int = 0
    completeness: Series = field(default_factory=Series)
    scores: Series = field(default_factory=Series)
    ends: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    sequences: int = 0
    trained_tokens: int = 0
    times: dict[str, Series] = field(default_factory=lambda: {name: Series() for name in TIMES})
    turns: Counter[str] = field(default_factory=Counter)
    shortenings: int = 0
    programs: ProgramTotals = field(default_factory=ProgramTotals)
    calls: int = 0
    observed: int = 0
    """Calls that were not an agent program's."""
    errors: int = 0
    timeouts: int = 0
    call_faults: Counter[str] = field(default_factory=Counter)
    latency_s: Series = field(default_factory=Series)

    def add(self, transcript: Transcript) -> None:
        self.rollouts += 1
        if transcript.score is not None:
            self.scores.add(transcript.score)
        self.ends[transcript.finish_reason] += 1
        if transcript.fault != "none":
            self.faults[transcript.fault] += 1
        self.sequences += len(transcript.sequences)
        self.trained_tokens += sum(one.trained for one in transcript.sequences)
        for name, series in self.times.items():
            series.add(transcript.totals.get(name, 0.0))
        self.turns.update(step.outcome for step in transcript.steps)
        self.shortenings += len(transcript.shortenings)
        self.calls += sum(1 for _ in _calls(transcript))
        self.programs.add(transcript)
        for call in observed_calls(transcript):
            self._add_call(call)

    def _add_call(self, call: ToolRecord) -> None:
        self.observed += 1
        self.errors += is_error(call)
        self.timeouts += is_timeout(call)
        if call.result:
            self.call_faults[call.result.fault] += 1
        if call.tool:
            self.latency_s.add(call.ended_s - call.started_s)

    def of_rollouts(self) -> dict[str, float]:
        found = {f"finish_{reason}_rate": count / self.rollouts for reason, count in self.ends.items()}
        found |= {f"rollout_fault_{fault}_rate": count / self.rollouts for fault, count in self.faults.items()}
        if self.scores.count:
            found["score_mean"] = self.scores.mean
        if self.sequences:
            found["sequences_per_rollout"] = self.sequences / self.rollouts
            found["trained_tokens_per_rollout"] = self.trained_tokens / self.rollouts
        for name, series in self.times.items():
            found |= series.spread(name)
        return found

    def of_turns(self) -> dict[str, float]:
        turns = self.turns.total()
        rates = {f"turn_{name}_rate": self.turns[name] / turns if turns else 0.0 for name in ("truncated", "malformed")}
        return {**rates, "turns_per_rollout": turns / self.rollouts, "shortenings": float(self.shortenings)}

    def of_calls(self) -> dict[str, float]:
        found = {"tool_calls": float(self.calls)}
        if not self.observed:
            return found
        found |= {f"call_fault_{fault}_rate": self.call_faults[fault] / self.observed for fault in CALL_FAULTS}
        found["tool_error_rate"] = self.errors / self.observed
        found["tool_timeout_rate"] = self.timeouts / self.observed
        return found | self.latency_s.spread("tool_latency_s")


class RolloutMetrics:
    """Gathers groups until they are drained. Rates and means cover everything since the last drain, percentiles its
    newest :data:`KEPT_VALUES` values, so that memory stays bounded however rarely a trainer drains."""

    def __init__(self) -> None:
        self._gathered = _Gathered()

    def add(self, size: int, transcripts: Sequence[Transcript]) -> None:
        """Add a finished group of which ``size`` members were requested."""
        for transcript in transcripts:
            self._gathered.add(transcript)
        scored = sum(transcript.score is not None for transcript in transcripts)
        self._gathered.completeness.add(scored / size if size else 0.0)

    def drain(self) -> dict[str, float]:
        """Metrics by name; empty if no group has finished since the last drain."""
        gathered, self._gathered = self._gathered, _Gathered()
        if not gathered.rollouts:
            return {}
        completeness = {"group_completeness": gathered.completeness.mean}
        return {
            **completeness,
            **gathered.of_rollouts(),
            **gathered.programs.metrics(),
            **gathered.of_turns(),
            **gathered.of_calls(),
        }


class ToolErrors:
    """Counts failed tool calls until they are drained, with the details of the first :data:`MOST_TOOL_ERRORS`. Those of
    agent programs are not among them: nobody knows how they ended."""

    def __init__(self) -> None:
        self._count = 0
        self._details: list[str] = []

    def add(self, transcripts: Iterable[Transcript]) -> None:
        """Add a finished group."""
        for transcript in transcripts:
            if transcript.program is not None:
                continue
            for step in transcript.steps:
                for call in filter(is_error, step.tool_calls):
                    self._count += 1
                    if len(self._details) < MOST_TOOL_ERRORS:
                        self._details.append(f"[turn {step.index + 1}] {_call_text(call)} -> {_error_text(call)}")

    def drain(self) -> dict[str, int | str]:
        """``tool_errors_count``, and ``tool_error_details`` with a line per call if there were any."""
        count, details, self._count, self._details = self._count, self._details, 0, []
        if not count:
            return {"tool_errors_count": 0}
        if count > len(details):
            details.append(f"and {count - len(details)} more")
        return {"tool_errors_count": count, "tool_error_details": "\n".join(details)}


def _call_text(call: ToolRecord) -> str:
    given = call.arguments if isinstance(call.arguments, str) else json.dumps(jsonable(call.arguments))
    return f"{call.tool}({_one_line(given)})"


def _error_text(call: ToolRecord) -> str:
    result = call.result
    if result is None:
        return "no result"
    if result.fault != "none":
        return f"{result.fault} fault: {_one_line(result.message or result.error or '')}"
    how = "timed out" if is_timeout(call) else f"exit code {result.exit_code}"
    output = _one_line((result.stderr or result.stdout)[-ERROR_BYTES:])
    return f"{how}: {output}" if output else how


def _one_line(text: str) -> str:
    return " ".join(cut_middle(text, ERROR_BYTES).split())


def is_error(call: ToolRecord) -> bool:
    """Whether an observed call failed: a fault, a timeout, or a nonzero exit code."""
    result = call.result
    return result is None or result.fault != "none" or is_timeout(call) or bool(result.exit_code)


def is_timeout(call: ToolRecord) -> bool:
    """Whether a call was ended by its deadline. A wait in a session does not count: what it waited for keeps
    running."""
    return call.result is not None and call.result.timed_out and call.tool not in SESSION_TOOL_NAMES


def observed_calls(transcript: Transcript) -> Iterator[ToolRecord]:
    """The calls whose end and time are known: none of an agent program, which runs them itself."""
    return iter(()) if transcript.program is not None else _calls(transcript)


def _calls(transcript: Transcript) -> Iterator[ToolRecord]:
    return (call for step in transcript.steps for call in step.tool_calls)


ROLLOUT_COLUMNS = (
    "item", "trajectory", "score", "fault", "finish", "turns", "tool_calls", "model_faults", "answer", "conversation",
)  # fmt: skip


def rollout_row(transcript: Transcript, text_of: Callable[[list[Message]], str]) -> list[object]:
    """One row of the table of rollouts, with the columns :data:`ROLLOUT_COLUMNS`. ``text_of``: a conversation for human
    readers."""
    return [
        transcript.item_id,
        transcript.trajectory,
        transcript.score,
        transcript.fault,
        transcript.finish_reason,
        len(transcript.steps),
        sum(1 for _ in _calls(transcript)),
        transcript.model_faults,
        cut_middle(transcript.final_response, MESSAGE_BYTES),
        readable(transcript, text_of),
    ]


def readable(transcript: Transcript, text_of: Callable[[list[Message]], str]) -> str:
    """The conversation for human readers (an agent program's main one), and what ended it if that was a failure."""
    ended = f"\n\n## ended by {transcript.fault}\n{transcript.error}" if transcript.error else ""
    if (program := transcript.program) is not None and program.exit_code:
        ended += f"\n\n## {program.name} ended with {program.exit_code}\n{program.stderr[-ERROR_BYTES:]}"
    return cut_middle(text_of(transcript.messages) + ended, READABLE_BYTES)


def conversation(messages: Sequence[Message]) -> str:
    """Messages for human readers: roles and calls labelled, long parts cut."""
    return "\n\n".join(_message_text(str(message.get("role")), message) for message in messages)


def _message_text(role: str, message: dict[str, object]) -> str:
    lines = [f"## {role}"]
    if content := str(message.get("content") or ""):
        lines.append(cut_middle(content, MESSAGE_BYTES))
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else []:
        function = call["function"]
        lines.append(f"-> {function['name']} {cut_middle(str(function['arguments']), MESSAGE_BYTES)}")
    return "\n".join(lines)
