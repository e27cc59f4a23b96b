"""``python -m benchmarks.soak``: lease and release until something drifts.

Each cycle leases a slot, runs a command that leaves files and a process behind, and releases. After a warm-up
processes, descriptors, mounts, memory and slots are noted; at the end none may have grown beyond LIMITS.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import gc
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from agentenv.executor.tool_executor import ToolExecutor
from agentenv.farm_client.pool import FarmPool
from agentenv.slots.pool import SlotPool
from agentenv.wire.states import SlotState
from benchmarks.farm import BACKENDS, Farm, open_farm
from benchmarks.measure import MIB
from benchmarks.processes import SLOT_UIDS, descriptors, mounts, mounts_here, process_tree, pss_bytes

LITTER = '[ -z "$(ls -A)" ] || exit 9; echo $$ > file; (sleep 300 &); mkdir -p a/b; ln -s / a/root'
"""What each lease leaves behind; it fails where the one before it left something."""
SETTLE_S = 20.0
"""The longest until every slot is free again, and no process of a released one is left."""


@dataclass(frozen=True)
class Footprint:
    """What a farm of one container holds, at rest. Ours: this process. Theirs: the container's, slots included."""

    our_memory_mib: float
    our_descriptors: int
    our_tasks: int
    container_memory_mib: float
    container_descriptors: int
    container_processes: int
    container_mounts: int
    slot_processes: int
    cgroups: int
    slots_not_free: int


LIMITS = Footprint(
    our_memory_mib=24,
    our_descriptors=4,
    our_tasks=4,
    container_memory_mib=24,
    container_descriptors=8,
    container_processes=2,
    container_mounts=0,
    slot_processes=0,
    cgroups=0,
    slots_not_free=0,
)
"""How far each may grow over any number of cycles: what allocators and caches keep, not what a leak adds."""


def footprint(farm: Farm) -> Footprint:
    """As it is now. Counts of a container that runs elsewhere are 0."""
    tree = process_tree(farm.root) if farm.root is not None else []
    statistics = farm.pool.statistics()
    ours, slots = os.getpid(), [process for process in tree if process.uid >= SLOT_UIDS]
    gc.collect()
    return Footprint(
        our_memory_mib=pss_bytes(ours) / MIB,
        our_descriptors=descriptors(ours),
        our_tasks=len(asyncio.all_tasks()),
        container_memory_mib=sum(pss_bytes(process.pid) for process in tree) / MIB,
        container_descriptors=sum(descriptors(process.pid) for process in tree),
        container_processes=len(tree) - len(slots),
        container_mounts=mounts(process.pid for process in tree) + mounts_here(farm.container),
        slot_processes=len(slots),
        cgroups=_cgroups(farm.container),
        slots_not_free=statistics.slots_total - statistics.slots.get(SlotState.free, 0),
    )


def _cgroups(container: str) -> int:
    """Control groups of the container on this machine, in every hierarchy."""
    own = [path for path, _, _ in os.walk("/sys/fs/cgroup") if Path(path).name == container]
    return sum(1 for top in own for _ in os.walk(top))


def drift(before: Footprint, after: Footprint, limits: Footprint = LIMITS) -> dict[str, tuple[float, float]]:
    """What grew beyond its limit: before and after, by name."""
    found = {}
    for field in dataclasses.fields(Footprint):
        was, now = getattr(before, field.name), getattr(after, field.name)
        if now - was > getattr(limits, field.name):
            found[field.name] = (was, now)
    return found


async def cycles(executor: ToolExecutor, count: int, at_once: int, done: Callable[[], None] = lambda: None) -> None:
    """So many leases, each with one command that litters, ``at_once`` at any moment."""
    numbers = iter(range(count))

    async def some() -> None:
        for number in numbers:
            async with executor.open(f"soak-{number}") as session:
                result = await session.call("bash", {"command": LITTER})
                if result.exit_code != 0:
                    raise AssertionError(f"cycle {number}: {result}")
            done()

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(some())


async def settle(pool: SlotPool | FarmPool) -> None:
    """Until every slot is free. Raises TimeoutError after SETTLE_S."""
    async with asyncio.timeout(SETTLE_S):
        while (now := pool.statistics()).slots.get(SlotState.free, 0) < now.slots_total:
            await asyncio.sleep(0.05)


async def at_rest(farm: Farm, wanted: Footprint | None = None) -> Footprint:
    """The footprint once all slots are free, and (within SETTLE_S) once it is no more than ``wanted`` allows."""
    await settle(farm.pool)
    until = time.monotonic() + SETTLE_S
    found = footprint(farm)
    while wanted is not None and drift(wanted, found) and time.monotonic() < until:
        await asyncio.sleep(0.2)
        found = footprint(farm)
    return found


Between = Callable[[Farm], Awaitable[None]]


async def soak(
    backend: str, count: int, *, slots: int = 8, warm_up: int = 100, between: Between | None = None
) -> tuple[Footprint, Footprint]:
    """The footprints after ``warm_up`` cycles and after ``count`` more. ``between`` is awaited in between."""
    async with open_farm(backend, slots) as farm:
        await cycles(farm.executor, warm_up, slots)
        before = await at_rest(farm)
        await cycles(farm.executor, count, slots)
        if between is not None:
            await between(farm)
        return before, await at_rest(farm, before)


def main() -> int:
    """Returns 1 when something drifted."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--backend", choices=BACKENDS, default="local")
    parser.add_argument("--cycles", type=int, default=10_000)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("out/bench/soak.json"))
    chosen = parser.parse_args()
    began = time.monotonic()
    before, after = asyncio.run(soak(chosen.backend, chosen.cycles, slots=chosen.slots))
    took_s, grown = time.monotonic() - began, drift(before, after)
    for field in dataclasses.fields(Footprint):
        mark = "  <-- drift" if field.name in grown else ""
        print(f"{field.name:24} {getattr(before, field.name):10.1f} {getattr(after, field.name):10.1f}{mark}")
    print(f"{chosen.cycles} cycles on {chosen.backend} in {took_s:.0f} s: {'drift' if grown else 'no drift'}")
    record = {"backend": chosen.backend, "cycles": chosen.cycles, "took_s": round(took_s, 1), "holds": not grown}
    footprints = {"before": dataclasses.asdict(before), "after": dataclasses.asdict(after)}
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    chosen.out.write_text(json.dumps({**record, **footprints, "limits": dataclasses.asdict(LIMITS)}, indent=1) + "\n")
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(main())
