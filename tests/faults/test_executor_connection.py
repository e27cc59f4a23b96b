"""Cut, stalled and delayed connections: each call runs once, each result arrives or ends typed."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from agentenv.config import ExecutorSettings
from agentenv.deadlines import scaled
from agentenv.errors import CallLostError, ConnectionLostError, ContainerLostError, PoolClosedError
from agentenv.executor.tool_executor import ToolExecutor
from agentenv.tools.catalog import ToolCatalog
from agentenv.wire.calls import Call, CallResult, Result
from tests.faults.proxy import Proxy
from tests.faults.stub_pool import StubPool
from tests.faults.wire_server import WireServer, echo
from tests.waiting import loop_turns, until

CATALOG = ToolCatalog.builtin()


@dataclass
class Farm:
    server: WireServer
    proxy: Proxy
    pool: StubPool
    executor: ToolExecutor


RECONNECT_S = scaled(20.0)


@pytest.fixture
async def farm() -> AsyncIterator[Farm]:
    async with WireServer() as server, Proxy(server.port) as proxy:
        pool = StubPool(server.handle(proxy.port))
        async with ToolExecutor(pool, CATALOG, ExecutorSettings(reconnect_deadline_s=RECONNECT_S)) as executor:
            yield Farm(server, proxy, pool, executor)


@pytest.fixture
async def impatient() -> AsyncIterator[Farm]:
    """The same with a deadline short enough to be waited for."""
    async with WireServer() as server, Proxy(server.port) as proxy:
        pool = StubPool(server.handle(proxy.port))
        async with ToolExecutor(pool, CATALOG, ExecutorSettings(reconnect_deadline_s=4.0)) as executor:
            yield Farm(server, proxy, pool, executor)


def client_state(farm: Farm) -> str:
    return repr(next(iter(farm.executor._entries.values())).client)


async def run_many(farm: Farm, *, sessions: int = 4, turns: int = 5, output: str = "") -> None:
    async def trajectory(index: int) -> None:
        async with farm.executor.open(f"t{index}") as session:
            for turn in range(turns):
                wanted = f"{index}:{turn}:{output}"
                assert (await session.call("bash", {"command": wanted})).stdout == wanted

    await asyncio.gather(*(trajectory(index) for index in range(sessions)))


def assert_each_ran_once(farm: Farm, count: int) -> None:
    assert len(farm.server.runs) == count
    assert len(set(farm.server.runs)) == count


# The handshake is about 900 bytes up and 700 down; a batch of four about 1,000 up, its results 1,000 down.
@pytest.mark.parametrize("direction", ["up", "down"])
@pytest.mark.parametrize("count", [1, 100, 300, 600, 700, 850, 900, 1000, 1200, 1500, 1900, 2300, 2800, 3500, 4500])
async def test_cut_anywhere_and_nothing_is_lost_or_run_twice(farm: Farm, direction: Any, count: int) -> None:
    farm.proxy.cut_after(direction, count)
    await run_many(farm, turns=10)
    assert farm.proxy.cuts == 1, "the cut fell into the work"
    assert_each_ran_once(farm, 40)


async def test_many_cuts_in_one_life(farm: Farm) -> None:
    async def cutter() -> None:
        while True:
            farm.proxy.cut_after("down", 2500)
            await until(partial(cut_again, farm.proxy.cuts))

    def cut_again(before: int) -> bool:
        return farm.proxy.cuts > before

    cutting = asyncio.create_task(cutter())
    await run_many(farm, sessions=8, turns=20)
    cutting.cancel()
    await asyncio.gather(cutting, return_exceptions=True)
    assert farm.proxy.cuts >= 5
    assert farm.executor.statistics().reasked >= 1
    assert_each_ran_once(farm, 160)


async def test_cut_before_the_batch_was_accepted(farm: Farm) -> None:
    """The first batch never reaches the server's logic; the second asking does."""
    refused: list[str] = []

    async def swallow_first(socket: Any, batch: Any) -> bool:
        if not refused:
            refused.extend(call.id for call in batch.calls)
            farm.proxy.cut()
            return False
        return True

    farm.server.on_batch = swallow_first
    async with farm.executor.open("t") as session:
        result = await session.call("bash", {"command": "x"})
    assert (result.stdout, [result.id]) == ("x", refused)
    assert_each_ran_once(farm, 1)


