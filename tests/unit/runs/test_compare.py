"""The figures of runs and their differences."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentenv.runs.compare import Prices, Summary, attempts_to_show, compare, summary_of
from agentenv.runs.records import Run, find, read
from agentenv.runs.statistics import mean_and_standard_error
from tests import run_directories
from tests.run_directories import Played


def run(tmp_path: Path, played: Played, groups: int | None = None) -> Summary:
    (found,) = read(find(run_directories.write(tmp_path, played, groups=groups))[0])
    return summary_of(found)


def test_figures_come_from_the_records(tmp_path: Path) -> None:
    summary = run(tmp_path, Played("a", items=10, faults=0.2))
    found = summary.figures
    assert (found.groups, found.items, found.rollouts, found.state) == (10, 10, 40, "finished")
    assert 0 < sum(found.faults.values()) == found.rollouts - found.scored
    assert (found.mean, found.standard_error) == mean_and_standard_error(summary.scores.values())
    assert summary.run.groups == []
    assert [estimate.k for estimate in found.pass_at_k] == [1, 2, 4]
    assert [estimate.value for estimate in found.pass_at_k] == sorted(e.value for e in found.pass_at_k)
    assert all(estimate.interval.low <= estimate.value <= estimate.interval.high for estimate in found.pass_at_k)
    assert found.prompt_tokens is not None
    assert found.cost is None


def test_nothing_recorded_has_figures_too(tmp_path: Path) -> None:
    found = run(tmp_path, Played("a", state="running"), groups=0).figures
    assert (found.rollouts, found.mean, found.pass_at_k, found.took_s, found.state) == (0, None, [], None, "killed")


@pytest.mark.parametrize(
    ("counts", "shown"), [([], []), ([0, 0], []), ([1, 1], [1]), ([4, 3, 4], [1, 2, 4]), ([6, 6, 1], [1, 2, 4, 6])]
)
def test_ks_are_those_that_half_of_the_items_have(counts: list[int], shown: list[int]) -> None:
    assert attempts_to_show({str(n): [0.0] * count for n, count in enumerate(counts)}) == shown


def test_prices_are_of_a_million_tokens_and_may_be_a_models_own() -> None:
    prices = Prices({"": 2.0, "large": 10.0}, {"": 4.0})
    assert prices.cost("small", 1_000_000, 500_000) == pytest.approx(4.0)
    assert prices.cost("large", 1_000_000, None) == pytest.approx(10.0)
    assert prices.cost("small", None, None) is None
    assert Prices({"": 2.0}).cost("small", 1, 1) is None


def test_a_better_model_is_better_on_the_same_items(tmp_path: Path) -> None:
    small, large = Played("small", skill=0.2, items=40), Played("large", "large-2", skill=0.8, items=40)
    found = compare(run(tmp_path, small), run(tmp_path, large))
    assert found.difference is not None
    assert found.difference.items == 40
    assert found.difference.interval is not None
    assert found.difference.interval.low > 0.2
    assert len(found.difference.better) > 25 > len(found.difference.worse)
    assert (found.settings, found.notes) == ({}, [])


def test_what_else_differs_is_said(tmp_path: Path) -> None:
    one = Played("one", items=6, faults=0)
    two = Played("two", items=8, faults=0, attempts=2, settings={"temperature": 0.0}, state="interrupted")
    found = compare(run(tmp_path, one), run(tmp_path, two))
    assert found.settings == {"temperature": (1.0, 0.0)}
    said = "\n".join(found.notes)
    assert "settings differ: temperature 1.0 → 0.0" in said
    assert "items differ: 0 have a score in the first alone, 2 in the second alone" in said
    assert "an item has 4 attempts in the first, 2 in the second" in said
    assert "two-20260225-061320 is not finished: interrupted" in said


def test_a_digest_tells_that_settings_differ_where_nothing_else_does(tmp_path: Path) -> None:
    runs = [
        summary_of(Run(tmp_path, record=played.record, groups=list(played.groups())))
        for played in (Played("a", items=2), Played("b", items=2, settings={"temperature": 0.0}))
    ]
    assert any("which is not recorded" in note for note in compare(*runs).notes)
