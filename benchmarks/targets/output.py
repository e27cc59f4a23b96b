"""T6: large outputs."""

from __future__ import annotations

import asyncio

from benchmarks.baselines import bare_bash, output_file
from benchmarks.farm import BWRAP, Farm, farms
from benchmarks.measure import MIB, Outcome, at_least, at_most
from benchmarks.processes import pss_bytes
from benchmarks.targets.effort import BARE, Effort, Rounds
from benchmarks.workloads import make_output, trajectories, whole_outputs

SESSIONS = 4


async def t6_output(effort: Effort) -> list[Outcome]:
    """Complete 1 MiB outputs, and what a call that prints 1 GiB costs the server."""
    rounds = Rounds(effort)
    calls = max(2, effort.calls // 4)
    async with farms((*effort.backends, BWRAP), effort.slots) as opened:
        for _ in range(effort.rounds):
            command = f"cat {output_file(MIB)}"
            bare = await asyncio.to_thread(bare_bash, SESSIONS * calls, SESSIONS, command=command, read_bytes=MIB)
            rounds.add("rate", BARE, bare.rate)
            for name, farm in opened.items():
                work = whole_outputs(calls, MIB)
                whole = await trajectories(farm.executor, SESSIONS, work, prepare=make_output(MIB))
                rounds.add("rate", name, whole.rate)
                if name != BWRAP and (extra_mib := await _flood_memory(farm)) is not None:
                    rounds.add("flood", name, extra_mib)
    goal = at_least("T6", "1 MiB outputs, complete", "MiB/s", 150)
    flood = at_most("T6.flood", "extra server memory while a call prints 1 GiB", "MiB", 8)
    return [
        *rounds.outcomes(goal, "rate", lambda backend: rounds.beside("rate", "MiB/s", backend, BWRAP)),
        *rounds.outcomes(flood, "flood"),
    ]


async def _flood_memory(farm: Farm) -> float | None:
    """MiB by which the server's PSS grew at most while one call printed 1 GiB; None when it runs elsewhere."""
    if (server := farm.server) is None:
        return None
    before = most = pss_bytes(server)
    async with farm.executor.open("flood") as session:
        call = asyncio.create_task(session.call("bash", {"command": "head -c 1G /dev/zero"}, timeout_s=120))
        while not call.done():
            most = max(most, pss_bytes(server))
            await asyncio.sleep(0.02)
        result = call.result()
        assert result.stdout_dropped_bytes > 1000 * MIB, result.stdout_dropped_bytes
    return (most - before) / MIB
