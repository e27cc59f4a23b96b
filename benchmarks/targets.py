"""One function per target of docs/performance.md: measure in this run, compare with this run's baseline."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass

from agentenv.wire.leases import SlotState
from benchmarks.baselines import bare_bash
from benchmarks.farm import Farm, bwrap_per_call_farm, local_farm
from benchmarks.ledger_costs import decisions, moves
from benchmarks.measure import Latencies, Outcome, at_least, at_most, process_tree, pss_bytes
from benchmarks.workloads import mixed_calls, short_calls, timed_call, trajectories

MIB = 1024 * 1024
THINK_S = 0.005
"""The pause of a thinking model, made short: long enough for a spare shell to stand ready."""


@dataclass(frozen=True)
class Effort:
    """How much to measure: rounds per figure, and calls per trajectory."""

    rounds: int = 3
    calls: int = 100
    slots: int = 20


async def t1_short_calls(effort: Effort) -> list[Outcome]:
    """Short calls on all cores beside bare bash and one bwrap per call; client CPU per call (T7)."""
    vs_bare: list[float] = []
    vs_bwrap: list[float] = []
    rates: list[float] = []
    cpu_ms: list[float] = []
    async with local_farm(effort.slots) as farm, bwrap_per_call_farm(effort.slots) as per_call:
        for _ in range(effort.rounds):
            bare = await asyncio.to_thread(bare_bash, 2_000)
            cpu = time.process_time()
            ours = await trajectories(farm.executor, effort.slots, short_calls(effort.calls))
            cpu_ms.append(1e3 * (time.process_time() - cpu) / (len(ours.seconds) + effort.slots))
            bwrap = await trajectories(per_call.executor, effort.slots, short_calls(effort.calls // 4))
            rates.append(ours.rate)
            vs_bare.append(ours.rate / bare.rate)
            vs_bwrap.append(ours.rate / bwrap.rate)
    return [
        at_least("T1", "short calls, rate against bare bash -c true", vs_bare, "x", 0.75, calls_per_s=rates),
        at_least("T1.bwrap", "short calls, rate against one bwrap per call", vs_bwrap, "x", 3.0),
        at_most("T7.client", "client CPU per call", cpu_ms, "core-ms", 0.35),
    ]


async def t2_alone(effort: Effort) -> list[Outcome]:
    """One trajectory alone, with a pause before each call as a model would make; the baseline pauses too."""
    ratios: list[float] = []
    own_ms: list[float] = []
    back_to_back_ms: list[float] = []
    async with local_farm(4) as farm:
        for _ in range(effort.rounds):
            bare = await asyncio.to_thread(bare_bash, 200, 1, think_s=THINK_S)
            ours = await trajectories(farm.executor, 1, short_calls(200, think_s=THINK_S))
            rushed = await trajectories(farm.executor, 1, short_calls(200))
            ratios.append(ours.p50_ms / bare.p50_ms)
            own_ms.append(ours.p50_ms)
            back_to_back_ms.append(rushed.p50_ms)
    details = {"p50_ms": own_ms, "back_to_back_p50_ms": back_to_back_ms}
    return [at_most("T2", "one trajectory alone, p50 against bare bash -c true", ratios, "x", 0.5, **details)]


async def t3_slow_neighbours(effort: Effort) -> list[Outcome]:
    """p99 of short calls when 1 % and 10 % of all calls are ``sleep 5``."""
    ratios: dict[float, list[float]] = {0.01: [], 0.1: []}
    p99_ms: dict[str, list[float]] = {"none": [], "0.01": [], "0.1": []}
    async with local_farm(effort.slots) as farm:
        for seed in range(effort.rounds):
            none = await trajectories(farm.executor, effort.slots, mixed_calls(effort.calls, 0.0, seed))
            p99_ms["none"].append(none.p99_ms)
            for share, found in ratios.items():
                calls = effort.calls if share < 0.05 else effort.calls // 3
                mixed = await trajectories(farm.executor, effort.slots, mixed_calls(calls, share, seed))
                found.append(mixed.p99_ms / none.p99_ms)
                p99_ms[str(share)].append(mixed.p99_ms)
    return [
        at_most("T3.1%", "p99 of short calls with 1 % sleep 5, against none", ratios[0.01], "x", 1.2, p99_ms=p99_ms),
        at_most("T3.10%", "p99 of short calls with 10 % sleep 5, against none", ratios[0.1], "x", 1.2),
    ]


async def t4_oversubscribed(effort: Effort) -> list[Outcome]:
    """Three times as many trajectories as slots; leasing and resetting are in the clock."""
    ratios: list[float] = []
    async with local_farm(effort.slots) as farm:
        for _ in range(effort.rounds):
            alone = await trajectories(farm.executor, effort.slots, short_calls(effort.calls))
            crowd = await trajectories(farm.executor, 3 * effort.slots, short_calls(effort.calls), ready_first=False)
            ratios.append(crowd.rate / alone.rate)
    return [at_least("T4", "3x oversubscribed, rate against T1's (all finish)", ratios, "x", 0.9)]


async def t6_output(effort: Effort) -> list[Outcome]:
    """Complete 1 MiB outputs, and what a call that prints 1 GiB costs the server."""
    rates: list[float] = []
    extra_mib: list[float] = []
    async with local_farm(effort.slots) as farm:
        for _ in range(effort.rounds):
            rates.append(await _output_rate(farm))
            extra_mib.append(await _flood_memory(farm))
    return [
        at_least("T6", "1 MiB outputs, complete", rates, "MiB/s", 150),
        at_most("T6.flood", "extra server memory while a call prints 1 GiB", extra_mib, "MiB", 8),
    ]


async def _output_rate(farm: Farm, sessions: int = 4, calls: int = 25) -> float:
    async def one(index: int) -> None:
        async with farm.executor.open(f"output-{index}") as session:
            await session.call("bash", {"command": "head -c 1048576 /dev/zero | tr '\\0' x > big"})
            await barrier.wait()
            for _ in range(calls):
                result = await session.call("bash", {"command": "cat big"})
                assert len(result.stdout) == MIB, f"{len(result.stdout)} bytes came back"
                assert not result.truncated

    barrier = asyncio.Barrier(sessions + 1)
    async with asyncio.TaskGroup() as group:
        for index in range(sessions):
            group.create_task(one(index))
        await barrier.wait()
        started = time.perf_counter()
    return sessions * calls / (time.perf_counter() - started)


def _server_pid(farm: Farm) -> int:
    return next(p.pid for p in process_tree(farm.pid) if p.uid == 10_000)


async def _flood_memory(farm: Farm) -> float:
    """MiB by which the server's PSS grew at most while one call printed 1 GiB."""
    server = _server_pid(farm)
    before = most = pss_bytes(server)
    async with farm.executor.open("flood") as session:
        call = asyncio.create_task(session.call("bash", {"command": "head -c 1G /dev/zero"}, timeout_s=120))
        while not call.done():
            most = max(most, pss_bytes(server))
            await asyncio.sleep(0.02)
        result = call.result()
        assert result.stdout_dropped_bytes > 1000 * MIB, result.stdout_dropped_bytes
    return (most - before) / MIB


