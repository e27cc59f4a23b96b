"""Connections that break, over the whole path: what ran is counted by what it left in a file."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio

from agentenv.config import ExecutorSettings
from agentenv.errors import PoolClosedError
from agentenv.executor.session import ToolSession
from agentenv.executor.tool_executor import ToolExecutor
from agentenv.slots.pool import SlotPool
from agentenv.tools.catalog import ToolCatalog
from tests.contract.conftest import Client
from tests.contract.executor.farm import OWN, UNTIL_GO, ProxiedLease, ProxiedPool, sh, until_bash
from tests.faults.proxy import Proxy
from tests.waiting import START_S

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass
class Farm:
    executor: ToolExecutor
    proxy: Proxy


@pytest_asyncio.fixture(loop_scope="module")
async def farm(shared_pool: SlotPool) -> AsyncIterator[Farm]:
    settings = ExecutorSettings(reconnect_deadline_s=60)
    async with (
        Proxy(0) as proxy,
        ToolExecutor(ProxiedPool(shared_pool, proxy), ToolCatalog.builtin(), settings) as executor,
    ):
        yield Farm(executor, proxy)


@pytest_asyncio.fixture(loop_scope="module")
async def session(farm: Farm) -> AsyncIterator[ToolSession]:
    async with farm.executor.open("t", acquire_timeout_s=START_S) as opened:
        yield opened


@asynccontextmanager
async def beside(session: ToolSession) -> AsyncIterator[Callable[[str, str], Awaitable[None]]]:
    """Commands in the session's slot that do not go through the proxy, each by the tool that is named."""
    lease = session.lease
    assert isinstance(lease, ProxiedLease)
    async with Client.open(lease.direct) as client:

        async def run(tool: str, command: str) -> None:
            result = await client.run(lease.key, command, timeout_s=60, tool=tool)
            assert result.exit_code == 0, result

        yield run


@pytest.mark.parametrize("direction", ["up", "down"])
@pytest.mark.parametrize("count", [1, 200, 450, 800, 1100, 1700, 2500])
async def test_cut_anywhere_each_command_runs_once(
    farm: Farm, session: ToolSession, direction: Any, count: int
) -> None:
    farm.proxy.cut_after(direction, count)
    said = await asyncio.gather(*(sh(session, f"echo {n} >> log; echo {n}") for n in range(12)))
    assert said == [f"{n}\n" for n in range(12)]
    assert await sh(session, "cat log") == "".join(f"{n}\n" for n in range(12))
    for n in range(12, 20):
        await sh(session, f"echo {n} >> log")
    assert await sh(session, "cat log") == "".join(f"{n}\n" for n in range(20))
    assert farm.proxy.cuts == 1


async def test_cut_while_the_command_runs(farm: Farm, session: ToolSession) -> None:
    await sh(session, "true")
    call = asyncio.create_task(sh(session, f"echo ran >> log; {UNTIL_GO}; echo finished"))
    async with beside(session) as run:
        await run("terminal", "until [ -e log ]; do sleep 0.05; done")
        farm.proxy.cut()
        await run("terminal", "touch go")
    assert await call == "finished\n"
    assert await sh(session, "cat log") == "ran\n"


async def test_a_command_that_ended_while_nobody_was_connected(farm: Farm, session: ToolSession) -> None:
    await sh(session, "true")
    call = asyncio.create_task(sh(session, f"echo ran >> log; {UNTIL_GO}; echo finished"))
    async with beside(session) as run:
        await run("terminal", "until [ -e log ]; do sleep 0.05; done")
        farm.proxy.refusing = True
        farm.proxy.cut()
        await run("terminal", "touch go")
        await run("bash", "true")  # it has waited for the end of the one before
    assert not call.done()
    farm.proxy.refusing = False
    assert await call == "finished\n"
    assert await sh(session, "cat log") == "ran\n"


async def test_cut_in_the_middle_of_a_large_output(farm: Farm, session: ToolSession) -> None:
    await sh(session, "true")
    farm.proxy.cut_after("down", 300_000)
    output = await sh(session, "echo ran >> log; head -c 900000 /dev/zero | tr '\\0' x")
    assert output == "x" * 900_000
    assert farm.proxy.cuts == 1
    assert await sh(session, "cat log") == "ran\n"


async def test_repeated_cuts_under_many_sessions(farm: Farm) -> None:
    answered = 0

    async def trajectory(index: int) -> None:
        nonlocal answered
        async with farm.executor.open(f"t{index}", acquire_timeout_s=START_S) as session:
            for n in range(10):
                await sh(session, f"echo {n} >> log")
                answered += 1
            assert await sh(session, "cat log") == "".join(f"{n}\n" for n in range(10))

    async def cutter() -> None:
        before, pause_s = 0, 0.05
        while True:
            await asyncio.sleep(pause_s)
            # On a loaded machine no attempt may fit between cuts that are always as close.
            before, pause_s = answered, 0.05 if answered > before else 1.2 * pause_s
            farm.proxy.cut()

    cutting = asyncio.create_task(cutter())
    try:
        await asyncio.gather(*(trajectory(index) for index in range(4)))
    finally:
        cutting.cancel()
        await asyncio.gather(cutting, return_exceptions=True)


async def test_cancelled_during_an_outage_does_not_go_on_running(farm: Farm, session: ToolSession) -> None:
    await sh(session, "true")
    call = asyncio.create_task(sh(session, "touch began; sleep 50; touch finished"))
    async with beside(session) as run:
        await run("terminal", "until [ -e began ]; do sleep 0.05; done")
    farm.proxy.refusing = True
    farm.proxy.cut()
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    farm.proxy.refusing = False
    async with asyncio.timeout(30):  # if it went on, this call would wait for its end
        assert await sh(session, "ls") == "began\n"


@pytest.mark.parametrize("after_ms", [0, 1, 2, 4, 8, 16, 32, 64, 128])
async def test_cancelled_at_many_moments_the_slot_stays_good(farm: Farm, session: ToolSession, after_ms: int) -> None:
    """Each command ran at most once, ended with its cancellation, and the next call is served."""
    calls = [asyncio.create_task(sh(session, f"echo {n} >> log; sleep 50{OWN}; echo {n} >> ended")) for n in range(3)]
    await asyncio.sleep(after_ms / 1000)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    async with asyncio.timeout(30):  # if one went on, this call would wait for its end
        ran = (await sh(session, "cat log || true")).split()
    assert len(ran) == len(set(ran))
    await until_bash(session, f"! ps -eo args | grep '^sleep 50{OWN}'")
    assert await sh(session, "cat ended 2>/dev/null || true") == ""


async def test_closing_a_session_ends_what_it_runs(farm: Farm) -> None:
    async with farm.executor.open("t", acquire_timeout_s=START_S) as session:
        call = asyncio.create_task(sh(session, "sleep 30"))
        await asyncio.sleep(0.2)
    with pytest.raises(PoolClosedError):
        await call
    sessions = [farm.executor.open(f"n{index}", acquire_timeout_s=START_S) for index in range(4)]
    async with sessions[0] as a, sessions[1] as b, sessions[2] as c, sessions[3] as d:
        assert [await sh(one, "echo free") for one in (a, b, c, d)] == ["free\n"] * 4
