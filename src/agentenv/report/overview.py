"""Many runs as the page's data: figures, curves of score, the attempts at every task, errors by kind. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from agentenv.agent.failure_log import same_kind
from agentenv.agent.results import DistinctErrors, counted, one_line
from agentenv.agent.transcript import GroupRecord, Transcript
from agentenv.report.shaping import duration_s
from agentenv.runs.compare import Prices, Summary, compare, document, group_ended_unix_s, summary_of
from agentenv.runs.frame import tokens_of
from agentenv.runs.records import Run
from agentenv.runs.statistics import SUCCESS

CURVE_POINTS: Final = 200
"""Most points of a curve."""
LEAST_WINDOW: Final = 8
"""Groups over which a curve's mean goes, unless a twentieth of the run's groups is more."""
MOST_PAIRS: Final = 300
"""Pairs of runs that are compared; the newest first."""
ANSWER_CHARACTERS: Final = 240


@dataclass(frozen=True)
class RunView:
    """A run on the page, and what others are compared with."""

    summary: Summary
    row: dict[str, Any]
    attempts: dict[str, list[dict[str, Any]]]
    """By item."""
    errors: DistinctErrors

    @property
    def scores(self) -> list[float]:
        """All of them."""
        return [score for scores in self.summary.scores.values() for score in scores]


@dataclass(frozen=True)
class OverviewSettings:
    """``success``: the score from which on an attempt counts in pass@k."""

    success: float = SUCCESS
    prices: Prices = field(default_factory=Prices)


def run_view(run: Run, settings: OverviewSettings, page: str = "") -> RunView:
    """One run's part of the page. ``page``: the name of its own, if it has one."""
    summary = summary_of(run, success=settings.success, prices=settings.prices)
    attempts: dict[str, list[dict[str, Any]]] = {}
    errors = DistinctErrors()
    for group in run.groups:
        rows = attempts.setdefault(group.item_id, [])
        for transcript in group.trajectories:
            rows.append(_attempt(transcript))
            if transcript.error:
                errors.add(transcript.fault, transcript.error, transcript.trajectory)
    return RunView(summary, _row(run, summary, page), attempts, errors)


def overview(views: Sequence[RunView], settings: OverviewSettings, *, inside: bool) -> dict[str, Any]:
    """All of the page's data about these runs. ``inside``: their rollouts are on the same page; otherwise a run has a
    page of its own, ``run/LABEL/``."""
    items = sorted({item for view in views for item in view.attempts})
    pairs = itertools.islice(itertools.combinations(reversed(range(len(views))), 2), MOST_PAIRS)
    return {
        "inside": inside,
        "success": settings.success,
        "runs": [view.row for view in views],
        "items": [{"id": item, "attempts": [view.attempts.get(item, []) for view in views]} for item in items],
        "pairs": {
            f"{first} {second}": document(compare(views[first].summary, views[second].summary))
            for second, first in pairs
        },
        "errors": _errors(views),
    }


def lede(views: Sequence[RunView]) -> str:
    """The page's first line."""
    found = [view.summary.figures for view in views]
    rollouts, items = sum(one.rollouts for one in found), len({item for view in views for item in view.attempts})
    said = f"{counted(rollouts, 'rollout')} of {counted(len(views), 'run')} at {counted(items, 'task')}"
    prompt, completion = (
        sum(getattr(one, kind) or 0 for one in found) for kind in ("prompt_tokens", "completion_tokens")
    )
    tokens = f", {prompt:,} tokens in and {completion:,} out" if prompt or completion else ""
    costs = [one.cost for one in found if one.cost is not None]
    return f"{said}{tokens}{f', which cost {sum(costs):,.2f}' if costs else ''}."


def _row(run: Run, summary: Summary, page: str) -> dict[str, Any]:
    manifest = run.manifest
    return {
        **document(summary.figures),
        "key": run.key,
        "page": page,
        "name": run.name,
        "environment": run.environment,
        "verb": manifest.verb if manifest else "",
        "settings": run.settings_digest,
        "goal": manifest.goal_groups if manifest else None,
        "began": run.began_unix_s,
        "error": manifest.error if manifest else "",
        "problems": run.problems,
        "curve": curve(run),
    }


def curve(run: Run) -> dict[str, Any]:
    """The mean score of the last ``window`` groups with a score, each time one has ended: points of (seconds since the
    run began, groups so far, mean)."""
    scored = sorted((group for group in run.groups if _mean(group) is not None), key=group_ended_unix_s)
    if not scored:
        return {"window": LEAST_WINDOW, "points": []}
    began = run.began_unix_s
    if began is None:
        began = min(t.began_unix_s for group in scored for t in group.trajectories)
    window = max(LEAST_WINDOW, len(scored) // 20)
    means = [mean for group in scored if (mean := _mean(group)) is not None]
    every = max(1, -(-len(scored) // CURVE_POINTS))
    shown = [n for n in range(1, len(scored) + 1) if n % every == 0 or n == len(scored)]
    points = []
    for number in shown:
        last = means[max(0, number - window) : number]
        at = round(group_ended_unix_s(scored[number - 1]) - began, 1)
        points.append([max(0.0, at), number, round(sum(last) / len(last), 4)])
    return {"window": window, "points": points}


def _mean(group: GroupRecord) -> float | None:
    scores = [t.score for t in group.trajectories if t.score is not None]
    return sum(scores) / len(scores) if scores else None


def _attempt(transcript: Transcript) -> dict[str, Any]:
    prompt, completion = tokens_of(transcript)
    return {
        "id": transcript.trajectory,
        "score": transcript.score,
        "fault": transcript.fault,
        "finish": transcript.finish_reason,
        "steps": len(transcript.steps),
        "calls": sum(len(step.tool_calls) for step in transcript.steps),
        "tokens": None if prompt is completion is None else (prompt or 0) + (completion or 0),
        "took": round(duration_s(transcript), 2),
        "answer": one_line(transcript.final_response)[:ANSWER_CHARACTERS],
        "error": one_line(transcript.error)[:ANSWER_CHARACTERS],
    }


def _errors(views: Iterable[RunView]) -> list[dict[str, Any]]:
    """The different errors of all runs with their counts by run, the most frequent first."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    views = list(views)
    for number, view in enumerate(views):
        for error in view.errors.most_frequent():
            key = (error.fault, same_kind(error.text))
            row = rows.setdefault(
                key,
                {
                    "fault": error.fault,
                    "text": one_line(error.text),
                    "counts": [0] * len(views),
                    "run": number,
                    "trajectory": error.trajectory,
                },
            )
            row["counts"][number] += error.count
    return sorted(rows.values(), key=lambda row: -sum(row["counts"]))