async def t7_idle(effort: Effort) -> list[Outcome]:
    """Memory of idle slots (spare shell included) and of the server (its supervisor and launcher beside it)."""
    per_slot_mib: list[float] = []
    server_mib: list[float] = []
    others_mib: list[float] = []
    async with local_farm(effort.slots) as farm:
        for _ in range(effort.rounds):
            async with asyncio.TaskGroup() as group:
                for index in range(effort.slots):
                    group.create_task(_idle_session(farm, index))
                await asyncio.sleep(2)
                tree = process_tree(farm.pid)
                slots = [p for p in tree if p.uid >= 20_000]
                per_slot_mib.append(sum(pss_bytes(p.pid) for p in slots) / effort.slots / MIB)
                server_mib.append(pss_bytes(_server_pid(farm)) / MIB)
                others_mib.append(sum(pss_bytes(p.pid) for p in tree if p.uid == 0) / MIB)
    return [
        at_most("T7.slot", "PSS per idle leased slot, spare shell included", per_slot_mib, "MiB", 1.0),
        at_most("T7.server", "PSS of the sandbox server", server_mib, "MiB", 40, supervisor_and_launcher=others_mib),
    ]


async def _idle_session(farm: Farm, index: int) -> None:
    async with farm.executor.open(f"idle-{index}") as session:
        await timed_call(session, "true")
        await asyncio.sleep(3)


