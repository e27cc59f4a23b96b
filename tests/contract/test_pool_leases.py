"""Leasing from a pool: order, deadlines, clean slots, heartbeats, closing, scaling."""

from __future__ import annotations

import asyncio
import re

import pytest

from agentenv.config import PoolSettings
from agentenv.containers.control import ContainerControl
from agentenv.errors import (
    AcquireTimeoutError,
    ConfigError,
    InfraError,
    LeaseLostError,
    PoolClosedError,
    QuotaError,
    StaleLeaseError,
)
from agentenv.farm_client.access import FarmAccess
from agentenv.farm_client.pool import FarmPool
from agentenv.slots.lease import SlotLease
from agentenv.slots.pool import SlotPool
from agentenv.wire.leases import LeaseRequest, SealSlot
from agentenv.wire.states import SlotState
from tests.contract.conftest import AnyPool, Client, Maker, renewed
from tests.waiting import until


def _slots(pool: AnyPool) -> dict[SlotState, int]:
    return dict(pool.statistics().slots)


async def _all_free(pool: AnyPool, slots: int) -> None:
    """A pool of its own knows at once; a farm is told by the container."""
    if isinstance(pool, SlotPool):
        assert _slots(pool) == {SlotState.free: slots}, "release returned before the slot was free"
    await until(lambda: _slots(pool) == {SlotState.free: slots})


async def _run(lease: SlotLease, command: str) -> str:
    async with Client.open(lease.container) as client:
        result = await client.run(lease.key, command)
        assert result.fault == "none", result
        return result.stdout


async def test_lease_and_release(make: Maker) -> None:
    pool, _ = await make.pool(slots=2)
    async with await pool.lease("one") as lease:
        assert lease.trajectory == "one"
        assert lease.lost is None
        assert await _run(lease, "echo here") == "here\n"
        assert repr(pool).endswith(" 1 container (ready), 1/2 slots leased, 0 waiting>")
    await _all_free(pool, 2)
    await lease.release()
    counts = pool.statistics()
    assert (counts.leases_granted, counts.leases_released, counts.leases_lost) == (1, 1, 0)
    assert counts.reset_p50_s is not None
    assert counts.acquire_wait_p99_s is not None


async def test_the_next_trajectory_finds_a_clean_workspace(make: Maker) -> None:
    pool, _ = await make.pool(slots=1)
    async with await pool.lease("messy") as lease:
        await _run(lease, "echo secret > left; mkdir -m 0 locked; ln -s / link; (sleep 300 &)")
    async with await pool.lease("next") as lease:
        assert await _run(lease, "ls -A") == ""


async def test_three_times_oversubscribed_all_finish_first_come_first_served(make: Maker) -> None:
    pool, _ = await make.pool(slots=4)
    served: list[int] = []

    async def trajectory(number: int) -> None:
        async with await pool.lease(f"t{number}") as lease:
            served.append(number)
            await _run(lease, "sleep 0.05")

    async with asyncio.TaskGroup() as group:
        for number in range(12):
            group.create_task(trajectory(number))
    # Leases of one turn are asked for side by side, so their answers may change places; turns may not.
    assert [sorted(served[:4]), sorted(served[4:])] == [[0, 1, 2, 3], [4, 5, 6, 7, 8, 9, 10, 11]]
    await _all_free(pool, 4)


async def test_one_slot_serves_strictly_in_order(make: Maker) -> None:
    pool, _ = await make.pool(slots=1)
    served: list[int] = []

    async def trajectory(number: int) -> None:
        async with await pool.lease(f"t{number}"):
            served.append(number)

    async with asyncio.TaskGroup() as group:
        for number in range(8):
            group.create_task(trajectory(number))
    assert served == list(range(8))


