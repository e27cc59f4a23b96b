"""The figures at the top of the page. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from agentenv.agent.jsonable import clean_text
from agentenv.agent.program_totals import ProgramTotals
from agentenv.agent.results import DistinctErrors
from agentenv.agent.rollout_metrics import is_timeout, observed_calls
from agentenv.agent.transcript import GroupRecord, Transcript
from agentenv.report.shaping import bars
from agentenv.runs.frame import tokens_of
from agentenv.runs.records import Run, runs_of

BINS = 10
LONGEST_ERROR = 400
"""Characters of an error shown in the table of errors; all of it is with the rollout."""
PERCENTILES = (50, 90, 99)
KINDS = {
    "slot_wait": "Waiting for a slot",
    "prepare": "Preparing the workspace",
    "model": "Model turns",
    "program": "Agent programs between turns",
    "batch_wait": "Waiting for the batch to be sent",
    "queue": "Queued in the slot",
    "run": "Tools running",
    "transport": "Transport",
    "lost": "Lost calls",
    "verify": "Verifying",
    "release": "Releasing the slot",
}
"""Every kind of time drawn on the page, in the order of a trajectory."""


def percentile(values: Sequence[float], percent: float) -> float:
    """Nearest-rank percentile of values in any order; 0 if there are none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def summarise(groups: Sequence[GroupRecord]) -> dict[str, Any]:
    """Counts, the distribution of scores, faults by kind, latencies, and shares of time."""
    transcripts = [transcript for group in groups for transcript in group.trajectories]
    calls = [call for t in transcripts for step in t.steps for call in step.tool_calls]
    scores = [t.score for t in transcripts if t.score is not None]
    return {
        "runs": [run_row(run) for run in runs_of(groups)],
        "groups": len(groups),
        "outcomes": dict(Counter(group.outcome for group in groups)),
        "spread": sum(_has_spread(group) for group in groups),
        "trajectories": len(transcripts),
        "scored": len(scores),
        "unscored": len(transcripts) - len(scores),
        "mean": sum(scores) / len(scores) if scores else None,
        "axis": score_axis(scores),
        "histogram": _histogram(scores),
        "retries": sum(max(0, t.attempt - 1) for t in transcripts),
        "faults": _faults(transcripts),
        "errors": _errors(transcripts),
        "calls": len(calls),
        "unobserved": len(calls) - sum(1 for t in transcripts for _ in observed_calls(t)),
        **{"programs": {}, "dialects": {}, **_programs(transcripts).document()},
        "tools": dict(Counter(call.tool for call in calls).most_common()),
        "commands_failed": sum(1 for call in calls if call.result and call.result.exit_code),
        "timed_out": sum(map(is_timeout, calls)),
        "oom_killed": sum(1 for call in calls if call.result and call.result.oom_killed),
        "truncated": sum(1 for call in calls if call.result and call.result.truncated),
        "latencies": _latencies(transcripts),
        "time": _time_split(transcripts),
        "span_s": _span_s(transcripts),
        "tokens": _tokens(transcripts),
    }


def run_row(run: Run) -> dict[str, Any]:
    """A run's figures next to those of others with records in the same file."""
    scores = [t.score for t in run.transcripts if t.score is not None]
    return {
        "id": run.id,
        "environment": run.environment,
        "model": run.model,
        "groups": len(run.groups),
        "scored": len(scores),
        "mean": sum(scores) / len(scores) if scores else None,
    }


def _has_spread(group: GroupRecord) -> bool:
    """Whether the members' scores differ: only such a group teaches a policy anything."""
    return len({t.score for t in group.trajectories if t.score is not None}) > 1


def score_axis(scores: Sequence[float]) -> tuple[float, float]:
    """The lowest and the highest score drawn: 0 and 1, unless a score is outside of them."""
    low, high = min(scores, default=0.0), max(scores, default=1.0)
    return (0.0, 1.0) if low >= 0 and high <= 1 else (low, high)