async def test_cut_after_acceptance_while_the_call_runs(farm: Farm) -> None:
    release = asyncio.Event()

    async def run(call: Call) -> CallResult:
        await release.wait()
        return await echo(call)

    farm.server.run = run
    async with farm.executor.open("t") as session:
        waiting = asyncio.create_task(session.call("bash", {"command": "x"}))
        await until(lambda: farm.server.runs)
        farm.proxy.cut()
        await until(lambda: farm.server.streams == 2)
        release.set()
        assert (await waiting).stdout == "x"
    assert_each_ran_once(farm, 1)


async def test_a_result_finished_while_nobody_was_connected(farm: Farm) -> None:
    release = asyncio.Event()

    async def run(call: Call) -> CallResult:
        await release.wait()
        return await echo(call)

    farm.server.run = run
    async with farm.executor.open("t") as session:
        waiting = asyncio.create_task(session.call("bash", {"command": "x"}))
        await until(lambda: farm.server.runs)
        farm.proxy.refusing = True
        farm.proxy.cut()
        release.set()
        await until(lambda: all(task.done() for task in farm.server.known.values()))
        await until(lambda: farm.proxy.connections >= 4)
        farm.proxy.refusing = False
        assert (await waiting).stdout == "x"
    assert_each_ran_once(farm, 1)


async def test_cut_in_the_middle_of_a_large_result(farm: Farm) -> None:
    async with farm.executor.open("t") as session:
        await session.call("bash", {"command": "warm"})
        farm.proxy.cut_after("down", 400_000)
        output = secrets.token_hex(500_000)
        assert (await session.call("bash", {"command": output})).stdout == output
    assert farm.proxy.cuts == 1
    assert_each_ran_once(farm, 2)


async def test_cut_in_the_middle_of_a_large_request(farm: Farm) -> None:
    async with farm.executor.open("t") as session:
        await session.call("bash", {"command": "warm"})
        farm.proxy.cut_after("up", 400_000)
        command = secrets.token_hex(500_000)
        assert (await session.call("bash", {"command": command})).stdout == command
    assert farm.proxy.cuts == 1
    assert_each_ran_once(farm, 2)


async def test_cut_while_idle_is_noticed_by_the_next_call(farm: Farm) -> None:
    async with farm.executor.open("t") as session:
        await session.call("bash", {"command": "x"})
        farm.proxy.cut()
        await until(lambda: "not connected" in client_state(farm))
        assert farm.server.streams == 1, "nobody asked for a connection"
        assert (await session.call("bash", {"command": "y"})).stdout == "y"
    assert farm.server.streams == 2


@pytest.mark.parametrize("direction", ["up", "down"])
async def test_a_stalled_stream_is_cut_and_asked_again(impatient: Farm, direction: Any) -> None:
    """The stall outlasts the silence allowed; the connection after it works."""
    async with impatient.executor.open("t") as session:
        await session.call("bash", {"command": "x"})
        impatient.proxy.stall(direction)
        waiting = asyncio.create_task(session.call("bash", {"command": "y"}))
        connections = impatient.proxy.connections
        await until(lambda: impatient.proxy.connections > connections)
        impatient.proxy.resume()
        assert (await waiting).stdout == "y"
    assert_each_ran_once(impatient, 2)


