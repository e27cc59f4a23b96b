"""The figures of runs, and the difference between two of them. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from agentenv.agent.program_totals import ProgramTotals
from agentenv.agent.transcript import GroupRecord, Transcript
from agentenv.runs.frame import tokens_of
from agentenv.runs.records import Run
from agentenv.runs.statistics import (
    SUCCESS,
    Difference,
    PassAtK,
    estimate_pass_at_k,
    mean_and_standard_error,
    paired_difference,
)

ANY_MODEL: Final = ""
Scores = dict[str, list[float]]
"""The scores of a run by item, in the order of the records."""


@dataclass(frozen=True)
class Prices:
    """What a million tokens cost by model (:data:`ANY_MODEL`: of all others), in whatever currency they are given."""

    prompt: Mapping[str, float] = field(default_factory=dict)
    completion: Mapping[str, float] = field(default_factory=dict)

    def cost(self, model: str, prompt_tokens: int | None, completion_tokens: int | None) -> float | None:
        """None if a price is not given, or no tokens were counted."""
        price_in, price_out = (price.get(model, price.get(ANY_MODEL)) for price in (self.prompt, self.completion))
        if price_in is None or price_out is None or (prompt_tokens, completion_tokens) == (None, None):
            return None
        return ((prompt_tokens or 0) * price_in + (completion_tokens or 0) * price_out) / 1e6


@dataclass(frozen=True)
class Figures:
    """What came of one run so far."""

    run: str
    """Its label."""
    id: str
    model: str
    state: str
    groups: int
    """Those with a score."""
    items: int
    rollouts: int
    scored: int
    mean: float | None
    standard_error: float | None
    """Clustered by item; None for fewer than two items."""
    pass_at_k: list[PassAtK]
    """For k of 1, 2, 4, ... and the number of attempts that half of the items have."""
    faults: dict[str, int]
    """Rollouts by whose fault ended them."""
    prompt_tokens: int | None
    completion_tokens: int | None
    cost: float | None
    took_s: float | None
    """From the first rollout's beginning to the last one's end."""
    rollout_s: float | None
    """Mean duration of a rollout."""
    programs: dict[str, dict[str, int]]
    """By name the agent programs that played (:class:`~agentenv.agent.program_totals.ProgramTotals`); empty for the
    built-in loop."""
    dialects: dict[str, dict[str, int]]
    """Their turns and tokens by the API in which they asked."""


@dataclass(frozen=True)
class Comparison:
    """The second run against the first."""

    first: str
    second: str
    difference: Difference | None
    """None if no item has a score in both."""
    settings: dict[str, tuple[Any, Any]]
    """Settings with different values, by name. Empty if only their digests are known, and differ (``notes``)."""
    notes: list[str]
    """Why the difference may be due to something else than the model: settings, items, attempts."""


@dataclass(frozen=True)
class Summary:
    """What is compared of a run, without its records."""

    run: Run
    """Without groups."""
    figures: Figures
    scores: Scores
    attempts: frozenset[int]
    """How many rollouts its groups were to have."""


def summary_of(run: Run, *, success: float = SUCCESS, prices: Prices | None = None) -> Summary:
    """The run's summary. A rollout with a score of at least ``success`` counts as a success in pass@k."""
    scores = scores_by_item(run)
    return Summary(
        run=replace(run, groups=[]),
        figures=_figures(run, scores, success, prices or Prices()),
        scores=scores,
        attempts=frozenset(group.group_size for group in run.groups),
    )


def scores_by_item(run: Run) -> Scores:
    """Every score of the run by item; an item without any has an empty list."""
    scores: Scores = {}
    for group in run.groups:
        mine = scores.setdefault(group.item_id, [])
        mine.extend(t.score for t in group.trajectories if t.score is not None)
    return scores


def _figures(run: Run, scores: Scores, success: float, prices: Prices) -> Figures:
    played = run.transcripts
    mean, error = mean_and_standard_error(scores.values())
    programs = ProgramTotals()
    for transcript in played:
        programs.add(transcript)
    counted = [tokens_of(transcript) for transcript in played]
    prompt, completion = (_sum([pair[kind] for pair in counted]) for kind in (0, 1))
    estimates = [estimate_pass_at_k(scores.values(), k, success=success) for k in attempts_to_show(scores)]
    return Figures(
        run=run.label,
        id=run.id,
        model=run.model,
        state=run.state,
        groups=sum(group.outcome != "retry" for group in run.groups),
        items=len(scores),
        rollouts=len(played),
        scored=sum(map(len, scores.values())),
        mean=mean,
        standard_error=error,
        pass_at_k=[estimate for estimate in estimates if estimate],
        faults=dict(Counter(t.fault for t in played if t.fault != "none").most_common()),
        prompt_tokens=prompt,
        completion_tokens=completion,
        cost=prices.cost(run.model, prompt, completion),
        took_s=max(map(ended_unix_s, played)) - min(t.began_unix_s for t in played) if played else None,
        rollout_s=sum(ended_unix_s(t) - t.began_unix_s for t in played) / len(played) if played else None,
        **{"programs": {}, "dialects": {}, **programs.document()},
    )


