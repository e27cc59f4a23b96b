"""T3 and T4: slow calls among short ones, and more trajectories than slots."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from benchmarks.baselines import bare_bash
from benchmarks.farm import BWRAP, Farm, farms
from benchmarks.measure import Latencies, Outcome, at_least, at_most
from benchmarks.targets.effort import BARE, Effort, Rounds
from benchmarks.workloads import mixed_calls, short_calls, slow_of, trajectories

SHARES = {"1%": 0.01, "10%": 0.1}
CROWD = 3
"""Trajectories per slot."""

Mixed = Callable[[int, int], Awaitable[Latencies]]
"""Runs so many calls per trajectory of which so many are slow; the latencies of the short ones."""


async def t3_slow_neighbours(effort: Effort) -> list[Outcome]:
    """p99 of short calls when 1 % and 10 % of all calls are ``sleep 5``, against none, each with its own kind."""
    rounds = Rounds(effort)
    async with farms((*effort.backends, BWRAP), effort.slots) as opened:
        for seed in range(effort.rounds):
            await _mixes(rounds, BARE, effort, _bare_mix(effort, seed))
            for name, farm in opened.items():
                await _mixes(rounds, name, effort, _farm_mix(farm, effort, seed))
    return [outcome for share in SHARES for outcome in _of_share(rounds, share)]


def _of_share(rounds: Rounds, share: str) -> list[Outcome]:
    goal = at_most(f"T3.{share}", f"p99 of short calls with {share} sleep 5, against none", "x", 1.2)
    found = rounds.outcomes(goal, share, lambda backend: rounds.beside(share, "x", backend, BWRAP))
    for outcome, backend in zip(found, rounds.effort.backends, strict=True):
        for whose in (backend, BARE, BWRAP):
            outcome.details[f"p99_ms, {whose}"] = {
                "none": rounds.of("p99 none", whose),
                share: rounds.of(f"p99 {share}", whose),
            }
    return found


def _bare_mix(effort: Effort, seed: int) -> Mixed:
    async def run(calls: int, slow: int) -> Latencies:
        total = calls * effort.slots
        return await asyncio.to_thread(bare_bash, total, effort.slots, slow=slow, seed=seed)

    return run


def _farm_mix(farm: Farm, effort: Effort, seed: int) -> Mixed:
    async def run(calls: int, slow: int) -> Latencies:
        return await trajectories(farm.executor, effort.slots, mixed_calls(calls, slow, seed))

    return run


async def _mixes(rounds: Rounds, whose: str, effort: Effort, run: Mixed) -> None:
    none = await run(effort.calls, 0)
    rounds.add("p99 none", whose, none.p99_ms)
    for name, share in SHARES.items():
        calls = effort.calls if share < 0.05 else max(2, effort.calls // 3)
        mixed = await run(calls, slow_of(calls, share))
        rounds.add(f"p99 {name}", whose, mixed.p99_ms)
        rounds.add(name, whose, mixed.p99_ms / none.p99_ms)


async def t4_oversubscribed(effort: Effort) -> list[Outcome]:
    """Three times as many trajectories as slots; leasing and resetting are in the clock."""
    rounds = Rounds(effort)
    crowd = CROWD * effort.slots
    async with farms((*effort.backends, BWRAP), effort.slots) as opened:
        for _ in range(effort.rounds):
            bare = await asyncio.to_thread(bare_bash, crowd * effort.calls, crowd)
            rounds.add("rate", BARE, bare.rate)
            for name, farm in opened.items():
                calls = effort.calls // 4 if name == BWRAP else effort.calls
                alone = await trajectories(farm.executor, effort.slots, short_calls(calls))
                all_of_them = await trajectories(farm.executor, crowd, short_calls(calls), ready_first=False)
                rounds.add("rate", name, all_of_them.rate)
                rounds.add("of alone", name, all_of_them.rate / alone.rate)
    goal = at_least("T4", "3x oversubscribed, rate against T1's (all finish)", "x", 0.9)
    return rounds.outcomes(goal, "of alone", lambda backend: rounds.beside("rate", "calls/s", backend, BWRAP))