async def test_no_slot_in_time_is_a_telling_error(make: Maker) -> None:
    pool, _ = await make.pool(slots=1)
    patience_s = 5.0 if make.shared else 0.4  # a farm has to answer within it
    async with await pool.lease("holder"):
        if make.shared:
            await asyncio.sleep(0.6)  # a farm's answer to an ask says what it knew up to half a second before
        loop = asyncio.get_running_loop()
        began = loop.time()
        with pytest.raises(AcquireTimeoutError) as caught:
            await pool.lease("late", timeout_s=patience_s)
        waited_s = loop.time() - began
        assert 0.9 * patience_s < waited_s < 30
        told = re.search(r"within (\d+\.\d) s ", str(caught.value))
        assert told is not None
        assert patience_s <= float(told[1]) <= waited_s + 0.1, "for how long it really waited"
        own = ("position 1 of 1", "1 leased", "the maximum", "max_containers")
        shared = ("queue; position 1", "holds 1 of 1 slots, 0 are free", "wait longer")
        for part in shared if make.shared else own:
            assert part in str(caught.value)
        assert pool.statistics().waiting == 0
    async with await pool.lease("after"):
        pass


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), float("inf")])
async def test_a_senseless_timeout_is_refused(make: Maker, timeout_s: float) -> None:
    pool, _ = await make.pool(slots=1)
    with pytest.raises(ConfigError, match="timeout_s"):
        await pool.lease("t", timeout_s=timeout_s)


async def test_heartbeats_renew_a_lease_again_and_again(make: Maker) -> None:
    pool, _ = await make.pool(slots=1)
    async with await pool.lease("patient") as lease:
        await _run(lease, "echo kept > file")
        await renewed(pool, lease)
        await renewed(pool, lease)
        assert await _run(lease, "cat file") == "kept\n"
        assert lease.lost is None


async def test_a_lease_that_ended_at_the_container_ends_typed(make: Maker) -> None:
    pool, _ = await make.pool(slots=1)
    lease = await pool.lease("robbed")
    async with ContainerControl(lease.container, guest=True) as control:
        await control.release(lease.key)
    error = await asyncio.wait_for(lease.wait_lost(), 30)
    assert isinstance(error, StaleLeaseError)
    assert lease.lost is error
    with pytest.raises(StaleLeaseError):
        await lease.act(SealSlot())
    await lease.release()
    async with await pool.lease("next") as again:
        assert again.key.epoch > lease.key.epoch
    assert pool.statistics().leases_lost == 1


async def test_seal_keeps_the_lease(make: Maker) -> None:
    pool, _ = await make.pool(slots=1)
    async with await pool.lease("verified") as lease:
        await _run(lease, "echo kept > file; (sleep 300 &)")
        await lease.act(SealSlot())
        assert await _run(lease, "cat file") == "kept\n"
    with pytest.raises(LeaseLostError):
        await lease.act(SealSlot())


async def test_closing_ends_leases_and_waiters(make: Maker) -> None:
    pool, _ = await make.pool(slots=1)
    lease = await pool.lease("holder")
    waiting = asyncio.create_task(pool.lease("waiter"))
    await until(lambda: pool.statistics().waiting == 1)
    await pool.aclose()
    with pytest.raises(PoolClosedError):
        await waiting
    assert isinstance(lease.lost, LeaseLostError)
    await lease.release()
    await pool.aclose()
    with pytest.raises(PoolClosedError):
        await pool.lease("too late")
    assert repr(pool) == f"<{type(pool).__name__} closed>"


async def test_closing_before_anything_is_ready(make: Maker) -> None:
    pool, _ = await make.pool(slots=1)
    waiting = asyncio.create_task(pool.lease("early"))
    await asyncio.sleep(0)
    await pool.aclose()
    with pytest.raises(PoolClosedError):
        await waiting


async def test_a_pool_is_used_only_inside_its_context(make: Maker) -> None:
    pool = (
        FarmPool(FarmAccess(("http://127.0.0.1:9",), "none"))
        if make.shared
        else SlotPool(make.backend(), PoolSettings())
    )
    with pytest.raises(PoolClosedError):
        await pool.lease("t")


