"""Closed-loop workloads: each trajectory leases a slot and calls, one call after the other."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable

from agentenv.executor.session import ToolSession
from agentenv.executor.tool_executor import ToolExecutor
from benchmarks.measure import Latencies

Work = Callable[[ToolSession], Awaitable[list[float]]]


async def timed_call(session: ToolSession, command: str, timeout_s: float = 60.0) -> float:
    """Seconds of one call over the whole path; a call that fails fails the benchmark."""
    started = time.perf_counter()
    result = await session.call("bash", {"command": command}, timeout_s=timeout_s)
    if result.fault != "none" or result.exit_code != 0:
        raise RuntimeError(f"{command!r} failed: {result}")
    return time.perf_counter() - started


def short_calls(calls: int, *, think_s: float = 0.0) -> Work:
    """``calls`` times ``true``, with a pause before each."""

    async def work(session: ToolSession) -> list[float]:
        seconds = []
        for _ in range(calls):
            if think_s:
                await asyncio.sleep(think_s)
            seconds.append(await timed_call(session, "true"))
        return seconds

    return work


def mixed_calls(calls: int, slow_share: float, seed: int) -> Work:
    """Short calls of which ``slow_share`` are ``sleep 5``; only the short ones are timed."""
    chance = random.Random(seed)

    async def work(session: ToolSession) -> list[float]:
        seconds = []
        for _ in range(calls):
            if chance.random() < slow_share:
                await timed_call(session, "sleep 5")
            else:
                seconds.append(await timed_call(session, "true"))
        return seconds

    return work


async def trajectories(executor: ToolExecutor, count: int, work: Work, *, ready_first: bool = True) -> Latencies:
    """Run ``count`` trajectories at once. ``ready_first``: the clock starts when all have their slot."""
    ready = asyncio.Barrier(count + 1) if ready_first else None

    async def one(index: int) -> list[float]:
        async with executor.open(f"t{index}") as session:
            if ready is not None:
                await timed_call(session, "true")
                await ready.wait()
            seconds = await work(session)
            ended.append(time.perf_counter())
            return seconds

    ended: list[float] = []
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(index)) for index in range(count)]
        if ready is not None:
            await ready.wait()
        started = time.perf_counter()
    return Latencies([second for task in tasks for second in task.result()], max(ended) - started)
