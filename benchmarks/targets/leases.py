"""F1, F2 and F7: what a lease through a farm service costs, alone, in a burst, and when somebody waits for the slot."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from agentenv.config import ContainerSettings, PoolSettings
from agentenv.farm_client.pool import FarmPool
from agentenv.slots.backends.attached import AttachedBackend
from agentenv.slots.backends.base import ContainerBackend
from agentenv.slots.backends.local import LocalBackend
from agentenv.slots.lease import Leases, SlotLease
from agentenv.slots.pool import SlotPool
from benchmarks.attached import attached_farm, fake_containers
from benchmarks.measure import Latencies, Outcome, at_most, beside
from benchmarks.processes import cpu_s
from benchmarks.service import Access, farm_service
from benchmarks.targets.effort import Effort, Rounds

KINDS = ("fake", "local")
SLOTS = 4
"""Of the farm whose slots are free: one at least is clean while another is reset."""
BURST, BURST_CONTAINERS = 1_000, 100


async def f1_lease(effort: Effort) -> list[Outcome]:
    """One lease at a time while a slot is free: through the service and by a pool of this process, in turn. The
    containers, fake ones too, are in processes of their own."""
    rounds = Rounds(effort)
    for kind in KINDS:
        async with _pools(kind) as (far, near):
            await _leases(SLOTS, near, far)  # connections are open, code is loaded
            for _ in range(effort.rounds):
                inside, through = await _leases(2 * effort.calls, near, far)
                rounds.add("ratio", kind, through.p50_ms / inside.p50_ms)
                rounds.add("p50", kind, through.p50_ms)
                rounds.add("p99", kind, through.p99_ms)
                rounds.add("inside p50", kind, inside.p50_ms)
                rounds.add("inside p99", kind, inside.p99_ms)
    return [outcome for kind in KINDS for outcome in _of(rounds, kind)]


def _of(rounds: Rounds, kind: str) -> list[Outcome]:
    name = "F1" if kind == KINDS[0] else f"F1.{kind}"
    ratio = at_most(name, f"a lease through the farm ({kind}), p50 against a pool in process", "x", 2.0)
    p99 = at_most(f"{name}.p99", f"a lease through the farm ({kind}), p99", "ms", 10.0)
    p50_ms, inside_ms = rounds.of("p50", kind), rounds.of("inside p50", kind)
    return [
        ratio.outcome(rounds.of("ratio", kind), beside("ms p50", p50_ms), in_process_p50_ms=inside_ms),
        p99.outcome(rounds.of("p99", kind), in_process_p99_ms=rounds.of("inside p99", kind)),
    ]


@asynccontextmanager
async def _pools(kind: str) -> AsyncIterator[tuple[FarmPool, SlotPool]]:
    """One of a farm service, and one of this process; each has a container."""
    settings = PoolSettings(min_containers=1, max_containers=1, acquire_timeout_s=600)
    async with AsyncExitStack() as stack:
        farm: Access
        backend: ContainerBackend
        if kind == "fake":
            farm = await stack.enter_async_context(attached_farm(1, SLOTS))
            backend = AttachedBackend(await stack.enter_async_context(fake_containers(1, SLOTS)))
        else:
            farm = await stack.enter_async_context(farm_service(kind, 1, SLOTS))
            backend = LocalBackend(ContainerSettings(slots_per_container=SLOTS))
        far = await stack.enter_async_context(farm.pool())
        yield far, await stack.enter_async_context(SlotPool(backend, settings))


async def _leases(times: int, *pools: Leases) -> list[Latencies]:
    """One after the other, of each pool in turn; each is released, and its slot reset, before the next."""
    timed = [Latencies() for _ in pools]
    for number in range(times):
        for pool, latencies in zip(pools, timed, strict=True):
            started = time.perf_counter()
            lease = await pool.lease(f"t{number}")
            latencies.seconds.append(time.perf_counter() - started)
            await lease.release()
    return timed


async def f2_burst(effort: Effort) -> list[Outcome]:
    """1,000 asks at once on 1,000 free fake slots: until all are granted, and the CPU of the service meanwhile.

    F2.whole is ``farm serve`` with the fake backend, whose containers are in the service's process.
    """
    took: list[float] = []
    cpu_ms: list[float] = []
    whole_ms: list[float] = []
    containers, slots = BURST_CONTAINERS, BURST // BURST_CONTAINERS
    async with attached_farm(containers, slots) as alone, farm_service("fake", containers, slots) as service:
        for _ in range(effort.rounds):
            for farm, pid, into in ((alone, alone.pid, cpu_ms), (service, service.process.pid, whole_ms)):
                before_s = cpu_s(pid)
                seconds = await _burst(farm)
                into.append(1e3 * (cpu_s(pid) - before_s) / BURST)
                if farm is alone:
                    took.append(seconds)
                await farm.settled()
    burst = at_most("F2", "1,000 asks at once on 1,000 free fake slots: all granted after", "s", 3.0)
    cpu = at_most("F2.cpu", "the farm service's CPU per lease of that burst, containers elsewhere", "core-ms", 1.5)
    whole = at_most("F2.whole", "the same with the fake containers in the service's process", "core-ms", 1.5)
    return [burst.outcome(took), cpu.outcome(cpu_ms), whole.outcome(whole_ms)]


async def _burst(farm: Access) -> float:
    async with farm.pool() as pool:
        started = time.perf_counter()
        await asyncio.gather(*(pool.lease(f"t{number}") for number in range(BURST)))
        return time.perf_counter() - started


async def f7_handed_on(effort: Effort) -> list[Outcome]:
    """A slot that two runs want by turns: from the container's answer to the release (the slot is reset, proved clean,
    and free) until the run that waits has it."""
    medians = []
    async with farm_service("local", 1, 1) as service, service.pool("a") as one, service.pool("b") as other:
        await _handed_on(service, one, other, 2)
        for _ in range(effort.rounds):
            medians.append((await _handed_on(service, one, other, effort.calls)).p50_ms)
    goal = at_most("F7", "a slot is free: until the next waiter has it, p50", "ms", 5.0)
    return [goal.outcome(medians)]


async def _handed_on(farm: Access, one: FarmPool, other: FarmPool, times: int) -> Latencies:
    timed = Latencies()
    lease = await one.lease("first")
    for number in range(times):
        one, other = other, one
        waiting = asyncio.create_task(_lease_at(one, f"t{number}"))
        await farm.waiting(1)
        await lease.release()
        free_at = time.perf_counter()
        lease, granted_at = await waiting
        timed.seconds.append(max(0.0, granted_at - free_at))  # its news may overtake the answer
    await lease.release()
    return timed


async def _lease_at(pool: FarmPool, trajectory: str) -> tuple[SlotLease, float]:
    return await pool.lease(trajectory), time.perf_counter()
