"""The real fair queue under made-up runs, in simulated time (benchmarks/farmsim/sharing.py)."""

from __future__ import annotations

import pytest

from benchmarks.farmsim.sharing import SharedFarm, SharedStory
from benchmarks.sharing import (
    GUARANTEED,
    RECLAIM_AFTER_S,
    SPELLS,
    arrival,
    arrivals_table,
    four,
    groups,
    groups_table,
    guarantee,
    guarantees_table,
    off_by,
    panels,
    shares_table,
    stays,
)
from benchmarks.svg import page


@pytest.fixture(scope="module")
def fair() -> SharedStory:
    return SharedFarm(four()).run()


@pytest.fixture(scope="module")
def lent() -> list[SharedStory]:
    return [SharedFarm(guarantee(after_s)).run() for after_s in (None, RECLAIM_AFTER_S)]


def test_slot_seconds_follow_the_weights(fair: SharedStory) -> None:
    assert fair.leases > 5_000
    assert max(off_by(fair)) < 0.02
    assert fair.idle == 0.0, "a slot was idle although a single slot was asked for"


def test_groups_get_their_share_and_cost_what_they_gather() -> None:
    story = SharedFarm(groups(16)).run()
    assert 0.48 < story.slot_s["groups"] / story.slot_s.total() < 0.54
    assert 0.0 < story.idle < 16 / 200
    assert "groups of 16" in groups_table([story])


@pytest.mark.parametrize("group", [1, 16])
def test_a_run_that_arrives_has_its_share_within_a_mean_stay(group: int) -> None:
    story = SharedFarm(arrival(200, group)).run()
    assert 0.0 < stays(story, "late") < 1.0
    assert "200" in arrivals_table([[story]])


def test_a_guarantee_is_reclaimed_in_time_and_then_left_alone(lent: list[SharedStory]) -> None:
    never, after = lent
    assert never.reclaimed == []
    assert len(never.reached_s["guaranteed"]) == len(after.reached_s["guaranteed"]) == len(SPELLS)
    assert min(never.reached_s["guaranteed"]) > 2 * RECLAIM_AFTER_S
    assert max(after.reached_s["guaranteed"]) <= RECLAIM_AFTER_S + 1.0
    assert 0 < len(after.reclaimed) <= len(SPELLS) * GUARANTEED
    assert all(run != "guaranteed" for _, run in after.reclaimed)
    assert all(any(0 <= at_s - begin < 60.0 for begin, _ in SPELLS) for at_s, _ in after.reclaimed), "to and fro"


def test_plot_and_tables_are_made_of_the_stories(fair: SharedStory, lent: list[SharedStory]) -> None:
    sized, late = SharedFarm(groups(8)).run(), SharedFarm(arrival(200, 1)).run()
    assert "four runs, 200 slots" in shares_table([fair])
    assert guarantees_table(lent).count("\n") == 3
    assert page(panels(fair, sized, late, lent)).count("<g ") == 6
