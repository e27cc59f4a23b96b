"""The real ledger and scaler under made-up loads, in simulated time (benchmarks/farmsim), made small."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from agentenv.config import PoolSettings
from benchmarks.farmsim.backend import Starts
from benchmarks.farmsim.loads import Stream, exponential, steady
from benchmarks.farmsim.simulation import Scenario, Simulation, Story
from benchmarks.scaling import LAST_ARRIVAL_S, moves, panel, row, scenarios, table
from benchmarks.svg import page

SMALL = scenarios(0.05)


@pytest.fixture(scope="module")
def stories() -> dict[str, Story]:
    return {scenario.name: Simulation(scenario).run() for scenario in SMALL}


@pytest.mark.parametrize("name", [scenario.name for scenario in SMALL])
def test_the_rules_hold(stories: dict[str, Story], name: str) -> None:
    story = stories[name]
    assert story.leases > 500
    assert story.timed_out == 0
    assert story.most_containers <= story.scenario.settings.max_containers, "the cap was exceeded"
    assert story.lost_to_scaling == 0, "scaling down ended a lease"
    assert moves(story).flaps == 0, "up within the cool-down of a step down, and demand had not grown"
    assert story.goals[-1][1] < max(goal for _, goal, _ in story.goals), "it never went down again"


def test_steady_load_settles(stories: dict[str, Story]) -> None:
    """Its noise alone moves the goal a few times in half an hour."""
    story = stories["steady"]
    assert moves(story).turns <= 7
    settled = [goal for when, goal, _ in story.goals if 300 <= when <= LAST_ARRIVAL_S]
    assert len(settled) <= 20
    assert max(settled) <= 1.5 * min(settled)


def test_waves_and_bursts_are_followed_without_trembling(stories: dict[str, Story]) -> None:
    """Two waves turn the goal three times, four bursts seven times; noise may add a few."""
    assert 3 <= moves(stories["waves"]).turns <= 5
    assert 7 <= moves(stories["bursts"]).turns <= 9


def test_lost_containers_lose_leases_and_nothing_else(stories: dict[str, Story]) -> None:
    story = stories["a container lost every 5 s"]
    assert story.lost > 0
    assert moves(story).turns <= 9


@given(
    slots=st.integers(1, 5),
    minimum=st.integers(0, 4),
    more=st.integers(1, 12),
    idle=st.integers(0, 12),
    cooldown_s=st.sampled_from([1.0, 5.0, 20.0]),
    idle_after_s=st.sampled_from([5.0, 30.0]),
    demand=st.integers(1, 40),
    starts_s=st.floats(0.1, 40),
    lossy=st.booleans(),
    seed=st.integers(0, 1_000),
)
@settings(  # not shrunk: each example is a simulation of three quarters of an hour
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)
def test_any_farm_keeps_the_rules_and_comes_to_rest(
    slots: int,
    minimum: int,
    more: int,
    idle: int,
    cooldown_s: float,
    idle_after_s: float,
    demand: int,
    starts_s: float,
    lossy: bool,
    seed: int,
) -> None:
    farm = PoolSettings(
        min_containers=minimum,
        max_containers=minimum + more,
        target_idle_slots=idle,
        scale_cooldown_s=cooldown_s,
        idle_containers_after_s=idle_after_s,
        acquire_timeout_s=3_000,
    )
    demand = min(demand, max(1, farm.max_containers * slots // 2))
    load = Stream(steady(demand, 20.0), demand / 20.0, exponential(20.0), until_s=300.0)
    starts = Starts(between_s=(starts_s / 2, starts_s), at_once=3)
    scenario = Scenario("any", load, farm, starts, lost_every_s=150.0 if lossy else None, until_s=2_500.0, slots=slots)
    story = Simulation(scenario, seed).run()
    assert story.most_containers <= farm.max_containers
    assert story.lost_to_scaling == 0
    assert moves(story).flaps == 0
    assert story.timed_out == 0
    assert story.samples[-1].demand == 0, "somebody waits for ever"
    warm = min(farm.max_containers, max(minimum, -(-idle // slots)))
    assert warm <= story.samples[-1].goal <= warm + 1, "nobody asks any more, and the farm is not at its rest"
    assert not [when for when, _, _ in story.goals if when > 2_000.0], "it moves though nothing does"


def test_the_plot_and_the_table_show_every_load(stories: dict[str, Story]) -> None:
    drawn = page([panel(story) for story in stories.values()])
    assert drawn.count("<path d=") == len(SMALL) * 4
    assert all(name in drawn and name in table(list(stories.values())) for name in stories)
    assert len(row(stories["waves"])) == table(list(stories.values())).splitlines()[2].count(" | ") + 1
