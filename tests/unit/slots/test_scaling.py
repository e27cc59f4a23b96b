"""The scale policy: examples and random states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import overload

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentenv.slots.counts import Load
from agentenv.slots.scaling import LONGEST_STEP, ContainerLoad, Peak, ScalePolicy, ScaleState

POLICY = ScalePolicy(min_containers=1, max_containers=10, idle_after_s=60, cooldown_s=5)


@dataclass
class Box:
    """One container as the policy sees it."""

    index: int
    free: int
    busy: int = 0
    idle_since: float | None = 0.0
    serving: bool = True
    leaving: bool = False


def _busy(index: int, free: int = 0) -> Box:
    return Box(index, free, 10 - free, None)


def _leaving(index: int, busy: int = 0) -> Box:
    return Box(index, 0, busy, None if busy else 0.0, serving=False, leaving=True)


def _state(
    goal: int, waiting: int, *boxes: Box, changed_at: float = 0.0, freeing: int = 0, peak: int | None = None
) -> ScaleState:
    load = Load(
        waiting=waiting,
        free=sum(box.free for box in boxes),
        freeing=freeing,
        leased=sum(box.busy for box in boxes) - freeing,
        serving=sum(box.serving for box in boxes),
        draining=sum(box.leaving for box in boxes),
        held_up=tuple(box.index for box in boxes if box.leaving and box.busy),
    )
    return ScaleState(goal, load, boxes, 10, changed_at, load.demand if peak is None else peak)


@pytest.mark.parametrize(
    ("waiting", "wanted"), [(0, 1), (1, 2), (10, 2), (11, 3), (90, 10), (10_000, 10)], ids=lambda value: str(value)
)
def test_up_by_demand_at_once_and_never_above_the_maximum(waiting: int, wanted: int) -> None:
    assert POLICY.decide(_state(1, waiting, _busy(0), changed_at=99.9), 100.0) == wanted


def test_one_is_made_when_there_are_none() -> None:
    policy = replace(POLICY, min_containers=0)
    assert policy.decide(_state(0, 0), 1) == 0
    assert policy.decide(_state(0, 1), 1) == 1


def test_what_is_already_coming_is_not_asked_for_twice() -> None:
    assert POLICY.decide(_state(3, 20, _busy(0)), 1) == 3
    assert POLICY.decide(_state(3, 21, _busy(0)), 1) == 4


def test_slots_in_their_reset_are_about_to_be_free() -> None:
    assert POLICY.decide(_state(1, 3, _busy(0), freeing=3), 1) == 1
    assert POLICY.decide(_state(1, 3, _busy(0), freeing=2), 1) == 2


def test_suspect_and_draining_containers_are_made_up_for() -> None:
    silent = Box(0, 0, 3, None)
    assert POLICY.decide(_state(1, 5, silent), 1) == 2
    assert POLICY.decide(_state(1, 5, _leaving(0)), 1) == 1  # its successor is on the way


@pytest.mark.parametrize("waiting", [1, 10, 11])
def test_a_container_that_keeps_its_leases_is_made_up_for(waiting: int) -> None:
    """Its successor comes when its last lease has ended, which may be never: nobody waits for that."""
    wanted = 1 + -(-waiting // 10)
    assert POLICY.decide(_state(1, waiting, _leaving(0, busy=8)), 1_000) == wanted
    assert replace(POLICY, max_containers=2).decide(_state(1, waiting, _leaving(0, busy=8)), 1_000) == 2
    assert replace(POLICY, max_containers=1).decide(_state(1, waiting, _leaving(0, busy=8)), 1_000) == 1


def test_the_cap_counts_containers_on_their_way_out() -> None:
    staying = [_busy(index) for index in range(8)]
    assert POLICY.decide(_state(8, 50, *staying), 1) == 10
    assert POLICY.decide(_state(8, 50, *staying, _leaving(8)), 1) == 9
    assert POLICY.decide(_state(8, 50, *staying, *(_leaving(index) for index in (8, 9, 10))), 1) == 8


def test_target_idle_slots_are_kept_free() -> None:
    policy = replace(POLICY, target_idle_slots=5)
    assert policy.decide(_state(1, 0, _busy(0, free=4)), 1) == 2
    assert policy.decide(_state(1, 0, _busy(0, free=5)), 1) == 1
    assert policy.decide(_state(2, 0, _busy(0, free=5), Box(1, 10)), 1_000) == 1
    assert policy.decide(_state(2, 0, _busy(0, free=4), Box(1, 10)), 1_000) == 2


def test_down_only_after_idle_time_from_the_top() -> None:
    boxes = (_busy(0), Box(1, 10, idle_since=50), Box(2, 10, idle_since=10))
    assert POLICY.decide(_state(3, 0, *boxes), 69) == 3
    assert POLICY.decide(_state(3, 0, *boxes), 70) == 2
    assert POLICY.decide(_state(3, 0, *boxes), 110) == 1


def test_a_busy_container_on_top_keeps_all_below() -> None:
    boxes = (Box(0, 10), Box(1, 10), _busy(2, free=9))
    assert POLICY.decide(_state(3, 0, *boxes), 1_000) == 3


def test_a_silent_container_with_leases_keeps_them() -> None:
    """It is suspect: no new leases, but those it has live on until it answers again or is given up."""
    suspect = Box(2, 0, 1, None, serving=False)
    assert POLICY.decide(_state(3, 0, Box(0, 10), Box(1, 10), suspect), 1_000) == 3
    assert POLICY.decide(_state(3, 0, Box(0, 10), Box(1, 10), replace(suspect, busy=0)), 1_000) == 1


def test_down_only_to_what_the_highest_demand_of_late_would_have_fitted_in() -> None:
    boxes = (_busy(0, free=9), Box(1, 10), Box(2, 10), Box(3, 10))
    assert POLICY.decide(_state(4, 0, *boxes, peak=1), 1_000) == 1
    assert POLICY.decide(_state(4, 0, *boxes, peak=11), 1_000) == 2
    assert POLICY.decide(_state(4, 0, *boxes, peak=31), 1_000) == 4


def test_down_waits_for_the_cool_down_and_keeps_the_minimum() -> None:
    boxes = tuple(Box(index, 10) for index in range(4))
    assert POLICY.decide(_state(4, 0, *boxes, changed_at=996), 1_000) == 4
    assert POLICY.decide(_state(4, 0, *boxes, changed_at=990), 1_000) == 1
    assert replace(POLICY, min_containers=0).decide(_state(4, 0, *boxes), 1_000) == 0


def test_a_big_farm_is_not_made_smaller_by_a_few() -> None:
    policy = replace(POLICY, max_containers=200)

    def left_with(busy: int, policy: ScalePolicy = policy) -> int:
        boxes = [_busy(index) if index < busy else Box(index, 10) for index in range(100)]
        return policy.decide(_state(100, 0, *boxes), 1_000)

    assert left_with(94) == 100, "940 slots in use swing by 60 of themselves"
    assert left_with(93) == 93
    assert left_with(98, replace(policy, min_containers=98)) == 98


def test_a_huge_farm_goes_down_in_steps_whose_decision_is_short() -> None:
    policy = replace(POLICY, max_containers=10_000)
    boxes = [Box(index, 10) for index in range(6_000)]
    watched = Watched(boxes)
    assert policy.decide(replace(_state(6_000, 0, *boxes), containers=watched), 1_000) == 6_000 - LONGEST_STEP
    assert watched.looks <= 5 * LONGEST_STEP


def test_containers_that_never_came_are_given_up_after_the_idle_time() -> None:
    assert POLICY.decide(_state(5, 0, _busy(0), changed_at=950), 1_000) == 5
    assert POLICY.decide(_state(5, 0, _busy(0), changed_at=940), 1_000) == 1


def test_a_container_whose_slots_are_not_known_yet_is_still_coming() -> None:
    starting = Box(1, 0, idle_since=None, serving=False)
    assert POLICY.decide(_state(2, 0, _busy(0), starting, changed_at=950), 1_000) == 2
    assert POLICY.decide(_state(2, 0, _busy(0), starting, changed_at=940), 1_000) == 1


def test_a_lost_container_is_not_given_up_while_its_slots_may_be_wanted_again() -> None:
    """Its leases have ended, those who held them have not asked again yet: the goal must not flap."""
    assert POLICY.decide(_state(2, 0, _busy(0), peak=15), 1_000) == 2
    assert POLICY.decide(_state(2, 0, _busy(0), peak=10), 1_000) == 1


def test_a_goal_out_of_bounds_is_brought_back() -> None:
    assert POLICY.decide(_state(50, 0), 1) == 10
    assert replace(POLICY, min_containers=3).decide(_state(0, 0), 1) == 3


class Watched(Sequence[ContainerLoad]):
    """Counts how many containers are looked at."""

    def __init__(self, boxes: Sequence[Box]) -> None:
        self.boxes = boxes
        self.looks = 0

    def __len__(self) -> int:
        return len(self.boxes)

    @overload
    def __getitem__(self, at: int) -> Box: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Box]: ...
    def __getitem__(self, at: int | slice) -> Box | Sequence[Box]:
        assert isinstance(at, int), "a slice would copy them all"
        self.looks += 1
        return self.boxes[at]


@pytest.mark.parametrize(("waiting", "most"), [(500, 0), (0, 20)])
def test_a_decision_does_not_look_through_the_farm(waiting: int, most: int) -> None:
    boxes = [_busy(index) for index in range(1_000)]
    watched = Watched(boxes)
    state = replace(_state(1_000, waiting, *boxes), containers=watched)
    replace(POLICY, max_containers=2_000).decide(state, 1_000)
    assert watched.looks <= most


boxes_drawn = st.builds(
    lambda kind, free, idle: {
        "busy": Box(0, free, 10 - free, None if free < 10 else idle),
        "suspect": Box(0, 0, 10 - free, None if free < 10 else idle),
        "leaving": Box(0, 0, 10 - free, None if free < 10 else idle, serving=False, leaving=True),
        "starting": Box(0, 0, 0, None, serving=False),
    }[kind],
    st.sampled_from(["busy", "busy", "busy", "suspect", "leaving", "starting"]),
    st.one_of(st.just(10), st.integers(0, 10)),
    st.floats(0, 100),
)


@given(
    drawn=st.lists(boxes_drawn, max_size=12),
    goal=st.integers(0, 15),
    waiting=st.one_of(st.just(0), st.integers(0, 300)),
    changed_at=st.floats(0, 100),
    low=st.integers(0, 5),
    spare=st.integers(0, 20),
    above=st.integers(0, 40),
)
@settings(max_examples=600, deadline=None)
def test_random_states(
    drawn: list[Box], goal: int, waiting: int, changed_at: float, low: int, spare: int, above: int
) -> None:
    policy = ScalePolicy(low, low + 7, 20, target_idle_slots=spare)
    within = max(low, min(low + 7, goal))  # the ledger sees to it that those above are leaving
    boxes = [replace(box, index=at) if at < within else _leaving(at, box.busy) for at, box in enumerate(drawn)]
    state = _state(goal, waiting, *boxes, changed_at=changed_at)
    state = replace(state, peak=state.load.demand + above)
    wanted = policy.decide(state, 100.0)
    bounded = max(policy.min_containers, min(policy.max_containers, goal))
    assert policy.min_containers <= wanted <= policy.max_containers
    assert policy.decide(state, 100.0) == wanted, "the same state twice, two decisions"
    beside = sum(box.leaving and not (box.busy and box.index < bounded) for box in boxes)
    if wanted > bounded:
        assert wanted + beside <= policy.max_containers, "more than the cap, with those leaving"
    staying = sum(box.leaving and box.busy > 0 and box.index < bounded for box in boxes)
    served = state.load.free + 10 * max(0, wanted - state.load.serving - staying)
    assert served >= waiting or wanted + beside >= policy.max_containers, (
        "somebody waits for a container that will not come"
    )
    if waiting:
        assert wanted >= bounded, "taken away while somebody waits"
    if wanted < bounded:
        taken = [one for one in boxes if wanted <= one.index < bounded]
        assert not any(one.busy for one in taken), "a container in use was taken away"
        assert all(100.0 - (one.idle_since or 0) >= 20 for one in taken if one.serving)
        assert 100.0 - changed_at >= policy.cooldown_s
        left = [one for one in boxes if one.index < wanted]
        after = replace(_state(wanted, above, *left), peak=state.peak)
        assert policy.decide(after, 100.0) <= wanted, "down, and up again at a demand that has been there of late"


@given(
    steps=st.lists(st.tuples(st.floats(0, 30), st.integers(0, 100)), min_size=1, max_size=80),
    window_s=st.sampled_from([1.0, 10.0, 60.0]),
)
def test_the_peak_is_that_of_the_window(steps: list[tuple[float, int]], window_s: float) -> None:
    peak, now, seen = Peak(window_s), 0.0, []
    for pause_s, value in steps:
        now += pause_s
        seen.append((now, value))
        found = peak.add(value, now)
        assert found >= max(value for when, value in seen if now - when <= window_s)
        assert found <= max(value for when, value in seen if now - when <= window_s * (1 + 2 / 32) + 1e-6)


def test_peaks_are_kept_in_little_room() -> None:
    peak = Peak(60.0)
    for step in range(100_000):
        peak.add(100_000 - step, step * 0.01)
    assert len(peak._falling) <= 40
