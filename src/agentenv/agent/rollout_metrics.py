"""Numbers and readable texts of rollouts, for trackers. Pure: nothing here knows one."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from agentenv.agent.shown import cut_middle
from agentenv.agent.shown_sessions import SESSION_TOOLS
from agentenv.agent.transcript import ToolRecord, Transcript

READABLE_BYTES = 32 * 1024
MESSAGE_BYTES = 4 * 1024


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least ``percent`` of them do not exceed. Raises: ValueError for none."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


class RolloutMetrics:
    """Gathers groups until they are drained. Rates are of what was gathered since the last draining."""

    def __init__(self) -> None:
        self._transcripts: list[Transcript] = []
        self._completeness: list[float] = []

    def add(self, size: int, transcripts: Sequence[Transcript]) -> None:
        """A finished group of which ``size`` members were asked for."""
        self._transcripts.extend(transcripts)
        scored = sum(transcript.score is not None for transcript in transcripts)
        self._completeness.append(scored / size if size else 0.0)

    def drain(self) -> dict[str, float]:
        """Metrics by name; empty when no group has finished since the last time."""
        transcripts, completeness = self._transcripts, self._completeness
        self._transcripts, self._completeness = [], []
        if not transcripts:
            return {}
        return {
            "group_completeness": _mean(completeness),
            **_of_rollouts(transcripts),
            **_of_turns(transcripts),
            **_of_calls([call for transcript in transcripts for call in _calls(transcript)]),
        }


def _of_rollouts(transcripts: Sequence[Transcript]) -> dict[str, float]:
    scores = [transcript.score for transcript in transcripts if transcript.score is not None]
    ends = Counter(transcript.finish_reason for transcript in transcripts)
    faults = Counter(transcript.fault for transcript in transcripts if transcript.fault != "none")
    found = {f"finish_{reason}_rate": count / len(transcripts) for reason, count in ends.items()}
    found |= {f"rollout_fault_{fault}_rate": count / len(transcripts) for fault, count in faults.items()}
    if scores:
        found["score_mean"] = _mean(scores)
    if any(transcript.sequences for transcript in transcripts):
        found["sequences_per_rollout"] = _mean([len(transcript.sequences) for transcript in transcripts])
        found["trained_tokens_per_rollout"] = _mean(
            [sum(one.trained for one in transcript.sequences) for transcript in transcripts]
        )
    for total in ("slot_wait_s", "model_s", "total_s"):
        found |= _spread(total, [transcript.totals.get(total, 0.0) for transcript in transcripts])
    return found


def _of_turns(transcripts: Sequence[Transcript]) -> dict[str, float]:
    outcomes = Counter(step.outcome for transcript in transcripts for step in transcript.steps)
    turns = sum(outcomes.values())
    rates = {f"turn_{name}_rate": outcomes[name] / turns if turns else 0.0 for name in ("truncated", "malformed")}
    shortened = sum(len(transcript.shortenings) for transcript in transcripts)
    return {**rates, "turns_per_rollout": turns / len(transcripts), "shortenings": float(shortened)}


def _of_calls(calls: Sequence[ToolRecord]) -> dict[str, float]:
    found = {"tool_calls": float(len(calls))}
    if not calls:
        return found
    faults = Counter(call.result.fault for call in calls if call.result)
    found |= {f"call_fault_{fault}_rate": faults[fault] / len(calls) for fault in ("model", "policy", "task")}
    found["tool_error_rate"] = sum(map(is_error, calls)) / len(calls)
    found["tool_timeout_rate"] = sum(map(is_timeout, calls)) / len(calls)
    return found | _spread("tool_latency_s", [call.ended_s - call.started_s for call in calls if call.tool])


def is_error(call: ToolRecord) -> bool:
    """Whether a call did not do what it was for: a fault, a timeout, or a command's nonzero exit code."""
    result = call.result
    return result is None or result.fault != "none" or is_timeout(call) or bool(result.exit_code)


def is_timeout(call: ToolRecord) -> bool:
    """Whether its deadline ended what a call did. A wait in a session ends nothing: what was waited for goes on."""
    return call.result is not None and call.result.timed_out and call.tool not in SESSION_TOOLS


def _calls(transcript: Transcript) -> Iterator[ToolRecord]:
    return (call for step in transcript.steps for call in step.tool_calls)


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    return {f"{name}_mean": _mean(values), f"{name}_p50": percentile(values, 50), f"{name}_p95": percentile(values, 95)}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


ROLLOUT_COLUMNS = (
    "item", "trajectory", "score", "fault", "finish", "turns", "tool_calls", "model_faults", "answer", "conversation",
)  # fmt: skip


def rollout_row(transcript: Transcript) -> list[object]:
    """One row of a table of rollouts, as :data:`ROLLOUT_COLUMNS` names its cells."""
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
        readable(transcript),
    ]


def readable(transcript: Transcript) -> str:
    """The conversation as a person reads it: who said what, calls and reasoning by name, long parts cut."""
    parts = [_said(str(message.get("role")), message) for message in transcript.messages]
    if transcript.error:
        parts.append(f"## ended by {transcript.fault}\n{transcript.error}")
    return cut_middle("\n\n".join(parts), READABLE_BYTES)


def _said(role: str, message: dict[str, object]) -> str:
    lines = [f"## {role}"]
    if content := str(message.get("content") or ""):
        lines.append(cut_middle(content, MESSAGE_BYTES))
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else []:
        function = call["function"]
        lines.append(f"-> {function['name']} {cut_middle(str(function['arguments']), MESSAGE_BYTES)}")
    return "\n".join(lines)
