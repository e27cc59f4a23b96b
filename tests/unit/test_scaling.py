"""The scale policy: examples and random loads."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentenv.slots.scaling import ScalePolicy, ScaleState

POLICY = ScalePolicy(min_containers=1, max_containers=10, idle_after_s=60, cooldown_s=5)


@dataclass
class Load:
    index: int
    free: int
    busy: int = 0
    idle_since: float | None = 0.0
    serving: bool = True


def _state(goal: int, waiting: int, *loads: Load, per: int = 10, changed_at: float = 0.0) -> ScaleState:
    return ScaleState(goal, waiting, loads, per, changed_at)


def _busy(index: int, free: int = 0) -> Load:
    return Load(index, free, 10 - free, None)


@pytest.mark.parametrize(
    ("waiting", "wanted"), [(0, 1), (1, 2), (10, 2), (11, 3), (95, 10), (10_000, 10)], ids=lambda value: str(value)
)
def test_up_by_demand_at_once_and_never_above_the_maximum(waiting: int, wanted: int) -> None:
    assert POLICY.decide(_state(1, waiting, _busy(0), changed_at=99.9), 100.0) == wanted


def test_what_is_already_coming_is_not_asked_for_twice() -> None:
    assert POLICY.decide(_state(3, 20, _busy(0)), 1) == 3
    assert POLICY.decide(_state(3, 21, _busy(0)), 1) == 4


def test_suspect_and_draining_containers_are_made_up_for() -> None:
    silent = Load(0, 0, 3, None)
    assert POLICY.decide(_state(1, 5, silent), 1) == 2
    draining = Load(0, 0, 3, None, serving=False)
    assert POLICY.decide(_state(1, 5, draining), 1) == 1  # its successor is on the way


def test_target_idle_slots_are_kept_free() -> None:
    policy = replace(POLICY, target_idle_slots=5)
    assert policy.decide(_state(1, 0, _busy(0, free=4)), 1) == 2
    assert policy.decide(_state(1, 0, _busy(0, free=5)), 1) == 1


def test_down_only_after_idle_time_from_the_top() -> None:
    loads = (_busy(0), Load(1, 10, idle_since=50), Load(2, 10, idle_since=10))
    assert POLICY.decide(_state(3, 0, *loads), 69) == 3
    assert POLICY.decide(_state(3, 0, *loads), 70) == 2
    assert POLICY.decide(_state(3, 0, *loads), 110) == 1


def test_a_busy_container_on_top_keeps_all_below() -> None:
    loads = (Load(0, 10, idle_since=0), Load(1, 10, idle_since=0), _busy(2, free=9))
    assert POLICY.decide(_state(3, 0, *loads), 1_000) == 3


def test_down_waits_for_the_cool_down_and_keeps_the_minimum() -> None:
    loads = tuple(Load(index, 10, idle_since=0) for index in range(4))
    assert POLICY.decide(_state(4, 0, *loads, changed_at=996), 1_000) == 4
    assert POLICY.decide(_state(4, 0, *loads, changed_at=990), 1_000) == 1
    assert replace(POLICY, min_containers=0).decide(_state(4, 0, *loads), 1_000) == 0


def test_containers_that_never_came_are_given_up_after_the_idle_time() -> None:
    assert POLICY.decide(_state(5, 0, _busy(0), changed_at=950), 1_000) == 5
    assert POLICY.decide(_state(5, 0, _busy(0), changed_at=940), 1_000) == 1


def test_a_goal_out_of_bounds_is_brought_back() -> None:
    assert POLICY.decide(_state(50, 0), 1) == 10
    assert replace(POLICY, min_containers=3).decide(_state(0, 0), 1) == 3


loads = st.builds(
    lambda free, busy, serving, idle: (0 if not serving else free, busy, serving, idle),
    st.integers(0, 10),
    st.integers(0, 10),
    st.booleans(),
    st.floats(0, 100),
)


@given(
    loads=st.lists(loads, max_size=12),
    goal=st.integers(0, 15),
    waiting=st.integers(0, 300),
    changed_at=st.floats(0, 100),
    low=st.integers(0, 5),
    spare=st.integers(0, 20),
)
@settings(max_examples=400, deadline=None)
def test_random_states(
    loads: list[tuple[int, int, bool, float]], goal: int, waiting: int, changed_at: float, low: int, spare: int
) -> None:
    policy = ScalePolicy(low, low + 7, 20, target_idle_slots=spare)
    containers = [Load(n, f, b, None if b else i, s) for n, (f, b, s, i) in enumerate(loads)]
    state = ScaleState(goal, waiting, containers, 10, changed_at)
    wanted = policy.decide(state, 100.0)
    bounded = max(policy.min_containers, min(policy.max_containers, goal))
    assert policy.min_containers <= wanted <= policy.max_containers
    assert policy.decide(state, 100.0) == wanted, "the same state twice, two decisions"
    if waiting:
        assert wanted >= bounded, "taken away while somebody waits"
    if wanted < bounded:
        taken = [one for one in containers if wanted <= one.index < bounded]
        assert not any(one.busy for one in taken), "a container in use was taken away"
        assert all(100.0 - (one.idle_since or 0) >= 20 for one in taken if one.serving)
        left = [one for one in containers if one.index < wanted]
        after = ScaleState(wanted, 0, left, 10, 0.0)
        assert policy.decide(after, 100.0) <= wanted, "down, and up again at the same demand"


@pytest.mark.parametrize("seed", range(20))
def test_steady_demand_settles(seed: int) -> None:
    """Whatever came before, a demand that stays the same ends in a goal that stays the same."""
    rng = random.Random(seed)
    policy = ScalePolicy(1, 20, 10, target_idle_slots=rng.randrange(5), cooldown_s=5)
    goal, changed_at, idle = 1, 0.0, dict.fromkeys(range(20), 0.0)
    goals: list[int] = []
    for step in range(400):
        now = float(step)
        demand = rng.randrange(200) if step < 200 else 57
        left, containers = demand, []
        for index in range(goal):
            busy = min(10, left)
            left -= busy
            if busy:
                idle[index] = now
            containers.append(Load(index, 10 - busy, busy, None if busy else idle[index]))
        wanted = policy.decide(ScaleState(goal, left, containers, 10, changed_at), now)
        if wanted != goal:
            goal, changed_at = wanted, now
        goals.append(goal)
    assert len(set(goals[-150:])) == 1
    assert goals[-1] * 10 >= 57 + policy.target_idle_slots
