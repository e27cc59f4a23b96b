from __future__ import annotations

import statistics

import pytest

from agentenv.agent.results import MOST_ERRORS, Results, faults_text, scores_text
from agentenv.agent.transcript import Transcript
from agentenv.errors import Fault


def rollout(score: float | None, fault: Fault = "none", error: str = "") -> Transcript:
    return Transcript(trajectory="t", item_id="i", began_unix_s=0, score=score, fault=fault, error=error)


def test_mean_and_deviation_are_of_the_scored_ones() -> None:
    results, scores = Results(), [0.25, -1.0, 5.5, 1e6]
    for score in scores:
        results.add([rollout(score), rollout(None, "infra", "lost")])
    assert results.mean == pytest.approx(statistics.mean(scores))
    assert results.deviation == pytest.approx(statistics.stdev(scores))
    assert results.metrics() == {
        "items": 8, "scored": 4, "fault_infra": 4, "mean_score": results.mean, "sd_score": results.deviation,
    }  # fmt: skip


def test_nothing_has_no_mean() -> None:
    results = Results()
    results.add([rollout(None, "task", "bug")])
    assert (results.mean, results.deviation, results.groups) == (None, None, 0)
    assert "mean_score" not in results.metrics()


def test_errors_that_differ_in_numbers_only_are_one() -> None:
    results = Results()
    results.add([rollout(None, "infra", f"ContainerLostError: c-{n} at 0x7f{n}ab") for n in range(3)])
    results.add([rollout(None, "task", "TaskError: bug")])
    found = [(error.count, error.text) for error in results.errors.most_frequent()]
    assert found == [(3, "ContainerLostError: c-0 at 0x7f0ab"), (1, "TaskError: bug")]
    assert faults_text(results.faults) == "3 infra, 1 task"


def test_different_errors_are_bounded() -> None:
    results = Results()
    results.add([rollout(None, "task", f"error {'x' * n}") for n in range(MOST_ERRORS + 7)])
    assert (len(results.errors.most_frequent()), results.errors.omitted) == (MOST_ERRORS, 7)


def test_the_scores_of_a_large_group_are_cut() -> None:
    assert scores_text([rollout(1.0), rollout(None), rollout(0.3333)]) == "1 – 0.333"
    assert scores_text([rollout(1.0)] * 20).endswith("1 … (20)")