async def test_a_stall_with_unsent_megabytes_leaves_nothing_behind(impatient: Farm) -> None:
    async with impatient.executor.open("t") as session:
        await session.call("bash", {"command": "x"})
        impatient.proxy.stall("up")
        waiting = asyncio.create_task(session.call("bash", {"command": "y" * 8_000_000}))
        connections = impatient.proxy.connections
        await until(lambda: impatient.proxy.connections > connections)
        impatient.proxy.resume()
        assert len((await waiting).stdout) == 8_000_000
    assert_each_ran_once(impatient, 2)


async def test_a_batch_that_is_never_acknowledged_is_asked_again(impatient: Farm) -> None:
    swallowed: list[int] = []

    async def swallow_first(socket: Any, batch: Any) -> bool:
        swallowed.append(batch.batch)
        return len(swallowed) > 1

    impatient.server.on_batch = swallow_first
    async with impatient.executor.open("t") as session:
        assert (await session.call("bash", {"command": "x"})).stdout == "x"
    assert impatient.server.streams == 2
    assert_each_ran_once(impatient, 1)


async def test_a_long_call_on_a_living_stream_is_waited_for(impatient: Farm) -> None:
    """Longer than two deadlines, with nothing on the wire but pings."""

    async def run(call: Call) -> CallResult:
        await asyncio.sleep(10.0)
        return await echo(call)

    impatient.server.run = run
    async with impatient.executor.open("t") as session:
        assert (await session.call("bash", {"command": "x"})).stdout == "x"
    assert impatient.server.streams == 1


async def test_unreachable_for_too_long_ends_typed_and_heals_later(impatient: Farm) -> None:
    async with impatient.executor.open("t") as session:
        await session.call("bash", {"command": "x"})
        impatient.proxy.refusing = True
        impatient.proxy.cut()
        with pytest.raises(ConnectionLostError, match=r"could not be reached for 4 s"):
            await session.call("bash", {"command": "y"})
        impatient.proxy.refusing = False
        assert (await session.call("bash", {"command": "z"})).stdout == "z"


async def test_a_server_that_accepts_and_hangs_up_is_not_hammered(impatient: Farm) -> None:
    async def hang_up(socket: Any, batch: Any) -> bool:
        await impatient.server.drop_streams()
        return False

    impatient.server.on_batch = hang_up
    async with impatient.executor.open("t") as session:
        with pytest.raises(ConnectionLostError):
            await session.call("bash", {"command": "x"})
    assert 2 <= impatient.server.streams <= 30


async def test_a_restarted_server_loses_the_call_and_never_runs_it_again(farm: Farm) -> None:
    async def run(call: Call) -> CallResult:
        if call.arguments["command"] == "slow":
            await asyncio.Event().wait()
        return await echo(call)

    farm.server.run = run
    async with farm.executor.open("t") as session:
        waiting = asyncio.create_task(session.call("bash", {"command": "slow"}))
        await until(lambda: farm.server.runs)
        farm.proxy.refusing = True
        farm.proxy.cut()
        await farm.server.forget_everything()
        farm.proxy.refusing = False
        with pytest.raises(CallLostError, match="restarted"):
            await waiting
        assert (await session.call("bash", {"command": "after"})).stdout == "after"
    assert_each_ran_once(farm, 2)


async def test_a_call_made_during_an_outage_runs_on_the_restarted_server(farm: Farm) -> None:
    """It was never sent anywhere, so the new server may run it."""
    async with farm.executor.open("t") as session:
        await session.call("bash", {"command": "x"})
        farm.proxy.refusing = True
        farm.proxy.cut()
        await farm.server.forget_everything()
        await until(lambda: "not connected" in client_state(farm))
        waiting = asyncio.create_task(session.call("bash", {"command": "y"}))
        connections = farm.proxy.connections
        await until(lambda: farm.proxy.connections > connections)
        farm.proxy.refusing = False
        assert (await waiting).stdout == "y"
    assert_each_ran_once(farm, 2)


