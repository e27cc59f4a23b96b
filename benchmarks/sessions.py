"""T5: commands in sessions that stay, sessions beside each other, and what background processes leave behind."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from agentenv.executor.session import ToolSession
from benchmarks.farm import BWRAP, Farm, farms
from benchmarks.measure import MIB, Beside, Latencies, Outcome, at_most, percentile
from benchmarks.processes import process_tree
from benchmarks.targets.effort import Effort, Rounds
from benchmarks.workloads import timed_call

COMMAND = "cd /tmp && n=$((n+1))"
PARSED_FIRST = "for i in 1 2 3; do n=$((n+i)); done"
"""A command that the shell must be asked about before it is typed."""
THINK_S = 0.005
SESSIONS = 100
ROUNDS = 1_000
_TURNS = 5
_TIMED_COMMANDS = ("pipe", "pty", "parsed")
"""Where a fresh shell for each command is a comparison."""
_IDLE_COMMANDS = ("pipe idle", "pty idle")
"""Where the same comparison pauses as long before each command."""


async def t5_sessions(effort: Effort) -> list[Outcome]:
    """Every part of T5, on each backend."""
    rounds = Rounds(effort)
    async with farms((*effort.backends, BWRAP), 10) as opened:
        for _ in range(effort.rounds):
            await _short(opened[BWRAP], rounds, BWRAP, effort)
            for backend in effort.backends:
                await _alone(opened[backend], rounds, backend, effort)
                await _beside_the_stuck(opened[backend], rounds, backend, effort)
                await _a_hundred(opened[backend], rounds, backend, effort)
        for backend in effort.backends:
            await _start_and_kill(opened[backend], rounds, backend, min(ROUNDS, 10 * effort.calls))

    def beside_fresh_shells(backend: str) -> Beside:
        return rounds.beside("short", "ms p50", backend, BWRAP)

    def beside_fresh_shells_after_a_pause(backend: str) -> Beside:
        return rounds.beside("short idle", "ms p50", backend, BWRAP)

    beside = dict.fromkeys(_TIMED_COMMANDS, beside_fresh_shells)
    beside |= dict.fromkeys(_IDLE_COMMANDS, beside_fresh_shells_after_a_pause)

    goals = (
        (at_most("T5", "stateful command, p50", "ms", 1.0), "pipe"),
        (at_most("T5.pty", "stateful command on a terminal, p50", "ms", 5.0), "pty"),
        (at_most("T5.parsed", "stateful command of compound commands, p50", "ms", 1.5), "parsed"),
        (at_most("T5.idle", "stateful command after a pause, p50", "ms", 2.0), "pipe idle"),
        (at_most("T5.pty.idle", "stateful command on a terminal after a pause, p50", "ms", 5.0), "pty idle"),
        (at_most("T5.beside", "p50 beside 8 stuck sessions of the slot, against alone", "x", 1.2), "beside"),
        (at_most("T5.100", "100 sessions in one container, p50", "ms", 3.0), "hundred"),
        (at_most("T5.memory", "memory of a session", "MiB", 3.0), "memory"),
        (at_most("T5.left", "processes and descriptors left by 1,000 background processes", "", 0), "left"),
    )
    return [outcome for goal, what in goals for outcome in rounds.outcomes(goal, what, beside.get(what))]


async def _timed(slot: ToolSession, command: str, /, **more: object) -> float:
    started = time.perf_counter()
    result = await slot.call("terminal", {"command": command, **more})
    if result.fault != "none" or result.exit_code != 0:
        raise RuntimeError(f"{command!r} failed: {result}")
    return time.perf_counter() - started


async def _many(
    slot: ToolSession, calls: int, command: str = COMMAND, /, *, think_s: float = THINK_S, **more: object
) -> Latencies:
    await _timed(slot, "true", **more)
    seconds = []
    for _ in range(calls):
        if think_s:
            await asyncio.sleep(think_s)
        seconds.append(await _timed(slot, command, **more))
    return Latencies(seconds)


async def _short(farm: Farm, rounds: Rounds, name: str, effort: Effort) -> None:
    """A fresh shell for each command, for comparison."""
    async with farm.executor.open("short") as session:
        seconds = [await timed_call(session, "true") for _ in range(effort.calls)]
        idle_s = [await _timed_after_a_pause(session) for _ in range(effort.calls)]
    rounds.add("short", name, 1e3 * percentile(seconds, 0.5))
    rounds.add("short idle", name, 1e3 * percentile(idle_s, 0.5))


async def _timed_after_a_pause(session: ToolSession) -> float:
    await asyncio.sleep(THINK_S)
    return await timed_call(session, "true")


async def _alone(farm: Farm, rounds: Rounds, backend: str, effort: Effort) -> None:
    async with farm.executor.open("alone") as session:
        for what, think_s in (("", 0.0), (" idle", THINK_S)):
            pipe = await _many(session, 2 * effort.calls, think_s=think_s)
            pty = await _many(session, 2 * effort.calls, think_s=think_s, session="pty", pty=True)
            rounds.add(f"pipe{what}", backend, pipe.p50_ms)
            rounds.add(f"pty{what}", backend, pty.p50_ms)
        parsed = await _many(session, 2 * effort.calls, PARSED_FIRST, think_s=0.0)
        rounds.add("parsed", backend, parsed.p50_ms)
    await _short(farm, rounds, backend, effort)


async def _beside_the_stuck(farm: Farm, rounds: Rounds, backend: str, effort: Effort) -> None:
    """Sessions of the same slot that hang, read from nowhere, or wait for a call that waits for them; against
    the mean of before and after, because the machine's own pace drifts by more than they cost."""
    async with farm.executor.open("stuck") as session:
        before = await _many(session, effort.calls)
        for index in range(8):
            command = ("sleep 600", "read x < <(sleep 600)", "cat <(sleep 600)", "wait; sleep 600")[index % 4]
            await session.call("terminal", {"command": command, "session": f"s{index}", "timeout_s": 0})
        waiting = [
            asyncio.ensure_future(session.call("terminal", {"command": "", "session": f"s{index}", "timeout_s": 300}))
            for index in range(8)
        ]
        beside = await _many(session, 2 * effort.calls)
        for call in waiting:
            call.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for index in range(8):
            await session.call("terminal", {"reset": True, "session": f"s{index}"})
        after = await _many(session, effort.calls)
    rounds.add("beside", backend, 2 * beside.p50_ms / (before.p50_ms + after.p50_ms))


