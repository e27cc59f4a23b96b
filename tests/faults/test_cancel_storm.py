"""Many leases and calls, cancelled at random moments: no slot is lost, none serves two, nothing is left."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

from agentenv.config import ContainerSettings, PoolSettings
from agentenv.errors import AcquireTimeoutError
from agentenv.executor.tool_executor import ToolExecutor
from agentenv.slots.backends.local import LocalBackend
from agentenv.slots.pool import SlotPool
from agentenv.tools.catalog import ToolCatalog
from agentenv.wire.states import SlotState
from tests.waiting import START_S, until

SESSIONS = 400
COMMANDS = ("true", "echo hi; sleep 0.05", "sleep 0.3", "ls /nonexistent")
CANCELLED_AFTER_S = 0.4
"""On average, those that are."""
PATIENT_S = 300
"""Longer than the whole storm takes on a machine that others load."""


class Storm:
    def __init__(self, executor: ToolExecutor, dice: random.Random) -> None:
        self.executor = executor
        self.dice = dice
        self.held: set[tuple[str, int]] = set()
        self.faults: Counter[str] = Counter()

    async def session(self, number: int) -> None:
        patience_s = self.dice.choice([0.05, 1, PATIENT_S])
        try:
            async with self.executor.open(f"t{number}", acquire_timeout_s=patience_s) as session:
                place = (session.lease.container.id, session.lease.key.slot)
                assert place not in self.held
                self.held.add(place)
                try:
                    for _ in range(self.dice.randrange(4)):
                        result = await session.call("bash", {"command": self.dice.choice(COMMANDS)}, timeout_s=60)
                        self.faults[result.fault] += 1
                finally:
                    self.held.discard(place)
        except AcquireTimeoutError:
            assert patience_s < PATIENT_S


async def test_nothing_is_left_of_what_was_cancelled() -> None:
    dice = random.Random(5)
    before = asyncio.all_tasks()
    settings = PoolSettings(min_containers=2, max_containers=2)
    pool = SlotPool(LocalBackend(ContainerSettings(slots_per_container=4)), settings)
    async with pool, ToolExecutor(pool, ToolCatalog.builtin()) as executor:
        storm = Storm(executor, dice)
        tasks = []
        for number in range(SESSIONS):
            task = asyncio.create_task(storm.session(number))
            tasks.append(task)
            for _ in range(dice.randrange(3)):  # some are cancelled twice: while they give their slot back
                asyncio.get_running_loop().call_later(dice.expovariate(1 / CANCELLED_AFTER_S), task.cancel)
            if number % 20 == 0:
                await asyncio.sleep(dice.uniform(0, 0.3))
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert [end for end in ends if end is not None and not isinstance(end, asyncio.CancelledError)] == []
        assert {*storm.faults} == {"none"}
        await until(lambda: pool.statistics().slots.get(SlotState.free, 0) == 8, START_S)
        counts = pool.statistics()
        assert counts.slots.get(SlotState.quarantined, 0) == 0
        assert {*counts.faults} <= {"acquire_timeout", "connection_lost"}  # on a loaded machine one is asked again
    assert asyncio.all_tasks() - before == set()