async def test_a_lease_lost_during_an_outage_ends_the_call_at_once(farm: Farm) -> None:
    async with farm.executor.open("t") as session:
        await session.call("bash", {"command": "x"})
        farm.proxy.refusing = True
        farm.proxy.cut()
        waiting = asyncio.create_task(session.call("bash", {"command": "y"}))
        await until(lambda: farm.proxy.connections >= 3)
        farm.pool.leases[0].lose(ContainerLostError("the container died"))
        with pytest.raises(ContainerLostError):
            await waiting
    assert farm.executor.statistics().containers_now == 0


async def test_cancelled_during_an_outage_is_cancelled_in_the_container_afterwards(farm: Farm) -> None:
    async def run(call: Call) -> CallResult:
        await asyncio.Event().wait()
        raise AssertionError

    farm.server.run = run
    async with farm.executor.open("t") as session:
        waiting = asyncio.create_task(session.call("bash", {"command": "x"}))
        await until(lambda: farm.server.runs)
        farm.proxy.refusing = True
        farm.proxy.cut()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        farm.proxy.refusing = False
        await until(lambda: farm.server.cancelled == farm.server.runs)
    assert_each_ran_once(farm, 1)


async def test_results_nobody_waits_for_are_ignored(farm: Farm) -> None:
    async def twice(call: Call) -> CallResult:
        result = await echo(call)
        for socket in farm.server._open:
            await socket.send_str(Result(result=result).model_dump_json())
            await socket.send_str(Result(result=CallResult(id="never-asked")).model_dump_json())
        return result

    farm.server.run = twice
    await run_many(farm)
    assert farm.server.streams == 1


async def test_delay_changes_nothing_but_time(farm: Farm) -> None:
    farm.proxy.delay_s = 0.03
    await run_many(farm, sessions=10, turns=3)
    assert_each_ran_once(farm, 30)
    assert farm.executor.statistics().batches < 30, "calls waited for company, not for each other's results"


async def test_closing_during_an_outage_does_not_wait_for_it(farm: Farm) -> None:
    async with farm.executor.open("t") as session:
        await session.call("bash", {"command": "x"})
        farm.proxy.refusing = True
        farm.proxy.cut()
        waiting = asyncio.create_task(session.call("bash", {"command": "y"}))
        await until(lambda: farm.proxy.connections >= 3)
        async with asyncio.timeout(RECONNECT_S / 2):
            await farm.executor.aclose()
        with pytest.raises(PoolClosedError):
            await waiting


# Every suspension of a call's way is visited: the call is cancelled after 0, 1, 2 … turns of the loop.
@pytest.mark.parametrize("connected", [True, False])
async def test_cancellation_at_every_turn_of_the_loop(farm: Farm, connected: bool) -> None:
    finished = 0
    async with farm.executor.open("t") as session:
        if connected:
            await session.call("bash", {"command": "warm"})
        for steps in range(120):
            call = asyncio.create_task(session.call("bash", {"command": str(steps)}))
            await loop_turns(steps)
            call.cancel()
            await asyncio.wait({call})
            finished += not call.cancelled()
            assert call.cancelled() or call.exception() is None
            if not connected:
                farm.proxy.cut()
        assert (await session.call("bash", {"command": "after"})).stdout == "after"
        assert 0 < finished < 120 or not connected, "some were cancelled, some not"
        await until(lambda: farm.executor.statistics().running_now == 0)
    assert len(farm.server.runs) == len(set(farm.server.runs))


async def test_entering_and_leaving_cancelled_at_every_turn_leaks_no_lease(farm: Farm) -> None:
    async def trajectory() -> None:
        async with farm.executor.open("t") as session:
            await session.call("bash", {"command": "x"})

    for steps in range(80):
        task = asyncio.create_task(trajectory())
        await loop_turns(steps)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await until(lambda: farm.executor.statistics().sessions_now == 0)
    assert [lease.released for lease in farm.pool.leases] == [1] * len(farm.pool.leases)
    assert len(farm.pool.leases) >= 70
