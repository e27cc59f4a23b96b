"""Servers and containers that die or hang, over the whole path: what ran is counted by what it left in a file."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from agentenv.config import ExecutorSettings
from agentenv.errors import CallLostError, ContainerLostError, InfraError
from agentenv.executor.session import ToolSession
from agentenv.executor.tool_executor import ToolExecutor
from agentenv.slots.pool import SlotPool
from agentenv.tools.catalog import ToolCatalog
from agentenv.wire.calls import CallResult
from tests.contract.executor.farm import Breaker, sh
from tests.waiting import START_S


@pytest.fixture
async def executor(pool: SlotPool) -> AsyncIterator[ToolExecutor]:
    async with ToolExecutor(pool, ToolCatalog.builtin(), ExecutorSettings(reconnect_deadline_s=60)) as opened:
        yield opened


@pytest.fixture
async def session(executor: ToolExecutor) -> AsyncIterator[ToolSession]:
    async with executor.open("t", acquire_timeout_s=START_S) as opened:
        yield opened


async def lasting(session: ToolSession, command: str) -> CallResult:
    return await session.call("bash", {"command": command}, timeout_s=2 * START_S)


async def test_a_restarted_server_never_runs_a_call_again(session: ToolSession, breaker: Breaker) -> None:
    await sh(session, "echo kept > kept; touch log")
    call = asyncio.create_task(lasting(session, "echo ran >> log; sleep 1000"))
    await asyncio.sleep(0.3)
    await breaker.crash_server()
    with pytest.raises(CallLostError):
        async with asyncio.timeout(START_S):
            await call
    said = await sh(session, "cat kept log")
    assert said in ("kept\n", "kept\nran\n"), "the slot and its files outlive the server; nothing ran twice"


async def test_a_dead_container_ends_its_calls_typed(
    executor: ToolExecutor, session: ToolSession, breaker: Breaker
) -> None:
    await sh(session, "true")
    call = asyncio.create_task(lasting(session, "sleep 1000"))
    await asyncio.sleep(0.2)
    await breaker.kill_container(session.lease.container)
    with pytest.raises(ContainerLostError):
        async with asyncio.timeout(START_S):
            await call
    with pytest.raises(InfraError):
        await session.call("bash", {"command": "true"})
    async with executor.open("next", acquire_timeout_s=START_S) as fresh:
        assert await sh(fresh, "echo new") == "new\n"


async def test_a_late_server_keeps_its_leases_and_its_calls(session: ToolSession, breaker: Breaker) -> None:
    """Long enough to be suspected: its calls wait, and nobody else takes the slot meanwhile."""
    await sh(session, "echo mine > file")
    key = session.lease.key
    call = asyncio.create_task(sh(session, "sleep 0.2; echo ran >> log; echo said"))
    await asyncio.sleep(0.05)
    await breaker.pause_server(1.5)
    assert await call == "said\n"
    assert await sh(session, "cat file log") == "mine\nran\n"
    assert session.lease.lost is None
    assert session.lease.key == key
