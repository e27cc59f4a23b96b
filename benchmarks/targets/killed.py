"""F5, F6 and F14: a farm service that is killed, and what becomes of those who have slots of it."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress

from agentenv.errors import AgentEnvError
from agentenv.executor.session import ToolSession
from agentenv.executor.tool_executor import ToolExecutor
from agentenv.tools.catalog import ToolCatalog
from benchmarks.chaos import Tally, Visitor
from benchmarks.measure import Outcome, at_most
from benchmarks.service import FarmService, farm_service, with_standby
from benchmarks.targets.effort import Effort

CONTAINERS, SLOTS = 3, 8
KILL_EVERY_S = 20.0
RUNS, VISITORS = ("a", "b"), 6
"""Runs, and visitors of each at once: fewer than there are slots, so that one is free for who comes after a kill."""
HOLDERS, CALL_EVERY_S = 12, 1.0
ADOPTED_WITHIN_S = 60.0
_COUNTED = frozenset({"calls", "sessions verified"})
_GRANTED_TWICE = ("serves two", "another session's")


async def f5_killed(effort: Effort) -> list[Outcome]:
    """SIGKILL of the service every 20 s while two runs lease, call, cancel, seal and release (benchmarks/chaos.py);
    the next is started at once."""
    tally, again_s = Tally(), []
    async with farm_service("local", CONTAINERS, SLOTS) as service:
        async with service.pool("next") as pool, AsyncExitStack() as stack:
            until_s = time.monotonic() + effort.kills_s
            executors = [await stack.enter_async_context(_executor(service, run)) for run in RUNS]
            async with asyncio.TaskGroup() as group:
                for number, executor in enumerate(VISITORS * executors):
                    visitor = Visitor(executor, tally, random.Random(number), until_s)
                    group.create_task(visitor.run())
                while time.monotonic() + KILL_EVERY_S < until_s:
                    await asyncio.sleep(KILL_EVERY_S)
                    again_s.append(await service.granting_again(pool))
        leaked = await _leaked(service)
    return killed_outcomes(tally, leaked, again_s)


def killed_outcomes(tally: Tally, leaked: int, again_s: Sequence[float]) -> list[Outcome]:
    """What F5 says. A rollout that got a typed error has failed, one whose side effects are wrong as well."""
    failed = {name: count for name, count in tally.counted.items() if name not in _COUNTED}
    twice = [wrong for wrong in tally.wrongs if any(sign in wrong for sign in _GRANTED_TWICE)]
    every = f"SIGKILL of the farm every {KILL_EVERY_S:g} s"
    return [
        at_most("F5", f"{every}: failed or wrong rollouts", "", 0).outcome(
            [sum(failed.values()) + len(tally.wrongs)],
            errors=failed,
            wrongs=tally.wrongs[:20],
            kills=len(again_s),
            rollouts=tally.counted["sessions verified"],
            calls=tally.counted["calls"],
        ),
        at_most("F5.leaked", f"{every}: slots that are not free at the end", "", 0).outcome([leaked]),
        at_most("F5.twice", f"{every}: slots given to two", "", 0).outcome([len(twice)]),
        at_most("F5.again", f"{every}: until a new lease, the longest", "s", 3.0).outcome(
            [max(again_s)], after_each_s=list(again_s)
        ),
    ]


@asynccontextmanager
async def _executor(service: FarmService, run: str, lease_ttl_s: float = 30.0) -> AsyncIterator[ToolExecutor]:
    async with (
        service.pool(run, lease_ttl_s=lease_ttl_s) as pool,
        ToolExecutor(pool, ToolCatalog.builtin()) as executor,
    ):
        yield executor


async def _leaked(service: FarmService) -> int:
    with suppress(TimeoutError):
        await service.settled(ADOPTED_WITHIN_S)
    async with service.client() as client:
        return service.slots - (await client.info()).load.slots.get("free", 0)


async def f6_away(effort: Effort) -> list[Outcome]:
    """No service at all for a long time: those who hold slots go on, and the next service knows all of them."""
    failed: list[str] = []
    calls = 0
    lease_ttl_s = min(30.0, effort.away_s / 4)  # shorter than that, or nothing would be shown
    async with farm_service("local", CONTAINERS, SLOTS) as service:
        async with _executor(service, "holders", lease_ttl_s) as executor, AsyncExitStack() as stack:
            names = [f"holder-{number}" for number in range(HOLDERS)]
            sessions = [await stack.enter_async_context(executor.open(name)) for name in names]
            done = asyncio.Event()
            holding = [asyncio.create_task(_hold(session, done, failed)) for session in sessions]
            await asyncio.sleep(CALL_EVERY_S)
            await service.process.kill()
            await asyncio.sleep(effort.away_s)
            await service.process.start()
            adopted_s = await _adopted(service)
            async with executor.open("new"):
                pass
            done.set()
            calls = sum(await asyncio.gather(*holding))
        leaked = await _leaked(service)
    away = f"no farm for {effort.away_s:g} s"
    return [
        at_most("F6", f"{away}: failed rollouts of {HOLDERS} that hold slots", "", 0).outcome(
            [len(failed)], errors=failed, calls=calls, lease_ttl_s=lease_ttl_s
        ),
        at_most("F6.adopted", f"{away}: until the next knows all their leases", "s", 3.0).outcome([adopted_s]),
        at_most("F6.leaked", f"{away}: slots that are not free at the end", "", 0).outcome([leaked]),
    ]


async def _hold(session: ToolSession, done: asyncio.Event, failed: list[str]) -> int:
    """Calls of one rollout, each of which has to find what those before it left; how many there were."""
    calls = 0
    try:
        while not done.is_set():
            result = await session.call("bash", {"command": "echo >> log; wc -l < log"})
            calls += 1
            if result.fault != "none" or result.stdout.strip() != str(calls):
                failed.append(f"call {calls}: {result}")
                return calls
            await asyncio.sleep(CALL_EVERY_S)
    except AgentEnvError as error:
        failed.append(f"call {calls + 1}: {error!r}")
    return calls


async def _adopted(service: FarmService) -> float:
    """Seconds until a service that has just started counts every holder's lease."""
    began = time.perf_counter()
    async with asyncio.timeout(ADOPTED_WITHIN_S):
        while await service.held() < HOLDERS:
            await asyncio.sleep(0.05)
    return time.perf_counter() - began


async def f14_successor(effort: Effort) -> list[Outcome]:
    """SIGKILL of a service of this machine, and at once the next; and, on Nomad, of one that has a standby: until a
    client that waits has a slot. A lease from before lives on."""
    restart_s, standby_s = [], []
    async with farm_service("local", 1, 4) as service, service.pool() as pool:
        held = await pool.lease("held")
        for _ in range(effort.rounds):
            restart_s.append(await service.granting_again(pool))
        assert held.lost is None
        await held.release()
    restart = at_most("F14", "a farm service is killed and started again (local): until a new lease", "s", 3.0)
    if "nomad" not in effort.backends:
        return [restart.outcome(restart_s)]
    for _ in range(effort.rounds):
        async with with_standby(4) as (leader, pool):
            held = await pool.lease("held")
            began = time.perf_counter()
            await leader.kill()
            async with await pool.lease("after the kill"):
                standby_s.append(time.perf_counter() - began)
            assert held.lost is None
    standby = at_most("F14.standby", "a farm service is killed, another stood by (Nomad): until a new lease", "s", 25.0)
    return [restart.outcome(restart_s), standby.outcome(standby_s)]