def attempts_to_show(scores: Scores) -> list[int]:
    """1, 2, 4, ... up to the number of scored attempts that at least half of the items have, and that number."""
    attempts = sorted(map(len, scores.values()))
    most = attempts[len(attempts) // 2] if attempts else 0
    shown = [2**power for power in range(most.bit_length()) if 2**power <= most]
    return shown if not most or most in shown else [*shown, most]


def compare(first: Summary, second: Summary) -> Comparison:
    """The second run against the first, item by item."""
    settings = _differing(first.run, second.run)
    return Comparison(
        first=first.run.label,
        second=second.run.label,
        difference=paired_difference(first.scores, second.scores),
        settings=settings,
        notes=[
            *_notes_on_settings(first.run, second.run, settings),
            *_notes_on_programs(first.figures, second.figures),
            *_notes_on_items(first.scores, second.scores),
            *_notes_on_attempts(first.attempts, second.attempts),
        ],
    )


def document(found: Figures | Comparison) -> dict[str, Any]:
    """As in a JSON document."""
    return asdict(found)


def ended_unix_s(transcript: Transcript) -> float:
    """When a rollout ended, as far as is recorded."""
    ends = [phase.ended_s for phase in transcript.phases]
    return transcript.began_unix_s + max([0.0, transcript.totals.get("total_s", 0.0), *ends])


def group_ended_unix_s(group: GroupRecord) -> float:
    """When the last of a group's rollouts ended."""
    return max(map(ended_unix_s, group.trajectories), default=0.0)


def _sum(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _differing(first: Run, second: Run) -> dict[str, tuple[Any, Any]]:
    before, after = (run.manifest.settings if run.manifest else {} for run in (first, second))
    if not before or not after:
        return {}
    names = sorted({*before, *after})
    return {name: (before.get(name), after.get(name)) for name in names if before.get(name) != after.get(name)}


def _notes_on_settings(first: Run, second: Run, differing: Mapping[str, tuple[Any, Any]]) -> list[str]:
    notes = []
    if first.environment != second.environment:
        notes.append(f"the environments differ: {first.environment or '?'}, {second.environment or '?'}")
    if differing:
        notes.append(f"settings differ: {', '.join(f'{name} {a!r} → {b!r}' for name, (a, b) in differing.items())}")
    elif first.settings_digest != second.settings_digest:
        digests = f"{first.settings_digest or '?'}, {second.settings_digest or '?'}"
        notes.append(f"settings differ, and which is not recorded (digests {digests})")
    if (versions := [_version(run) for run in (first, second)])[0] != versions[1]:
        notes.append(f"agentenv's versions differ: {versions[0] or '?'}, {versions[1] or '?'}")
    notes += [
        f"{run.label} is not finished: {run.state}" for run in (first, second) if run.state not in ("", "finished")
    ]
    return notes


def _version(run: Run) -> str:
    return run.facts().get("agentenv", "")


def _notes_on_programs(first: Figures, second: Figures) -> list[str]:
    if not first.rollouts or not second.rollouts:
        return []
    names = [", ".join(sorted(one.programs)) or "the built-in loop" for one in (first, second)]
    return [] if names[0] == names[1] else [f"the agents differ: {names[0]} → {names[1]}"]


def _notes_on_items(before: Scores, after: Scores) -> list[str]:
    scored = [{item for item, scores in side.items() if scores} for side in (before, after)]
    only = [len(scored[0] - scored[1]), len(scored[1] - scored[0])]
    notes = []
    if any(only):
        notes.append(
            f"items differ: {only[0]} have a score in the first alone, {only[1]} in the second alone; the difference "
            "is over the others"
        )
    return notes


def _notes_on_attempts(before: frozenset[int], after: frozenset[int]) -> list[str]:
    if not before or not after or before == after:
        return []
    first, second = (", ".join(map(str, sorted(sizes))) for sizes in (before, after))
    return [f"an item has {first} attempts in the first, {second} in the second"]
