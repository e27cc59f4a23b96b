"""T1 and T2: short calls on all cores, and one trajectory alone."""

from __future__ import annotations

import asyncio
import time

from benchmarks.baselines import bare_bash
from benchmarks.farm import BWRAP, Farm, farms
from benchmarks.measure import Latencies, Outcome, at_least, at_most
from benchmarks.targets.effort import BARE, Effort, Rounds
from benchmarks.workloads import short_calls, trajectories

THINK_S = 0.005
"""The pause of a thinking model, made short: long enough for a spare shell to stand ready."""


async def t1_short_calls(effort: Effort) -> list[Outcome]:
    """Short calls on all cores beside bare bash and one bwrap per call; client CPU per call (T7)."""
    rounds = Rounds(effort)
    async with farms((*effort.backends, BWRAP), effort.slots) as opened:
        for _ in range(effort.rounds):
            bare = await asyncio.to_thread(bare_bash, 20 * effort.calls)
            bwrap = await _closed_loop(opened[BWRAP], effort, effort.calls // 4)
            rounds.add("rate", BARE, bare.rate)
            rounds.add("rate", BWRAP, bwrap.rate)
            for backend in effort.backends:
                cpu = time.process_time()
                ours = await _closed_loop(opened[backend], effort, effort.calls)
                cpu_ms = 1e3 * (time.process_time() - cpu) / (len(ours.seconds) + effort.slots)
                rounds.add("client", backend, cpu_ms)
                rounds.add("rate", backend, ours.rate)
                rounds.add("of bare", backend, ours.rate / bare.rate)
                rounds.add("of bwrap", backend, ours.rate / bwrap.rate)
    rate = at_least("T1", "short calls, rate against bare bash -c true", "x", 0.75)
    against = at_least("T1.bwrap", "short calls, rate against one bwrap per call", "x", 3.0)
    return [
        *rounds.outcomes(rate, "of bare", lambda backend: rounds.beside("rate", "calls/s", backend, BWRAP)),
        *rounds.outcomes(against, "of bwrap", lambda backend: rounds.beside("rate", "calls/s", backend, BWRAP)),
        *rounds.outcomes(at_most("T7.client", "client CPU per call", "core-ms", 0.35), "client"),
    ]


async def _closed_loop(farm: Farm, effort: Effort, calls: int) -> Latencies:
    return await trajectories(farm.executor, effort.slots, short_calls(calls))


async def t2_alone(effort: Effort) -> list[Outcome]:
    """One trajectory alone, with a pause before each call as a model would make; the baselines pause too."""
    rounds = Rounds(effort)
    calls = 2 * effort.calls
    async with farms((*effort.backends, BWRAP), 4) as opened:
        for _ in range(effort.rounds):
            bare = await asyncio.to_thread(bare_bash, calls, 1, think_s=THINK_S)
            rounds.add("p50", BARE, bare.p50_ms)
            for name, farm in opened.items():
                paused = await trajectories(farm.executor, 1, short_calls(calls, think_s=THINK_S))
                rounds.add("p50", name, paused.p50_ms)
                rounds.add("of bare", name, paused.p50_ms / bare.p50_ms)
            for backend in effort.backends:
                rushed = await trajectories(opened[backend].executor, 1, short_calls(calls))
                rounds.add("back to back", backend, rushed.p50_ms)
    goal = at_most("T2", "one trajectory alone, p50 against bare bash -c true", "x", 0.5)
    found = rounds.outcomes(goal, "of bare", lambda backend: rounds.beside("p50", "ms p50", backend, BWRAP))
    for outcome, backend in zip(found, effort.backends, strict=True):
        outcome.details["back_to_back_p50_ms"] = rounds.of("back to back", backend)
    return found
