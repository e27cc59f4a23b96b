"""What happens in a farm's containers: totals that go on when containers and servers end, and recent rates."""

from __future__ import annotations

from typing import Any

import pytest

from agentenv.api.farm_server.activity import COUNTERS, Activity, quantile
from agentenv.config import PoolSettings
from agentenv.containers.handle import ContainerHandle
from agentenv.slots.container_link import RequestLimits
from agentenv.slots.watched_link import WatchedLink
from agentenv.wire.watch import CALL_BOUNDS_S, CallTimes


def link(container: str) -> WatchedLink:
    handle = ContainerHandle(container, 0, "http://127.0.0.1:1", "t" * 32, 2)
    return WatchedLink(handle, None, PoolSettings(), RequestLimits(), lambda: 0.0)


def beat(container: WatchedLink, calls: int, *, running: int = 0, **counters: int) -> None:
    """The container's counters are these now; every call took 20 ms."""
    container.statistics = {**dict.fromkeys(COUNTERS, 0), "calls": calls, "calls_running": running, **counters}
    at = CALL_BOUNDS_S.index(0.025)
    counts = [0] * (len(CALL_BOUNDS_S) + 1)
    counts[at] = calls
    container.call_times = CallTimes(counts=tuple(counts), total_s=0.02 * calls)


def test_what_a_container_counted_before_the_farm_came_is_not_the_farms() -> None:
    one, activity = link("a"), Activity()
    beat(one, 1000)
    activity.read({"a": one})
    assert activity.totals["calls"] == 0
    beat(one, 1005)
    activity.read({"a": one})
    assert activity.totals["calls"] == 5
    assert activity.call_times.count == 5
    assert activity.call_times.total == pytest.approx(0.1)


def test_totals_never_fall_when_servers_are_restarted_and_containers_end() -> None:
    one, two, activity = link("a"), link("b"), Activity()
    for container in (one, two):
        beat(container, 0)
    activity.read({"a": one, "b": two})
    beat(one, 10, slots_lost=1)
    beat(two, 20)
    activity.read({"a": one, "b": two})
    beat(one, 3)
    activity.read({"a": one})
    assert activity.totals["calls"] == 33
    assert activity.totals["slots_lost"] == 1
    beat(two, 7)
    activity.read({"a": one, "b": two})
    assert activity.totals["calls"] == 33


def test_gauges_are_of_the_containers_there_are() -> None:
    one, two, activity = link("a"), link("b"), Activity()
    beat(one, 1, running=2)
    beat(two, 1, running=3)
    activity.read({"a": one, "b": two})
    assert activity.gauges["calls_running"] == 5
    activity.read({"b": two})
    assert activity.gauges["calls_running"] == 3


def test_rates_are_of_ten_seconds_and_faults_of_two() -> None:
    one, activity = link("a"), Activity()
    faults: dict[str, Any] = {}
    for second in range(20):
        beat(one, 50 * second, calls_timed_out=max(0, second - 17))
        activity.read({"a": one})
        if second == 19:
            faults["lease_lost"] = 4
        activity.sample(float(second), 3 * second, faults)
    assert [sample.at_s for sample in activity.samples] == [2.0 * index for index in range(1, 10)]
    latest = activity.samples[-1]
    assert latest.calls_per_s == pytest.approx(50.0)
    assert latest.leases_per_s == pytest.approx(3.0)
    assert latest.call_p50_s == pytest.approx(0.0175)
    assert latest.faults == {"calls_timed_out": 1}
    activity.sample(20.0, 60, faults)
    assert activity.samples[-1].faults == {"lease_lost": 4, "calls_timed_out": 1}


def test_without_calls_there_is_no_time_of_a_call() -> None:
    activity = Activity()
    for second in (0.0, 2.0):
        activity.sample(second, 0, {})
    assert activity.samples[-1].call_p50_s is None
    assert activity.samples[-1].calls_per_s == 0


def test_samples_are_kept_for_five_minutes() -> None:
    activity = Activity()
    for second in range(0, 2000, 2):
        activity.sample(float(second), 0, {})
    assert len(activity.samples) == 150


@pytest.mark.parametrize(
    ("share", "counts", "expected"),
    [
        (0.5, [0, 0, 0, 0], None),
        (0.5, [10, 0, 0, 0], 0.5),
        (0.5, [0, 10, 0, 0], 1.5),
        (0.9, [5, 4, 1, 0], 2.0),
        (0.99, [1, 0, 0, 99], 4.0),
        (1.0, [1, 1, 1, 0], 4.0),
    ],
)
def test_a_percentile_is_estimated_as_prometheus_does(share: float, counts: list[int], expected: float | None) -> None:
    """Bounds 1, 2 and 4: a value is thought evenly spread in its bucket, and above all bounds the highest one."""
    found = quantile(share, (1.0, 2.0, 4.0), counts)
    assert found == (expected if expected is None else pytest.approx(expected))
