"""F8: what a relay between executor and container costs."""

from __future__ import annotations

from agentenv.containers.handle import ContainerHandle
from benchmarks.measure import Latencies, Outcome, at_least, at_most, beside
from benchmarks.relay import executor_of, relayed_container
from benchmarks.targets.effort import Effort
from benchmarks.workloads import short_calls, trajectories


async def f8_relay(effort: Effort) -> list[Outcome]:
    """One trajectory alone, and all slots at once: through a relay and directly, in turn; always the local backend."""
    lone: list[tuple[float, float]] = []
    rates: list[tuple[float, float]] = []
    cpu_ms: list[float] = []
    async with relayed_container(effort.slots) as ways:
        for _ in range(effort.rounds):
            direct, relayed = [await _load(way, 1, 4 * effort.calls) for way in (ways.direct, ways.relayed)]
            lone.append((direct.p50_ms, relayed.p50_ms))
            direct = await _load(ways.direct, effort.slots, effort.calls)
            before_s = ways.relay_cpu_s()
            relayed = await _load(ways.relayed, effort.slots, effort.calls)
            cpu_ms.append(1e3 * (ways.relay_cpu_s() - before_s) / len(relayed.seconds))
            rates.append((direct.rate, relayed.rate))
    more = at_most("F8", "through a relay: a lone call takes longer by, p50", "ms", 1.0)
    rate = at_least("F8.rate", "through a relay: short calls on all slots, rate against direct", "x", 0.7)
    cpu = at_most("F8.cpu", "a relay's CPU per call, all slots at once", "core-ms", 0.15)
    return [
        more.outcome([b - a for a, b in lone], beside("ms p50", [b for _, b in lone]), direct_ms=[a for a, _ in lone]),
        rate.outcome([b / a for a, b in rates], beside("calls/s", [b for _, b in rates]), direct=[a for a, _ in rates]),
        cpu.outcome(cpu_ms),
    ]


async def _load(handle: ContainerHandle, count: int, calls: int) -> Latencies:
    async with executor_of(handle) as executor:
        return await trajectories(executor, count, short_calls(calls))