def _histogram(scores: Sequence[float]) -> list[dict[str, Any]]:
    """Between 0 and 1: exactly 0, ten tenths, exactly 1. Otherwise about ten bins with round limits."""
    low, high = score_axis(scores)
    if (low, high) == (0.0, 1.0):
        tenths = [_bin(i / BINS, (i + 1) / BINS, f"<{(i + 1) / BINS:g}") for i in range(BINS)]
        bins = [_bin(0, 0, "0", "none"), *tenths, _bin(1, 1, "1", "full")]
        for score in scores:
            bins[0 if score <= 0 else BINS + 1 if score >= 1 else 1 + min(BINS - 1, int(score * BINS))]["count"] += 1
        return bins
    step = _round_step(high / BINS - low / BINS or abs(high) / BINS)
    first, last = (math.floor(score / step + 1e-9) for score in (low, high))
    bins = [_bin(i * step, (i + 1) * step, f"≥{i * step:.6g}") for i in range(first, last + 1)]
    for score in scores:
        bins[math.floor(score / step + 1e-9) - first]["count"] += 1
    return bins


def _bin(low: float, high: float, short: str, kind: str = "part") -> dict[str, Any]:
    label = f"{low:.6g}–{high:.6g}" if low < high else f"{low:g}"
    return {"label": label, "short": short, "kind": kind, "count": 0}


def _round_step(least: float) -> float:
    """The smallest of 1, 2, 5, 10, ... (times a power of ten) that is not below ``least``."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))


def _errors(transcripts: Iterable[Transcript]) -> list[dict[str, Any]]:
    """The different errors that ended attempts, the most frequent first."""
    found = DistinctErrors()
    for transcript in transcripts:
        if transcript.error:
            found.add(transcript.fault, transcript.error, transcript.trajectory)
        for text in transcript.earlier_attempts:
            found.add("infra", text, transcript.trajectory)
    return [
        {
            "count": error.count,
            "fault": error.fault,
            "text": clean_text(error.text[:LONGEST_ERROR]),
            "trajectory": clean_text(error.trajectory),
        }
        for error in found.most_frequent()
    ]


def _faults(transcripts: Iterable[Transcript]) -> dict[str, dict[str, int]]:
    """Per kind: number of trajectories that ended with it, and number of calls that reported it."""
    ended: Counter[str] = Counter(t.fault for t in transcripts)
    single: Counter[str] = Counter(
        call.result.fault for t in transcripts for step in t.steps for call in step.tool_calls if call.result
    )
    kinds = ("model", "policy", "task", "infra")
    return {kind: {"trajectories": ended[kind], "calls": single[kind]} for kind in kinds if ended[kind] or single[kind]}


def _latencies(transcripts: Sequence[Transcript]) -> list[dict[str, Any]]:
    by_kind: dict[str, list[float]] = {kind: [] for kind in KINDS}
    whole_calls = [call.ended_s - call.started_s for t in transcripts for call in observed_calls(t)]
    for transcript in transcripts:
        for kind, _, start, end in bars(transcript):
            by_kind[kind].append(end - start)
    rows = [("call", "Tool call, total", whole_calls), *((kind, name, by_kind[kind]) for kind, name in KINDS.items())]
    return [
        {
            "kind": kind,
            "name": name,
            "count": len(values),
            "percentiles": [percentile(values, percent) for percent in PERCENTILES],
            "longest": max(values),
        }
        for kind, name, values in rows
        if values
    ]


def _time_split(transcripts: Iterable[Transcript]) -> list[dict[str, Any]]:
    total: Counter[str] = Counter()
    for transcript in transcripts:
        for kind, _, start, end in bars(transcript):
            total[kind] += end - start  # type: ignore[assignment]
    whole = sum(total.values())
    return [
        {"kind": kind, "name": name, "seconds": total[kind], "share": total[kind] / whole}
        for kind, name in KINDS.items()
        if whole and total[kind]
    ]


def _tokens(transcripts: Iterable[Transcript]) -> tuple[int, int] | None:
    """Of prompts and of completions, as the servers have counted them; None if none did."""
    counted = [tokens_of(transcript) for transcript in transcripts]
    known = [(prompt or 0, completion or 0) for prompt, completion in counted if (prompt, completion) != (None, None)]
    return (sum(prompt for prompt, _ in known), sum(completion for _, completion in known)) if known else None


def _programs(transcripts: Iterable[Transcript]) -> ProgramTotals:
    found = ProgramTotals()
    for transcript in transcripts:
        found.add(transcript)
    return found


def _span_s(transcripts: Sequence[Transcript]) -> float:
    """Wall time from the start of the first trajectory to the end of the last one."""
    if not transcripts:
        return 0.0
    ends = [t.began_unix_s + max([0.0, *(phase.ended_s for phase in t.phases)]) for t in transcripts]
    return max(ends) - min(t.began_unix_s for t in transcripts)