async def t8_start(effort: Effort) -> list[Outcome]:
    """Reset of one slot (release until it is proved clean), and 100 slots from nothing."""
    reset_ms: list[float] = []
    hundred_s: list[float] = []
    async with local_farm(2) as farm:
        for _ in range(effort.rounds):
            reset_ms.append(await _reset_ms(farm))
    for _ in range(effort.rounds):
        started = time.perf_counter()
        async with local_farm(100):
            hundred_s.append(time.perf_counter() - started)
    return [
        at_most("T8", "reset of one slot, proof included", reset_ms, "ms", 10),
        at_most("T8.100", "100 slots, from process start to the first result", hundred_s, "s", 1.0),
    ]


async def _reset_ms(farm: Farm, times: int = 30) -> float:
    seconds = Latencies()
    for index in range(times):
        async with farm.executor.open(f"reset-{index}") as session:
            await timed_call(session, "echo leftover > file")
            started = time.perf_counter()
            await session.aclose()
        await _all_free(farm)
        seconds.seconds.append(time.perf_counter() - started)
    return seconds.p50_ms


async def _all_free(farm: Farm) -> None:
    while farm.pool.statistics().slots.get(SlotState.free, 0) < 2:
        await asyncio.sleep(0)


NEIGHBOURS = {
    "fork bomb": "bomb() { bomb | bomb & }; bomb; sleep 60",
    "memory hog": "while :; do tail /dev/zero; done",
    "disk filler": "while :; do cat /dev/zero > full-$RANDOM; rm -f full-*; done",
    "cpu hog": "for i in 1 2 3 4 5 6 7 8; do (while :; do :; done) & done; wait",
    "output flood": "yes",
}


async def t9_bad_neighbour(effort: Effort) -> list[Outcome]:
    """Short calls of 4 slots with one bad neighbour at a time, against the same without."""
    outcomes = []
    async with local_farm(8) as farm:
        for name, command in NEIGHBOURS.items():
            p50: list[float] = []
            p99: list[float] = []
            for _ in range(effort.rounds):
                quiet = await trajectories(farm.executor, 4, short_calls(effort.calls, think_s=0.01))
                loud = await _beside(farm, command, effort)
                p50.append(loud.p50_ms / quiet.p50_ms)
                p99.append(loud.p99_ms / quiet.p99_ms)
            outcomes.append(at_most(f"T9.{name}.p50", f"neighbours' p50 beside a {name}", p50, "x", 1.5))
            outcomes.append(at_most(f"T9.{name}.p99", f"neighbours' p99 beside a {name}", p99, "x", 3.0))
    return outcomes


async def _beside(farm: Farm, command: str, effort: Effort) -> Latencies:
    async with farm.executor.open("bad") as bad:
        call = asyncio.create_task(bad.call("bash", {"command": command}, timeout_s=120))
        await asyncio.sleep(1)
        latencies = await trajectories(farm.executor, 4, short_calls(effort.calls, think_s=0.01))
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
    return latencies


async def scaling(effort: Effort) -> list[Outcome]:
    """One decision of the scale policy, and the slowest move of the ledger, at 10,000 slots."""
    decided, moved = [], []
    for _ in range(effort.rounds):
        decided.append(decisions(20))
        moved.append({**moves(500), **{f"{name}, 10,000 waiting": ms for name, ms in moves(500, 10_000).items()}})
    slowest = [max(found.values()) for found in decided], [max(found.values()) for found in moved]
    return [
        at_most("S1", "a scaling decision over 1,000 containers, p99", slowest[0], "ms", 1.0, p99_ms=decided[-1]),
        at_most(
            "S1.ledger", "the slowest move of the ledger at 10,000 slots, p99", slowest[1], "ms", 1.0, p99_ms=moved[-1]
        ),
    ]


TARGETS = {
    "T1": t1_short_calls,
    "T2": t2_alone,
    "T3": t3_slow_neighbours,
    "T4": t4_oversubscribed,
    "T6": t6_output,
    "T7": t7_idle,
    "T8": t8_start,
    "T9": t9_bad_neighbour,
    "S1": scaling,
}
CORES = os.cpu_count() or 1
