"""Trajectories at work while something breaks: each keeps an account of what it asked for and what its slot did.

A call appends its own number to a file of the slot, so the slot's own file says what ran, how often and in
which order. A call that was answered ran once; one that ended with a typed infrastructure error ran at
most once; after such an error the lease either lives on (and its account goes on) or has ended with a type.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import aiohttp

from agentenv.config import PoolSettings
from agentenv.containers.handle import ContainerHandle
from agentenv.deadlines import scaled
from agentenv.errors import AcquireTimeoutError, InfraError, LeaseLostError
from agentenv.executor.session import ToolSession
from agentenv.executor.tool_executor import ToolExecutor
from agentenv.slots.backends.base import ContainerBackend
from agentenv.slots.pool import SlotPool
from agentenv.tools.catalog import ToolCatalog
from tests.faults.bare_loop import this_loop
from tests.waiting import DEADLINE_S, START_S, until

LEASE_END_S = scaled(15.0)
"""A lease that a failure ended says so within this time."""
WHOLE_AGAIN_S = START_S
"""The pool is back at its size within this time: in less than a minute, unless on a busy machine the first new
container does not pass its self-test in time, and another one is started."""
_ATTEMPT_S = scaled(90.0)
_TURNS = 5
"""Heartbeats until a container is given up: each may be as late as the loop of the test was."""


@dataclass
class Account:
    """One lease's history."""

    trajectory: str
    container: str
    answered: list[int] = field(default_factory=list)
    unsure: list[int] = field(default_factory=list)
    """Calls that ended with an infrastructure error: they ran once or not at all."""
    wrong: list[str] = field(default_factory=list)
    finished: bool = False
    """Its trajectory ended by itself, and its slot's account agreed."""
    ended_by: InfraError | None = None
    ended_at: float | None = None

    def check(self, ran: list[int]) -> None:
        """Compare with what the slot says it ran. Fails the test on a call lost or run twice."""
        assert len(ran) == len(set(ran)), f"{self.trajectory}: run twice: {[n for n in set(ran) if ran.count(n) > 1]}"
        assert not (lost := set(self.answered) - set(ran)), f"{self.trajectory}: answered but not in the slot: {lost}"
        assert not (more := set(ran) - set(self.answered) - set(self.unsure)), f"{self.trajectory}: ran unasked: {more}"


@dataclass
class Traffic:
    """What ``count`` trajectories do until told to stop."""

    executor: ToolExecutor
    accounts: list[Account] = field(default_factory=list)
    refused: list[tuple[float, AcquireTimeoutError]] = field(default_factory=list)
    containers: dict[str, ContainerHandle] = field(default_factory=dict)
    """Every container a lease was had on."""
    finishing: set[str] = field(default_factory=set)
    """Containers whose trajectories end by themselves now (and start again elsewhere)."""
    checked: int = 0
    """Leases whose account was compared with their slot's own."""
    _stop: asyncio.Event = field(default_factory=asyncio.Event)

    async def work(self, trajectory: str, pause_s: float) -> None:
        """Lease, call until stopped or the lease is lost, check the account; lease again."""
        while not self._stop.is_set():
            try:
                async with self.executor.open(trajectory, acquire_timeout_s=_ATTEMPT_S) as session:
                    await self._lease(session, trajectory, pause_s)
            except AcquireTimeoutError as error:
                self.refused.append((time.monotonic(), error))

    async def _lease(self, session: ToolSession, trajectory: str, pause_s: float) -> None:
        container = session.lease.container
        self.containers[container.id] = container
        account = Account(trajectory, container.id)
        self.accounts.append(account)
        number = 0
        while not self._stop.is_set() and container.id not in self.finishing:
            number += 1
            try:
                result = await session.call(
                    "bash", {"command": f"echo {number} >> ran; echo {number}; sleep {pause_s}"}
                )
            except InfraError as error:
                account.unsure.append(number)
                if isinstance(error, LeaseLostError) or session.lease.lost is not None:
                    account.ended_by, account.ended_at = error, time.monotonic()
                    return
                continue
            if result.fault != "none" or result.stdout != f"{number}\n":
                account.wrong.append(f"call {number}: fault {result.fault}, said {result.stdout!r}")
            account.answered.append(number)
        try:
            told = await session.call("bash", {"command": "cat ran"})
        except LeaseLostError as error:
            account.ended_by, account.ended_at = error, time.monotonic()
            return
        account.check([int(line) for line in told.stdout.split()])
        account.finished = True
        self.checked += 1

    def stop(self) -> None:
        """Let every trajectory finish its call, check its account and end."""
        self._stop.set()

    def living(self) -> list[Account]:
        """Leases that have not ended."""
        return [account for account in self.accounts if account.ended_by is None and not account.finished]

    def answered(self) -> int:
        """Calls answered so far."""
        return sum(len(account.answered) for account in self.accounts)

    def ended_since(self, moment: float) -> list[float]:
        """How long after ``moment`` each lost lease said so, in seconds."""
        return [account.ended_at - moment for account in self.accounts if account.ended_at is not None]


