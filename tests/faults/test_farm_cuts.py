"""The connection between a farm and its clients is cut anywhere: nothing is granted twice, lost or leaked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from agentenv.api.farm_server import request_queue
from agentenv.config import ContainerSettings, PoolSettings
from agentenv.errors import ConfigError, TooManyRequestsError
from agentenv.farm_client.access import FarmAccess
from agentenv.farm_client.client import FarmClient
from agentenv.farm_client.pool import FarmPool
from agentenv.slots.backends.fake import FakeBackend
from agentenv.slots.lease import SlotLease
from agentenv.wire import farm as wire
from agentenv.wire.states import SlotState
from tests.farm_service import Served, served, token
from tests.faults.proxy import Direction, Proxy
from tests.waiting import START_S, loop_turns, until

SLOTS = 4
PATIENT = PoolSettings(max_containers=1, acquire_timeout_s=START_S)


@pytest.fixture
async def farm() -> AsyncIterator[Served]:
    backend = FakeBackend(ContainerSettings(slots_per_container=SLOTS, require_sandbox=False))
    async with served(backend, PATIENT) as opened:
        yield opened


@pytest.fixture
async def proxy(farm: Served) -> AsyncIterator[Proxy]:
    async with Proxy(int(farm.url.rpartition(":")[2])) as opened:
        yield opened


async def _work(pool: FarmPool) -> None:
    """More leases than there are slots, single ones beside a group."""

    async def single(name: str) -> None:
        async with await pool.lease(name) as lease:
            assert lease.lost is None

    async def group() -> None:
        async with AsyncExitStack() as stack:
            leases = [await stack.enter_async_context(lease) for lease in await pool.lease_group(["g-0", "g-1"])]
            assert len({(lease.container.id, lease.key.slot) for lease in leases}) == 2

    async with asyncio.TaskGroup() as tasks:
        for number in range(3):
            tasks.create_task(single(f"s-{number}"))
        tasks.create_task(group())


async def _all_free(farm: Served) -> None:
    await until(lambda: farm.farm.manager.ledger.slot_counts() == {SlotState.free: SLOTS})


@pytest.mark.parametrize(("direction", "step", "most"), [("down", 173, 6_000), ("up", 41, 1_200)])
async def test_a_cut_after_any_byte_costs_no_lease(
    farm: Served, proxy: Proxy, direction: Direction, step: int, most: int
) -> None:
    access = FarmAccess((f"http://127.0.0.1:{proxy.port}",), token())
    async with FarmPool(access, settings=PATIENT) as pool:
        for count in range(1, most, step):
            proxy.cut_after(direction, count)
            await asyncio.wait_for(_work(pool), START_S)
        assert proxy.cuts > most // step // 3, "many rounds were cut"
        await _all_free(farm)
        assert pool.statistics().leases_lost == 0
        assert pool.statistics().leases_granted == pool.statistics().leases_released
    assert farm.farm.manager.ledger.waiting == 0


async def test_a_client_that_leaves_while_it_is_cut_off_leaks_nothing(farm: Served, proxy: Proxy) -> None:
    access = FarmAccess((f"http://127.0.0.1:{proxy.port}",), token())
    async with FarmPool(access, settings=PATIENT) as pool:
        held = [await pool.lease(f"h-{number}") for number in range(SLOTS)]
        waiting = asyncio.create_task(pool.lease("waits"))
        await until(lambda: farm.farm.manager.ledger.waiting == 1)
        proxy.refusing = True
        proxy.cut()
        waiting.cancel()
        for lease in held:  # at the container: the farm is not needed for it
            await lease.release()
        await until(lambda: farm.farm.manager.ledger.waiting == 0)  # it was granted to a client that has left
        proxy.refusing = False
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await _all_free(farm)


async def test_a_group_that_leaves_at_any_step_leaks_nothing() -> None:
    backend = FakeBackend(ContainerSettings(slots_per_container=SLOTS, require_sandbox=False))
    async with served(backend, PATIENT, relay_url="http://127.0.0.1:9") as farm:  # ways to containers are looked for
        async with farm.pool(settings=PATIENT) as pool:
            for steps in range(0, 400, 7):
                asked = asyncio.create_task(pool.lease_group(["g-0", "g-1"]))
                await loop_turns(steps)
                asked.cancel()
                [leases] = await asyncio.gather(asked, return_exceptions=True)
                for lease in leases if isinstance(leases, list) else ():
                    await lease.release()
            await until(lambda: not list(pool.held()))
        await _all_free(farm)


async def test_containers_that_cannot_be_reached_from_here_are_a_wrong_setting(
    farm: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not lost containers one after the other, which the trainer would try again for ever."""

    async def unreachable(base_url: str, within_s: float) -> bool:
        return False

    async with farm.pool(settings=PATIENT) as pool:
        with monkeypatch.context() as patched:
            patched.setattr("agentenv.farm_client.pool.reachable", unreachable)
            with pytest.raises(ConfigError, match=r"farm_route.*cannot be reached from here") as refused:
                await pool.lease_group(["g-0", "g-1"])
            assert "farm relay" in refused.value.next_step
            await _all_free(farm)
        async with farm.pool(settings=PATIENT) as other, await other.lease("t"):
            assert other.statistics().faults == {}


