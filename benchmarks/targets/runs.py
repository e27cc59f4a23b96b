"""F3.real and F11: runs that share a real farm: what each gets, and what one can do to another."""

from __future__ import annotations

import asyncio
import math
import random
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from agentenv.executor.tool_executor import ToolExecutor
from agentenv.tools.catalog import ToolCatalog
from benchmarks.bad_run import DEEDS
from benchmarks.measure import Latencies, Outcome, at_most
from benchmarks.service import Access, farm_service
from benchmarks.targets.effort import Effort, Rounds
from benchmarks.workloads import short_calls, timed_call, trajectories

WEIGHTS: Mapping[str, int] = {"a": 1, "b": 1, "c": 2, "d": 4}
CONTAINERS, SLOTS = 10, 20
TRAJECTORIES = 1_000
CALLS, SIGMA = 4, 0.6
"""Calls of a trajectory, and the spread of its lognormal stay."""
MEDIAN_STAY_S, SHORT_STAY_S = 8.0, 2.0
GOOD, BAD_SLOTS, THINK_S = 4, 4, 0.01


@dataclass(frozen=True)
class Stay:
    """A slot held by a run, by the clock of this process."""

    run: str
    began: float
    ended: float


async def f3_real(effort: Effort) -> list[Outcome]:
    """1,000 trajectories of four runs on the 200 slots of a farm service: as many of each run as its weight says. They
    find a full farm, so that all wait when the first slot becomes free."""
    median_s = MEDIAN_STAY_S if effort.calls >= 100 else SHORT_STAY_S
    more = "".join(f'[runs."{run}"]\nweight = {weight}\n' for run, weight in WEIGHTS.items())
    async with farm_service("local", CONTAINERS, SLOTS, more) as service:
        stays = await _four_runs(service, median_s, random.Random(1))
    assert len(stays) == TRAJECTORIES
    off = off_by_weight(stays, WEIGHTS, settled_s=median_s * math.exp(SIGMA**2 / 2))
    what = f"{TRAJECTORIES:,} trajectories of four runs on {CONTAINERS * SLOTS} slots: the worst off its weight"
    percent = {run: round(100 * one, 2) for run, one in off.items()}
    return [at_most("F3.real", what, "%", 10.0).outcome([max(map(abs, percent.values()))], off_percent=percent)]


