"""N1 and N2: a farm on a cluster, from nothing to its first result, and from one container to ten."""

from __future__ import annotations

import asyncio
import time

from agentenv.config import ExecutorSettings, PoolSettings
from agentenv.executor.tool_executor import ToolExecutor
from agentenv.slots.pool import SlotPool
from agentenv.tools.catalog import ToolCatalog
from agentenv.wire.states import ContainerState
from benchmarks.farm import make_backend, open_farm
from benchmarks.measure import Outcome, at_most
from benchmarks.targets.effort import Effort, Rounds
from benchmarks.workloads import timed_call

CONTAINERS, SLOTS = 10, 2


async def n1_first_result(effort: Effort) -> list[Outcome]:
    """From opening a farm that does not exist yet, with a warm image, to the first command's result."""
    rounds = Rounds(effort)
    for _ in range(effort.rounds):
        for name in effort.backends:
            started = time.perf_counter()
            async with open_farm(name, 10):
                rounds.add("first", name, time.perf_counter() - started)
    return rounds.outcomes(at_most("N1", "from nothing to the first result, warm image", "s", 10), "first")


async def n2_one_to_ten(effort: Effort) -> list[Outcome]:
    """From one container to ten by demand: all their slots leased by as many trajectories, each with a result."""
    rounds = Rounds(effort)
    for _ in range(effort.rounds):
        for name in effort.backends:
            if name == "farm":
                continue  # a farm service grows as its backend does
            rounds.add("ten", name, await _one_to_ten(name))
    return rounds.outcomes(at_most("N2", "1 to 10 containers, until every slot has run a command", "s", 30), "ten")


async def _one_to_ten(backend: str) -> float:
    settings = PoolSettings(min_containers=1, max_containers=CONTAINERS, acquire_timeout_s=120)
    pool = SlotPool(make_backend(backend, SLOTS, memory_mib=512), settings)
    async with pool, ToolExecutor(pool, ToolCatalog.builtin(), ExecutorSettings()) as executor:
        async with executor.open("warm-up") as session:
            await timed_call(session, "true")
        started = time.perf_counter()
        all_there = asyncio.Barrier(CONTAINERS * SLOTS)

        async def one(number: int) -> None:
            async with executor.open(f"t{number}") as session:
                await timed_call(session, "true")
                await all_there.wait()

        async with asyncio.TaskGroup() as group:
            for number in range(CONTAINERS * SLOTS):
                group.create_task(one(number))
        took = time.perf_counter() - started
        assert pool.statistics().containers == {ContainerState.ready: CONTAINERS}, pool
    return took
