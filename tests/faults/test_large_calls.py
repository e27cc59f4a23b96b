"""Large calls over slow and broken connections: they get through, and nobody waits for them or ends with them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from agentenv.config import ExecutorSettings
from agentenv.errors import ConnectionLostError
from agentenv.executor import client
from agentenv.executor.tool_executor import ToolExecutor
from agentenv.tools.catalog import ToolCatalog
from agentenv.wire.calls import Call, CallResult
from tests.faults.proxy import Proxy
from tests.faults.stub_pool import StubPool
from tests.faults.test_executor_connection import CATALOG, Farm, assert_each_ran_once
from tests.faults.wire_server import WireServer, echo
from tests.waiting import until

DEADLINE_S = 6.0
SLOW = 1_000_000.0
"""Bytes a second."""
LARGE = "x" * 9_000_000
"""Half as much again as comes through before the client calls a silent connection dead."""


@pytest.fixture
async def farm() -> AsyncIterator[Farm]:
    async with WireServer() as server, Proxy(server.port) as proxy:
        pool = StubPool(server.handle(proxy.port))
        async with ToolExecutor(pool, CATALOG, ExecutorSettings(reconnect_deadline_s=DEADLINE_S)) as executor:
            yield Farm(server, proxy, pool, executor)


async def wrote(call: Call) -> CallResult:
    """write_file tells how much came, read_file gives much, bash echoes."""
    if call.tool == "write_file":
        return CallResult(id=call.id, content={"size_bytes": len(str(call.arguments["text"])), "created": True})
    if call.tool == "read_file":
        return CallResult(id=call.id, content={"text": LARGE, "size_bytes": len(LARGE), "mode": 0o644})
    return await echo(call)


@pytest.mark.parametrize("direction", ["up", "down"])
async def test_a_large_call_over_a_slow_connection_succeeds_and_nobody_waits_for_it(farm: Farm, direction: Any) -> None:
    farm.server.run = wrote
    async with farm.executor.open("large") as large, farm.executor.open("neighbour") as neighbour:
        await neighbour.call("bash", {"command": "warm"})
        farm.proxy.bytes_per_s[direction] = SLOW
        if direction == "up":
            moving = asyncio.create_task(large.call("write_file", {"path": "f", "text": LARGE}))
        else:
            moving = asyncio.create_task(large.call("read_file", {"path": "f"}))
        beside = 0
        while not moving.done():
            assert (await neighbour.call("bash", {"command": str(beside)})).stdout == str(beside)
            beside += 1
            await asyncio.sleep(0.05)
        result = await moving
    assert isinstance(result.content, dict)
    assert result.content["size_bytes"] == len(LARGE)
    assert len(str(result.content.get("text", LARGE))) == len(LARGE)
    assert beside > 10, "the neighbour's calls went on while the bytes moved"
    assert farm.server.streams == 1
    assert_each_ran_once(farm, 2 + beside)


async def test_a_large_call_that_cannot_get_through_ends_alone(farm: Farm) -> None:
    release = asyncio.Event()

    async def run(call: Call) -> CallResult:
        await release.wait()
        return await wrote(call)

    farm.server.run = run
    farm.server.cut_uploads = True
    async with farm.executor.open("large") as large, farm.executor.open("neighbour") as neighbour:
        waiting = asyncio.create_task(neighbour.call("bash", {"command": "x"}))
        await until(lambda: farm.server.runs)
        with pytest.raises(ConnectionLostError):
            await large.call("write_file", {"path": "f", "text": LARGE})
        release.set()
        assert (await waiting).stdout == "x"
        assert (await large.call("bash", {"command": "y"})).stdout == "y"
    assert (farm.server.streams, farm.executor.statistics().infra_faults) == (1, 1)


async def test_calls_of_one_session_stay_in_order_behind_a_large_one(farm: Farm) -> None:
    farm.server.run = wrote
    farm.proxy.bytes_per_s["up"] = 4 * SLOW
    async with farm.executor.open("t") as session, farm.executor.open("other") as other:
        calls = [
            asyncio.create_task(session.call("write_file", {"path": "f", "text": LARGE})),
            asyncio.create_task(session.call("bash", {"command": "second"})),
        ]
        await until(lambda: farm.server.arriving)
        await other.call("bash", {"command": "x"})
        assert not farm.server.attached, "it is still on its way"
        written, second = await asyncio.gather(*calls)
    assert farm.server.runs[1:] == [written.id, second.id]


async def test_a_large_call_that_is_cancelled_leaves_nothing(farm: Farm) -> None:
    farm.server.run = wrote
    farm.proxy.bytes_per_s["up"] = SLOW
    async with farm.executor.open("t") as session:
        moving = asyncio.create_task(session.call("write_file", {"path": "f", "text": LARGE}))
        await until(lambda: farm.server.arriving)
        moving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await moving
        await until(lambda: not farm.server.arriving)
        await until(lambda: farm.server.forgotten)
        assert (await session.call("bash", {"command": "x"})).stdout == "x"
    assert_each_ran_once(farm, 1)
    assert farm.executor.statistics().running_now == 0


async def test_a_call_whose_answer_was_lost_is_asked_about_again(farm: Farm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever lost it: the stream is well, and nothing else would ever bring the answer."""
    monkeypatch.setattr(client, "_OVERDUE_S", 0.2)
    monkeypatch.setattr(client, "_OVERDUE_CHECK_S", 0.1)
    farm.server.lose_answers = 2
    async with farm.executor.open("t") as session:
        async with asyncio.timeout(20):
            assert (await session.call("bash", {"command": "x"}, timeout_s=0.2)).stdout == "x"
    assert farm.server.streams == 1
    assert farm.executor.statistics().reasked >= 2
    assert_each_ran_once(farm, 1)


def test_the_catalog_keeps_bytes_as_they_are() -> None:
    checked = ToolCatalog.builtin().validate("write_file", {"path": "f", "data": b"\xff" * 300_000})
    assert checked["data"] == b"\xff" * 300_000
    assert ToolCatalog.builtin().validate("write_file", {"path": "f", "data": b"\xff"})["data"] == b"\xff"