async def _four_runs(service: Access, median_s: float, chance: random.Random) -> list[Stay]:
    stays: list[Stay] = []

    async def one(executor: ToolExecutor, run: str, number: int, stay_s: float) -> None:
        async with executor.open(f"{run}-{number}") as session:
            began = time.perf_counter()
            for _ in range(CALLS):
                await asyncio.sleep(stay_s / CALLS)
                await timed_call(session, "echo line >> log; wc -l < log")
        stays.append(Stay(run, began, time.perf_counter()))

    async with AsyncExitStack() as stack:
        executors = {run: await stack.enter_async_context(_executor(service, run)) for run in WEIGHTS}
        async with service.pool("before") as before, asyncio.TaskGroup() as group:
            await asyncio.gather(*(before.lease(f"before-{number}") for number in range(service.slots)))
            for run, weight in WEIGHTS.items():
                for number in range(TRAJECTORIES * weight // sum(WEIGHTS.values())):
                    stay_s = chance.lognormvariate(math.log(median_s), SIGMA)
                    group.create_task(one(executors[run], run, number, stay_s))
            await service.waiting(TRAJECTORIES)
            await before.aclose()
    return stays


def off_by_weight(stays: Sequence[Stay], weights: Mapping[str, int], settled_s: float) -> dict[str, float]:
    """How far the slot-seconds of each run are from its weight, as a share of what it should have: between
    ``settled_s`` after the first lease and the first moment at which nothing of some run waits any more."""
    begin = min(stay.began for stay in stays) + settled_s
    end = min(max(stay.began for stay in stays if stay.run == run) for run in weights)
    assert begin < end, "the runs were not oversubscribed for long enough"
    slot_s = dict.fromkeys(weights, 0.0)
    for stay in stays:
        slot_s[stay.run] += max(0.0, min(stay.ended, end) - max(stay.began, begin))
    share = {run: slot_s[run] / sum(slot_s.values()) for run in weights}
    return {run: share[run] * sum(weights.values()) / weight - 1 for run, weight in weights.items()}


@asynccontextmanager
async def _executor(service: Access, run: str) -> AsyncIterator[ToolExecutor]:
    async with service.pool(run) as pool, ToolExecutor(pool, ToolCatalog.builtin()) as executor:
        yield executor


async def f11_neighbour_run(effort: Effort) -> list[Outcome]:
    """Short calls of one run while another, in the same container and in a process of its own, does whatever it may
    through its own leases; against the same calls without it. The same with the other run in another container of this
    machine says how much of it is the machine's, whose cores both share."""
    rounds = Rounds(effort)
    farms = (("same", farm_service("local", 1, GOOD + BAD_SLOTS)), ("other", farm_service("local", 2, GOOD)))
    async with AsyncExitStack() as stack:
        services = {where: await stack.enter_async_context(farm) for where, farm in farms}
        executors = {
            where: await stack.enter_async_context(_executor(service, "good")) for where, service in services.items()
        }
        for deed in DEEDS:
            for _ in range(effort.rounds):
                for where, executor in executors.items():
                    before = await _good(executor, effort)
                    async with _bad_run(services[where], deed):
                        loud = await _good(executor, effort)
                    after = await _good(executor, effort)  # the machine's own pace drifts
                    quiet = Latencies(before.seconds + after.seconds)
                    for which in ("p50", "p99"):
                        quiet_ms, loud_ms = (getattr(each, f"{which}_ms") for each in (quiet, loud))
                        rounds.add(f"{deed} quiet {which}", where, quiet_ms)
                        rounds.add(f"{deed} loud {which}", where, loud_ms)
                        rounds.add(f"{deed} ratio {which}", where, loud_ms / quiet_ms)
    return [outcome for deed in DEEDS for outcome in _beside_deed(rounds, deed)]


def _beside_deed(rounds: Rounds, deed: str) -> Iterator[Outcome]:
    """p99 against none, and p50 against the same from another container: what is left is the container's own."""
    p99 = at_most(f"F11.{deed}", f"a run's p99 beside another run's {deed} in its container", "x", 3.0)
    p50 = at_most(f"F11.{deed}.p50", f"the same p50, against {deed} in another container", "x", 1.5)
    same, other = (rounds.of(f"{deed} ratio p50", where) for where in ("same", "other"))
    for goal, which, values in (
        (p99, "p99", rounds.of(f"{deed} ratio p99", "same")),
        (p50, "p50", [here / there for here, there in zip(same, other, strict=True)]),
    ):
        details: dict[str, Any] = {
            f"{which}_ms": rounds.of(f"{deed} loud {which}", "same"),
            f"alone_{which}_ms": rounds.of(f"{deed} quiet {which}", "same"),
            "in_another_container_x": rounds.of(f"{deed} ratio {which}", "other"),
        }
        yield goal.outcome(values, None, **details)


async def _good(executor: ToolExecutor, effort: Effort) -> Latencies:
    return await trajectories(executor, GOOD, short_calls(2 * effort.calls, think_s=THINK_S))


@asynccontextmanager
async def _bad_run(service: Access, deed: str) -> AsyncIterator[None]:
    """The other run at work; it ends with the block."""
    arguments = ("-m", "benchmarks.bad_run", service.url, service.token, deed, str(BAD_SLOTS))
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdin=PIPE, stdout=PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        said = await process.stdout.readline()
        if said != b"at work\n":
            raise RuntimeError(f"the other run said {said!r}")
        yield
    finally:
        process.stdin.close()
        await process.wait()
