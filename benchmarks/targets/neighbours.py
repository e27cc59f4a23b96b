"""T9: short calls beside a bad neighbour."""

from __future__ import annotations

import asyncio
import os

from benchmarks.baselines import bare_bash, bare_neighbour
from benchmarks.farm import BWRAP_LIMITED, Farm, farms
from benchmarks.measure import Latencies, Outcome, at_most
from benchmarks.targets.effort import BARE, Effort, Rounds
from benchmarks.workloads import short_calls, trajectories

NEIGHBOURS = {
    "fork bomb": "bomb() { bomb | bomb & }; bomb; sleep 60",
    "memory hog": "while :; do tail /dev/zero; done",
    "disk filler": "while :; do cat /dev/zero > full-$RANDOM; rm -f full-*; done",
    "cpu hog": "for i in 1 2 3 4 5 6 7 8; do (while :; do :; done) & done; wait",
    "output flood": "yes",
}
GOOD, THINK_S = 4, 0.01
"""Trajectories beside the bad one, and the pause before each of their calls."""


async def t9_bad_neighbour(effort: Effort) -> list[Outcome]:
    """Short calls of 4 slots with one bad neighbour at a time, against the same without, each with its own kind.

    The baselines have rlimits and a uid for each slot, which only root can give: otherwise they are left out.
    """
    rounds = Rounds(effort)
    comparisons = (BWRAP_LIMITED,) if os.geteuid() == 0 else ()
    async with farms((*effort.backends, *comparisons), 2 * GOOD) as opened:
        for bad, command in NEIGHBOURS.items():
            for _ in range(effort.rounds):
                if comparisons:
                    quiet = await asyncio.to_thread(_bare, effort)
                    _note(rounds, bad, BARE, quiet, await asyncio.to_thread(_bare_beside, command, effort))
                for name, farm in opened.items():
                    quiet = await _good(farm, effort)
                    _note(rounds, bad, name, quiet, await _beside(farm, command, effort))
    return [outcome for bad in NEIGHBOURS for outcome in _of(rounds, bad)]


def _of(rounds: Rounds, bad: str) -> list[Outcome]:
    found = []
    for which, bound in (("p50", 1.5), ("p99", 3.0)):
        goal = at_most(f"T9.{bad}.{which}", f"neighbours' {which} beside a {bad}", "x", bound)
        name = f"{bad} {which}"
        found += rounds.outcomes(goal, name, lambda who, name=name: rounds.beside(name, "x", who, BWRAP_LIMITED))  # type: ignore[misc]
    return found


def _note(rounds: Rounds, bad: str, whose: str, quiet: Latencies, loud: Latencies) -> None:
    rounds.add(f"{bad} p50", whose, loud.p50_ms / quiet.p50_ms)
    rounds.add(f"{bad} p99", whose, loud.p99_ms / quiet.p99_ms)


def _bare(effort: Effort) -> Latencies:
    return bare_bash(GOOD * effort.calls, GOOD, think_s=THINK_S)


def _bare_beside(command: str, effort: Effort) -> Latencies:
    with bare_neighbour(command):
        return _bare(effort)


async def _good(farm: Farm, effort: Effort) -> Latencies:
    return await trajectories(farm.executor, GOOD, short_calls(effort.calls, think_s=THINK_S))


async def _beside(farm: Farm, command: str, effort: Effort) -> Latencies:
    async with farm.executor.open("bad") as bad:
        call = asyncio.create_task(bad.call("bash", {"command": command}, timeout_s=120))
        await asyncio.sleep(1)
        latencies = await _good(farm, effort)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
    return latencies