async def test_an_ask_that_arrives_after_its_cancellation_is_granted_nothing(farm: Served) -> None:
    ask = wire.Ask(request_id="asked-too-late-0", trajectories=("t",))
    async with FarmClient(farm.url, token()) as client:
        await client.cancel("asked-too-late-0")
        (state,) = (await client.ask([ask], wait_s=25)).asks
        assert state.state == "refused"
        assert state.error is not None
        assert "cancelled" in state.error.message
        (other,) = (await client.ask([ask.model_copy(update={"request_id": "another-ask-0000"})], wait_s=25)).asks
        assert other.state == "granted"
        await client.cancel("another-ask-0000")
        (again,) = (await client.ask([ask.model_copy(update={"request_id": "another-ask-0000"})], wait_s=25)).asks
        assert again.state == "refused"
    await _all_free(farm)


async def test_a_run_waits_for_a_bounded_number_of_slots(farm: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is slowed down, and others are not; everything is granted in the end."""
    monkeypatch.setattr(request_queue, "MAX_WAITING_SLOTS", 3)
    monkeypatch.setattr(request_queue, "_FULL_RETRY_S", 0.1)
    async with (
        FarmPool(FarmAccess((farm.url,), token("big"), "big"), settings=PATIENT) as pool,
        FarmClient(farm.url, token("big"), run="big") as client,
        FarmPool(FarmAccess((farm.url,), token("small"), "small"), settings=PATIENT) as other,
    ):
        held = [await pool.lease(f"h-{number}") for number in range(SLOTS)]
        waiting: list[asyncio.Task[SlotLease]] = []
        for number in range(6):
            waiting.append(asyncio.create_task(pool.lease(f"w-{number}")))
            await until(lambda: farm.farm.manager.ledger.waiting >= min(len(waiting), 3))
        waits = asyncio.create_task(other.lease("small"))
        await until(lambda: farm.farm.queue.queue_policy.waiting("small") == 1)
        asks = [wire.Ask(request_id=f"one-too-many-{n:03}", trajectories=(f"m-{n}",)) for n in range(4)]
        with pytest.raises(TooManyRequestsError, match="at most 3 may be waited for"):
            await client.ask(asks)
        for lease in held:
            await lease.release()
        for task in (waits, *waiting):
            async with await asyncio.wait_for(task, START_S):
                assert farm.farm.queue.queue_policy.waiting("big") <= 3
    await _all_free(farm)


async def test_leaving_at_any_step_frees_the_slot_at_once(farm: Served) -> None:
    """Long before the TTL of a lease that nobody keeps alive."""
    lasting = PATIENT.model_copy(update={"lease_ttl_s": 600.0})
    async with FarmPool(FarmAccess((farm.url,), token()), settings=lasting) as pool:
        for steps in range(1, 60):
            asked = asyncio.create_task(pool.lease("fickle"))
            await loop_turns(steps)
            asked.cancel()
            [lease] = await asyncio.gather(asked, return_exceptions=True)
            if isinstance(lease, SlotLease):
                await lease.release()
    await _all_free(farm)