@dataclass
class Farm:
    """An open pool with traffic on it."""

    pool: SlotPool
    executor: ToolExecutor
    traffic: Traffic
    slots: int

    async def flowing(self, calls: int = 20, deadline_s: float = DEADLINE_S) -> None:
        """Return when so many more calls have been answered."""
        goal = self.traffic.answered() + calls
        await until(lambda: self.traffic.answered() >= goal, deadline_s, lambda: repr(self.pool))

    async def calls_run(self) -> int:
        """Calls the living containers say they have run since they started, whoever asked."""
        total = 0
        async with aiohttp.ClientSession() as session:
            for container in self.traffic.containers.values():
                headers = {"Authorization": f"Bearer {container.token}"}
                async with session.get(f"{container.base_url}/v1/statistics", headers=headers) as answer:
                    total += (await answer.json())["calls"]
        return total

    async def ended_in_time(self, there: list[Account], since_s: float) -> None:
        """Return when these leases have ended. Fails the test if one did so later than LEASE_END_S after this moment,
        and a late loop of the test does not explain it."""
        late_s: list[float] = []
        async with this_loop(late_s):
            await until(lambda: all(account.ended_by for account in there), explain=lambda: repr(self.pool))
        took_s = max((account.ended_at or 0.0) - since_s for account in there)
        assert took_s < LEASE_END_S + _TURNS * late_s[0], f"{took_s:.1f} s; the loop was {late_s[0]:.1f} s late"

    def is_whole(self) -> bool:
        """Every slot of every container serves or is being reset."""
        found = self.pool.statistics()
        return set(found.containers) == {"ready"} and found.slots_total == self.slots

    async def whole_again(self, deadline_s: float = WHOLE_AGAIN_S) -> float:
        """Return when the pool is back at its size; how long that took."""
        return await until(self.is_whole, deadline_s, lambda: repr(self.pool))


@asynccontextmanager
async def farm_at_work(
    backend: ContainerBackend,
    *,
    containers: int,
    slots: int,
    trajectories: int,
    pause_s: float = 0.02,
    **settings: float,
) -> AsyncIterator[Farm]:
    """A farm of ``containers`` with ``slots`` each, and trajectories that call all the time.

    At the end everybody's account is checked; nothing may have been answered wrongly.
    """
    wanted = {"min_containers": containers, "max_containers": containers, "acquire_timeout_s": _ATTEMPT_S, **settings}
    async with AsyncExitStack() as stack:
        pool = await stack.enter_async_context(SlotPool(backend, PoolSettings.model_validate(wanted)))
        executor = await stack.enter_async_context(ToolExecutor(pool, ToolCatalog.builtin()))
        farm = Farm(pool, executor, Traffic(executor), containers * slots)
        await until(farm.is_whole, START_S, lambda: repr(pool))
        works = [asyncio.create_task(farm.traffic.work(f"t{number}", pause_s)) for number in range(trajectories)]
        try:
            await farm.flowing()
            yield farm
            await farm.flowing()
        finally:
            farm.traffic.stop()
            done = await asyncio.gather(*works, return_exceptions=True)
        for outcome in done:
            if isinstance(outcome, BaseException):
                raise outcome
        assert [wrong for account in farm.traffic.accounts for wrong in account.wrong] == []
        assert farm.traffic.checked >= 1, "somebody's account was compared with the slot's"
