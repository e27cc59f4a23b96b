"""F3, F4, F10: what runs that share a farm get, in simulated time, and what a pick costs."""

from __future__ import annotations

from benchmarks.farmsim.sharing import SharedFarm
from benchmarks.measure import Outcome, at_most, percentile
from benchmarks.sharing import arrival, costs, crowd, four, off_by, stays
from benchmarks.targets.effort import Effort


async def f3_shares(effort: Effort) -> list[Outcome]:
    """Slot-seconds against the fair shares: the worst of 50 runs, and of four on a small farm."""
    many = [SharedFarm(crowd(seed)).run() for seed in range(1, effort.rounds + 1)]
    few = [SharedFarm(four(), seed).run() for seed in range(effort.rounds)]
    crowded = at_most("F3", "50 runs on 10,000 slots (simulated): the worst off its fair share", "%", 10.0)
    small = at_most("F3.four", "four runs on 200 slots (simulated): the worst off its fair share", "%", 10.0)
    return [
        goal.outcome([100 * max(off_by(story)) for story in stories], idle=[story.idle for story in stories])
        for goal, stories in ((crowded, many), (small, few))
    ]


async def f4_arrival(effort: Effort) -> list[Outcome]:
    """A run that arrives on a full farm; the slowest of large and small farms, single slots and groups."""
    slowest = [
        max(stays(SharedFarm(arrival(slots, group), seed).run(), "late") for slots in (200, 2_000) for group in (1, 16))
        for seed in range(effort.rounds)
    ]
    goal = at_most("F4", "a run arrives on a full farm (simulated): 90 % of its share after", "mean stays", 1.0)
    return [goal.outcome(slowest)]


async def f10_pick(effort: Effort) -> list[Outcome]:
    """One pick of the fair queue, and its other moves."""
    rounds = [{name: 1e3 * percentile(took, 0.99) for name, took in costs(3000).items()} for _ in range(effort.rounds)]
    goal = at_most("F10", "who is next of 100 runs and 10,000 asks, p99", "ms", 0.2)
    return [goal.outcome([found["pick"] for found in rounds], p99_ms=rounds[-1])]
