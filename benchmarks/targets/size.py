"""F9: memory and CPU of a farm service as large as one should be."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack, aclosing, suppress

from agentenv.farm_client.client import FarmClient
from agentenv.wire import farm as wire
from benchmarks.attached import AttachedFarm, attached_farm
from benchmarks.measure import MIB, Outcome, at_most
from benchmarks.processes import cpu_s, rss_bytes
from benchmarks.targets.effort import Effort

CONTAINERS, SLOTS, RUNS = 1_000, 10, 50
WAITING = 1_000
"""Asks that wait when all slots are held."""
HOUR_S = 3600.0
"""Of leases: nobody renews them here."""


async def f9_size(effort: Effort) -> list[Outcome]:
    """1,000 containers of 10 slots, in other processes: all slots free, and held by 50 runs that wait for more."""
    watched_s = 20.0 if effort.calls >= 100 else 5.0
    async with attached_farm(1, SLOTS) as small:
        least_mib = rss_bytes(small.pid) / MIB
    async with attached_farm(CONTAINERS, SLOTS) as farm, AsyncExitStack() as stack:
        free_mib = rss_bytes(farm.pid) / MIB
        shares = [await _cpu_percent(farm, watched_s) for _ in range(effort.rounds)]
        clients = [await stack.enter_async_context(farm.client(f"r{number}")) for number in range(RUNS)]
        news = [asyncio.create_task(_follow(client)) for client in clients]
        for number, client in enumerate(clients):
            await _ask(client, number, farm.slots // RUNS)
        async with asyncio.timeout(60):
            while await farm.held() < farm.slots:
                await asyncio.sleep(0.1)
        held_percent = await _cpu_percent(farm, watched_s)
        for number, client in enumerate(clients):
            await _ask(client, number, WAITING // RUNS, "more")
        waiting_percent = await _cpu_percent(farm, watched_s)
        full_mib = rss_bytes(farm.pid) / MIB
        for task in news:
            task.cancel()
        await asyncio.gather(*news, return_exceptions=True)
    size = f"{CONTAINERS:,} containers, {CONTAINERS * SLOTS:,} slots"
    memory = at_most("F9", f"memory (RSS) of a farm service: {size}, all held by {RUNS} runs", "MiB", 150.0)
    watch = at_most("F9.watch", f"CPU of a farm service that only watches: {size}", "% of a core", 3.0)
    return [
        memory.outcome([full_mib], one_container_mib=least_mib, all_free_mib=free_mib, waiting_asks=WAITING),
        watch.outcome(shares, all_held=held_percent, all_held_and_1000_waiting=waiting_percent),
    ]


async def _cpu_percent(farm: AttachedFarm, seconds: float) -> float:
    before_s, began = cpu_s(farm.pid), time.perf_counter()
    await asyncio.sleep(seconds)
    return 100 * (cpu_s(farm.pid) - before_s) / (time.perf_counter() - began)


async def _ask(client: FarmClient, number: int, count: int, what: str = "first") -> None:
    names = [f"{what}-{number}-{index}" for index in range(count)]
    asks = [
        wire.Ask(request_id=f"{name:->32}", trajectories=(name,), tags=wire.AskTags(environment="bench"), ttl_s=HOUR_S)
        for name in names
    ]
    await client.ask(asks)


async def _follow(client: FarmClient) -> None:
    with suppress(asyncio.CancelledError):
        async with aclosing(client.news()) as news:
            async for _ in news:
                pass
