"""Closed-loop workloads: each trajectory leases a slot and calls, one call after the other."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable

from agentenv.executor.session import ToolSession
from agentenv.executor.tool_executor import ToolExecutor
from benchmarks.measure import Latencies

Work = Callable[[ToolSession, int], Awaitable[list[float]]]
"""One trajectory's calls, given its number; the seconds of those that are timed."""


async def timed_call(session: ToolSession, command: str, timeout_s: float = 60.0) -> float:
    """Seconds of one call over the whole path; a call that fails fails the benchmark."""
    started = time.perf_counter()
    result = await session.call("bash", {"command": command}, timeout_s=timeout_s)
    if result.fault != "none" or result.exit_code != 0:
        raise RuntimeError(f"{command!r} failed: {result}")
    return time.perf_counter() - started


def short_calls(calls: int, *, think_s: float = 0.0) -> Work:
    """``calls`` times ``true``, with a pause before each."""

    async def work(session: ToolSession, _: int) -> list[float]:
        seconds = []
        for _ in range(calls):
            if think_s:
                await asyncio.sleep(think_s)
            seconds.append(await timed_call(session, "true"))
        return seconds

    return work


def slow_of(calls: int, share: float) -> int:
    """How many of so many calls are slow: at least one, unless none is to be."""
    return max(1, round(calls * share)) if share else 0


def mixed_calls(calls: int, slow: int, seed: int) -> Work:
    """Short calls of which ``slow``, at random places, are ``sleep 5``; only the short ones are timed."""

    async def work(session: ToolSession, number: int) -> list[float]:
        slow_ones = set(random.Random(f"{seed}/{number}").sample(range(calls), slow))
        seconds = []
        for index in range(calls):
            if index in slow_ones:
                await timed_call(session, "sleep 5")
            else:
                seconds.append(await timed_call(session, "true"))
        return seconds

    return work


def whole_outputs(calls: int, size_bytes: int) -> Work:
    """``calls`` times the file that make_output() makes, every output complete."""

    async def work(session: ToolSession, _: int) -> list[float]:
        seconds = []
        for _ in range(calls):
            started = time.perf_counter()
            result = await session.call("bash", {"command": "cat big"})
            assert len(result.stdout) == size_bytes, f"{len(result.stdout)} bytes came back: {result.stderr[:200]}"
            assert not result.truncated
            seconds.append(time.perf_counter() - started)
        return seconds

    return work


def make_output(size_bytes: int) -> str:
    """The command that makes what whole_outputs() prints."""
    return f"head -c {size_bytes} /dev/zero | tr '\\0' x > big"


async def trajectories(
    executor: ToolExecutor, count: int, work: Work, *, ready_first: bool = True, prepare: str = "true"
) -> Latencies:
    """Run ``count`` trajectories at once. ``ready_first``: the clock starts when each has its slot and has run
    ``prepare`` there."""
    ready = asyncio.Barrier(count + 1) if ready_first else None

    async def one(index: int) -> list[float]:
        async with executor.open(f"t{index}") as session:
            if ready is not None:
                await timed_call(session, prepare)
                await ready.wait()
            seconds = await work(session, index)
            ended.append(time.perf_counter())
            return seconds

    ended: list[float] = []
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(index)) for index in range(count)]
        if ready is not None:
            await ready.wait()
        started = time.perf_counter()
    return Latencies([second for task in tasks for second in task.result()], max(ended) - started)
