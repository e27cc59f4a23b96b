"""T7 and T8: what stands idle costs, and how long starts and resets take."""

from __future__ import annotations

import asyncio
import time

from agentenv.farm_client.pool import FarmPool
from agentenv.wire.states import SlotState
from benchmarks.farm import Farm, farms, open_farm
from benchmarks.measure import MIB, Latencies, Outcome, at_most
from benchmarks.processes import SLOT_UIDS, process_tree, pss_bytes
from benchmarks.targets.effort import Effort, Rounds
from benchmarks.workloads import timed_call


async def t7_idle(effort: Effort) -> list[Outcome]:
    """Memory of idle slots (spare shell included) and of the server (its supervisor and launcher beside it)."""
    rounds = Rounds(effort)
    async with farms(effort.backends, effort.slots) as opened:
        for _ in range(effort.rounds):
            for name, farm in opened.items():
                await _idle(rounds, name, farm, effort.slots)
    slot = at_most("T7.slot", "PSS per idle leased slot, spare shell included", "MiB", 1.0)
    server = at_most("T7.server", "PSS of the sandbox server", "MiB", 40)
    servers = rounds.outcomes(server, "server")
    for outcome, backend in zip(servers, (name for name in effort.backends if rounds.of("server", name)), strict=True):
        outcome.details["supervisor_and_launcher"] = rounds.of("others", backend)
    return [*rounds.outcomes(slot, "slot"), *servers]


async def _idle(rounds: Rounds, name: str, farm: Farm, slots: int) -> None:
    if farm.root is None or farm.server is None:
        return  # its memory is another machine's
    async with asyncio.TaskGroup() as group:
        ready = asyncio.Barrier(slots + 1)
        for index in range(slots):
            group.create_task(_idle_session(farm, index, ready))
        await ready.wait()
        await asyncio.sleep(2)  # spare shells are there, and what starting left behind is gone
        tree, server = process_tree(farm.root), farm.server
        of_slots = [p.pid for p in tree if p.uid >= SLOT_UIDS]
        rounds.add("slot", name, sum(map(pss_bytes, of_slots)) / slots / MIB)
        rounds.add("server", name, pss_bytes(server) / MIB)
        others = [p.pid for p in tree if p.uid < SLOT_UIDS and p.pid != server]
        rounds.add("others", name, sum(map(pss_bytes, others)) / MIB)
        await ready.wait()


async def _idle_session(farm: Farm, index: int, ready: asyncio.Barrier) -> None:
    async with farm.executor.open(f"idle-{index}") as session:
        await timed_call(session, "true")
        await ready.wait()
        await ready.wait()


async def t8_start(effort: Effort) -> list[Outcome]:
    """Reset of one slot (release until it is proved clean), and 100 slots from nothing."""
    rounds = Rounds(effort)
    async with farms(effort.backends, 2) as opened:
        for _ in range(effort.rounds):
            for name, farm in opened.items():
                rounds.add("reset", name, await _reset_ms(farm))
    for _ in range(effort.rounds):
        for name in effort.backends:
            started = time.perf_counter()
            async with open_farm(name, 100):
                rounds.add("hundred", name, time.perf_counter() - started)
    return [
        *rounds.outcomes(at_most("T8", "reset of one slot, proof included", "ms", 10), "reset"),
        *rounds.outcomes(at_most("T8.100", "100 slots, from nothing to the first result", "s", 1.0), "hundred"),
    ]


async def _reset_ms(farm: Farm, times: int = 30) -> float:
    seconds = Latencies()
    for index in range(times):
        async with farm.executor.open(f"reset-{index}") as session:
            await timed_call(session, "echo leftover > file")
            started = time.perf_counter()
            await session.aclose()
        while not isinstance(farm.pool, FarmPool) and farm.pool.statistics().slots.get(SlotState.free, 0) < 2:
            await asyncio.sleep(0)  # a FarmPool has returned when the container says so, and hears of slots later
        seconds.seconds.append(time.perf_counter() - started)
    return seconds.p50_ms