async def _a_hundred(farm: Farm, rounds: Rounds, backend: str, effort: Effort) -> None:
    """Ten sessions in each of ten slots, all kept, each used in turn."""
    seconds: list[float] = []
    all_there = asyncio.Barrier(10)

    async def one(number: int) -> None:
        async with farm.executor.open(f"hundred-{number}") as session:
            for index in range(SESSIONS // 10):
                await _timed(session, f"mine={number}-{index}", session=f"s{index}")
            await all_there.wait()
            if number == 0:
                rounds.add("memory", backend, _shell_mib())
            for _ in range(_TURNS if effort.calls > 20 else 1):
                for index in range(SESSIONS // 10):
                    await asyncio.sleep(10 * THINK_S)
                    seconds.append(await _timed(session, f"test $mine = {number}-{index}", session=f"s{index}"))
            await all_there.wait()

    async with asyncio.TaskGroup() as group:
        for number in range(10):
            group.create_task(one(number))
    rounds.add("hundred", backend, 1e3 * percentile(seconds, 0.5))


def _shell_mib() -> float:
    """The memory of one session's shell, its part of what it shares (PSS), as the median of all of them."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if b"--noediting" in (entry / "cmdline").read_bytes():
                lines = (entry / "smaps_rollup").read_text().splitlines()
                found.append(next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024 / MIB)
        except (OSError, StopIteration):
            continue
    return percentile(found, 0.5) if found else 0.0


async def _start_and_kill(farm: Farm, rounds: Rounds, backend: str, count: int) -> None:
    """Every fourth on a terminal, every third with children of its own."""
    async with farm.executor.open("rounds") as session:
        await _background(session, 0)
        before = _counts(farm)
        for number in range(count):
            await _background(session, number)
        await session.call("process", {"action": "list"})
        ended = await session.call("bash", {"command": "ps -eo args | grep -c '^sleep 777' || true"})
        left = await _left(farm, before)
    rounds.add("left", backend, int(ended.stdout) + left)


async def _background(session: ToolSession, number: int) -> None:
    command = "sleep 777 & sleep 777 & wait" if number % 3 == 0 else "sleep 777"
    started = await session.call("process", {"action": "start", "command": command, "pty": number % 4 == 0})
    content: Any = started.content
    name = content["process"]["process"]
    killed = await session.call("process", {"action": "kill", "process": name})
    if killed.exit_code != 137:
        raise RuntimeError(f"{command!r} was not killed: {killed}")


async def _left(farm: Farm, before: tuple[int, int]) -> int:
    """How many descriptors the server and processes the farm has more than before, once that has settled:
    the spare shell comes and goes."""
    deadline_s = time.monotonic() + 10
    while True:
        more = sum(max(0, now - was) for now, was in zip(_counts(farm), before, strict=True))
        if not more or time.monotonic() > deadline_s:
            return more
        await asyncio.sleep(0.1)


def _counts(farm: Farm) -> tuple[int, int]:
    server, root = farm.server, farm.root
    descriptors = len(list(Path(f"/proc/{server}/fd").iterdir())) if server else 0
    return descriptors, len(process_tree(root)) if root else 0