async def test_up_with_demand_and_down_when_idle(make: Maker) -> None:
    pool, _ = await make.pool(slots=2, max_containers=3, idle_containers_after_s=0.6)
    leases = await asyncio.gather(*(pool.lease(f"t{number}") for number in range(6)))
    assert sum(pool.statistics().containers.values()) == 3
    assert sorted({lease.container.index for lease in leases}) == [0, 1, 2]
    low = [lease for lease in leases if lease.container.index == 0]
    await asyncio.gather(*(lease.release() for lease in leases if lease not in low))
    await until(lambda: sum(pool.statistics().containers.values()) == 1)
    assert [lease.lost for lease in low] == [None, None], "a container in use was scaled away"
    assert await _run(low[0], "echo alive") == "alive\n"
    async with asyncio.TaskGroup() as group:
        for lease in low:
            group.create_task(lease.release())


async def test_from_no_container_at_all(make: Maker) -> None:
    pool, _ = await make.pool(slots=1, min_containers=0, idle_containers_after_s=0.4)
    assert _slots(pool) == {}
    async with await pool.lease("first"):
        pass
    await until(lambda: not pool.statistics().containers)
    async with await pool.lease("second"):
        pass


async def test_a_name_that_is_no_text_is_refused_and_leaks_nothing(make: Maker) -> None:
    pool, _ = await make.pool(slots=2)
    async with await pool.lease("fine"):
        pass
    with pytest.raises(ConfigError, match="trajectory"):
        await pool.lease("caf\ud800", timeout_s=10)
    await until(lambda: pool.statistics().slots.get(SlotState.free, 0) == 2)


async def test_a_lease_that_fails_in_no_known_way_fails_its_waiter_and_leaks_nothing(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, _ = await make.pool(slots=2)
    async with await pool.lease("fine"):
        pass
    await until(lambda: pool.statistics().slots.get(SlotState.free, 0) == 2)

    asked: set[int] = set()

    async def fail(_: object, request: LeaseRequest, **__: object) -> None:
        asked.add(request.slot)
        raise ValueError("nobody expects this")

    with monkeypatch.context() as patched:
        patched.setattr(ContainerControl, "lease", fail)
        with pytest.raises(InfraError, match="nobody expects this"):
            await pool.lease("unlucky", timeout_s=10)
        await until(lambda: pool.statistics().slots.get(SlotState.free, 0) == 2)
    assert len(asked) == 1, "the other slot is not asked for what would fail there as well"
    async with await pool.lease("fine again"):
        pass


async def test_a_group_is_leased_as_a_whole(make: Maker) -> None:
    pool, _ = await make.pool(slots=3)
    single = await pool.lease("single")
    group = asyncio.create_task(pool.lease_group(["g-0", "g-1", "g-2"]))
    await until(lambda: pool.statistics().waiting == 1)
    later = asyncio.create_task(pool.lease("later"))
    await until(lambda: pool.statistics().waiting == 2)
    assert _slots(pool)[SlotState.free] == 2, "the group waits for the third slot, and nobody is served before it"
    await single.release()
    leases = await group
    assert [lease.trajectory for lease in leases] == ["g-0", "g-1", "g-2"]
    assert len({lease.key.slot for lease in leases}) == 3
    assert await asyncio.gather(*(_run(lease, "echo here") for lease in leases)) == ["here\n"] * 3
    assert not later.done()
    for lease in leases:
        await lease.release()
    await (await later).release()


async def test_a_group_that_leaves_lets_others_pass(make: Maker) -> None:
    pool, _ = await make.pool(slots=2)
    single = await pool.lease("single")
    group = asyncio.create_task(pool.lease_group(["g-0", "g-1"]))
    await until(lambda: pool.statistics().waiting == 1)
    later = asyncio.create_task(pool.lease("later"))
    await until(lambda: pool.statistics().waiting == 2)
    group.cancel()
    with pytest.raises(asyncio.CancelledError):
        await group
    await (await later).release()
    await single.release()
    await _all_free(pool, 2)


async def test_a_group_that_can_never_be_had_is_refused(make: Maker) -> None:
    pool, _ = await make.pool(slots=2)
    async with await pool.lease("first"):  # how many slots there can be is known from the first container on
        with pytest.raises(QuotaError):
            await pool.lease_group(["g-0", "g-1", "g-2"])
    with pytest.raises(ConfigError):
        await pool.lease_group([])
