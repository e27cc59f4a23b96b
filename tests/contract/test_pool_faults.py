"""Containers that die and callers that leave at any moment: no slot is leaked, no lease ends untyped."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest

from agentenv.containers.control import ContainerControl
from agentenv.errors import ContainerLostError, LeaseLostError
from agentenv.farm_client.pool import FarmPool
from agentenv.slots.lease import SlotLease
from agentenv.wire.leases import SealSlot
from agentenv.wire.states import SlotState
from tests.contract.conftest import AnyPool, Client, Maker, yard_of
from tests.waiting import START_S, loop_turns, until


def _free(pool: AnyPool) -> int:
    return pool.statistics().slots.get(SlotState.free, 0)


TURNS = 60


def _moments() -> Iterator[tuple[int, float]]:
    """When to leave: after each of the first turns of the loop, then after growing times (turns, seconds).

    Every step up to the first request has a turn of its own; the replies of a container come in their own time, which
    turns of the loop cannot bound.
    """
    yield from ((steps, 0.0) for steps in range(1, TURNS + 1))
    delay_s = 0.0005
    while delay_s < START_S:
        yield TURNS, delay_s
        delay_s *= 1.2
    pytest.fail(f"not finished within {START_S:.0f} s")


async def _cancel_at(moment: tuple[int, float], work: Coroutine[Any, Any, Any]) -> bool:
    """Run until that moment, then cancel; whether it had finished by then."""
    steps, delay_s = moment
    task = asyncio.create_task(work)
    await loop_turns(steps)  # at least one: a task that never began cannot have asked for anything
    if delay_s:
        await asyncio.wait({task}, timeout=delay_s)
    finished = task.done()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return finished


async def test_a_killed_container_ends_its_leases_and_is_replaced(make: Maker) -> None:
    pool, backend = await make.pool(slots=2, min_containers=2, max_containers=2)
    await until(lambda: _free(pool) == 4, START_S)
    leases = [await pool.lease(f"t{number}") for number in range(3)]
    doomed, spared = leases[:2], leases[2]
    backend.kill_container(doomed[0].container.id)
    errors = await asyncio.wait_for(asyncio.gather(*(lease.wait_lost() for lease in doomed)), START_S)
    assert all(isinstance(error, ContainerLostError) for error in errors)
    assert spared.lost is None
    async with Client.open(spared.container) as client:
        assert (await client.run(spared.key, "echo alive")).stdout == "alive\n"
    await until(lambda: pool.statistics().slots_total == 4, START_S)
    for lease in leases:
        await lease.release()
    await until(lambda: _free(pool) == 4, START_S)
    assert pool.statistics().leases_lost == 2
    assert pool.statistics().faults["container_lost"] == 2


async def test_a_seal_ends_with_the_container_it_was_asked_of(make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, never = asyncio.Event(), asyncio.Event()

    async def unanswered(*_: object, **__: object) -> None:
        asked.set()
        await never.wait()

    monkeypatch.setattr(ContainerControl, "act", unanswered)
    pool, backend = await make.pool(slots=1)
    lease = await pool.lease("t")
    sealing = asyncio.create_task(lease.act(SealSlot()))
    await asked.wait()
    backend.kill_container(lease.container.id)
    with pytest.raises(ContainerLostError):
        await asyncio.wait_for(sealing, START_S)
    await lease.release()


async def test_waiters_outlive_the_death_of_the_only_container(make: Maker) -> None:
    pool, backend = await make.pool(slots=1)
    holder = await pool.lease("holder")
    waiting = asyncio.create_task(pool.lease("waiter", timeout_s=START_S))
    await until(lambda: pool.statistics().waiting == 1)
    backend.kill_container(holder.container.id)
    async with await waiting as lease:
        assert lease.container.id != holder.container.id
    assert isinstance(holder.lost, ContainerLostError)


async def test_a_container_killed_while_leases_are_asked_for(make: Maker) -> None:
    pool, backend = await make.pool(slots=4)
    await until(lambda: _free(pool) == 4, START_S)
    container = (await pool.lease("probe")).container.id
    asking = [asyncio.create_task(pool.lease(f"t{number}", timeout_s=START_S)) for number in range(3)]
    await asyncio.sleep(0)
    backend.kill_container(container)
    leases = await asyncio.gather(*asking)
    await asyncio.gather(*(lease.release() for lease in leases))
    await until(lambda: _free(pool) == 4, START_S)


async def test_cancelling_lease_at_every_step_leaks_nothing(make: Maker) -> None:
    pool, _ = await make.pool(slots=2)
    await until(lambda: _free(pool) == 2, START_S)

    async def lease_and_keep(kept: list[SlotLease]) -> None:
        kept.append(await pool.lease("fickle"))

    finished = 0
    for moment in _moments():
        kept: list[SlotLease] = []
        finished += await _cancel_at(moment, lease_and_keep(kept))
        for lease in kept:
            await lease.release()
        await until(lambda: _free(pool) == 2, START_S)
        if finished >= 3:
            break
    assert pool.statistics().waiting == 0
    assert pool.statistics().leases_granted == pool.statistics().leases_released


async def test_a_waiter_who_leaves_the_queue_is_forgotten(make: Maker) -> None:
    pool, _ = await make.pool(slots=1)
    async with await pool.lease("holder"):
        waiting = [asyncio.create_task(pool.lease(f"t{number}")) for number in range(3)]
        await until(lambda: pool.statistics().waiting == 3)
        waiting[1].cancel()
        await asyncio.wait({waiting[1]})
        assert pool.statistics().waiting == 2
        waiting[0].cancel()
    async with await waiting[2] as lease:
        assert lease.trajectory == "t2"


async def test_cancelling_release_at_every_step_leaks_nothing(make: Maker) -> None:
    pool, _ = await make.pool(slots=2)
    await until(lambda: _free(pool) == 2, START_S)
    finished = 0
    for moment in _moments():
        lease = await pool.lease("fickle")
        finished += await _cancel_at(moment, lease.release())
        await until(lambda: _free(pool) == 2, START_S)
        if finished >= 3:
            break
    assert pool.statistics().leases_released == pool.statistics().leases_granted


async def test_a_storm_of_leavers_and_deaths(make: Maker) -> None:
    pool, backend = await make.pool(slots=3, min_containers=2, max_containers=2)
    await until(lambda: _free(pool) == 6, START_S)

    async def trajectory(number: int) -> None:
        try:
            async with await pool.lease(f"t{number}", timeout_s=START_S):
                await asyncio.sleep(0.01 * (number % 4))
        except LeaseLostError:
            pytest.fail("a lost lease raises where it is used, not where it is released")

    tasks = [asyncio.create_task(trajectory(number)) for number in range(40)]
    for number, task in enumerate(tasks):
        await asyncio.sleep(0.003)
        if number % 3 == 0:
            task.cancel()
        if number == 15:
            backend.kill_container(_lowest(pool))
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [result for result in results if result is not None and not isinstance(result, asyncio.CancelledError)] == []
    await until(lambda: _free(pool) == 6, START_S)


def _lowest(pool: AnyPool) -> str:
    return yard_of(pool).ledger.containers()[0].id


async def test_cancelling_the_close_does_not_stop_it(make: Maker) -> None:
    pool, _ = await make.pool(slots=1)
    await pool.lease("holder")
    closing = asyncio.create_task(pool.aclose())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert repr(pool) == f"<{type(pool).__name__} closed>"
    session = pool._session if isinstance(pool, FarmPool) else pool._manager._session
    assert session is not None
    assert session.closed, "the cancelled close returned before everything was closed"
