"""Sessions and the sandbox server: many of them, servers that die, leases that end, nothing left behind."""

from __future__ import annotations

import asyncio
from typing import Any

from agentenv.wire.calls import CallResult
from agentenv.wire.leases import LeaseKey
from tests.integration.server_client import Client
from tests.integration.server_stub import TOKEN, StubSupervisor, descriptors
from tests.waiting import DEADLINE_S


def content(result: CallResult) -> dict[str, Any]:
    assert isinstance(result.content, dict), result
    return result.content


async def all_of(client: Client, calls: list[dict[str, Any]]) -> list[CallResult]:
    await client.ask(*calls)
    return [await client.result(call, 3 * DEADLINE_S) for call in calls]


async def test_a_hundred_sessions_in_one_slot_and_nothing_of_them_is_left() -> None:
    async with StubSupervisor(slots=1) as stub, Client(stub.url, TOKEN) as client, client.leased() as key:
        await client.run(key, "true", tool="terminal")
        server = stub.server
        assert server is not None
        before = await descriptors(server.pid)
        names = [f"s{index}" for index in range(100)]
        begun = [
            client.call(key, "terminal", command=f"mine={name}", session=name, pty=index % 10 == 0, timeout_s=60)
            for index, name in enumerate(names)
        ]
        assert [result.exit_code for result in await all_of(client, begun)] == [0] * 100
        used = [client.call(key, "terminal", command="echo $mine", session=name) for name in names]
        assert [result.stdout for result in await all_of(client, used)] == [f"{name}\n" for name in names]
        ended = [client.call(key, "terminal", session=name, reset=True, timeout_s=60) for name in names]
        assert {content(result)["state"] for result in await all_of(client, ended)} == {"none"}
        async with asyncio.timeout(DEADLINE_S):
            while await descriptors(server.pid) > before + 3:  # a spare shell's, which may be made only now
                await asyncio.sleep(0.02)
        assert (await client.run(key, "ps -eo args | grep -c '^bash --norc' || true")).stdout == "1\n"


async def test_a_server_that_comes_back_has_no_sessions_and_kills_what_they_ran() -> None:
    async with StubSupervisor(slots=1) as stub:
        async with Client(stub.url, TOKEN) as client:
            key = await client.lease()
            await client.run(key, "sleep 2001", tool="terminal", timeout_s=0.2)
            await client.run(key, "sleep 2002", tool="terminal", session="p", pty=True, timeout_s=0.2)
            await client.run(key, "sleep 2003", tool="process", action="start")
            await client.run(key, tool="tmux", action="start")
            await stub.crash()
        async with Client(stub.url, TOKEN) as client:
            gone = await client.run(key, "", tool="terminal")
            assert (gone.fault, gone.error) == ("model", "unknown_session")
            async with asyncio.timeout(DEADLINE_S):
                while (await client.run(key, "pgrep -f '^sleep 200[123]'")).exit_code == 0:
                    await asyncio.sleep(0.05)
            fresh = await client.run(key, "echo fresh", tool="terminal")
            assert (fresh.stdout, content(fresh)["started"]) == ("fresh\n", True)
            again = await client.run(key, tool="tmux", action="start")
            assert content(again)["session"]["state"] == "running", again.stderr
            assert await client.release(key) == "free"


async def test_the_end_of_a_lease_answers_every_call_that_waits() -> None:
    async with StubSupervisor(slots=1) as stub, Client(stub.url, TOKEN) as client:
        key = await client.lease()
        waiting = [client.call(key, "terminal", command="sleep 1000", session=f"s{n}", timeout_s=60) for n in range(3)]
        started = await client.run(key, "sleep 1000", tool="process", action="start")
        name = content(started)["process"]["process"]
        waiting.append(client.call(key, "process", action="wait", process=name, timeout_s=60))
        await client.ask(*waiting)
        await client.running(0, 4)
        assert await client.release(key) == "free"
        for call in waiting:
            result = await client.result(call)
            assert (result.fault, result.error) == ("infra", "lease_lost")
        key = await client.lease()
        assert (await client.run(key, "", tool="terminal")).error == "unknown_session"
        assert (await client.run(key, "pgrep -f '^sleep 1000'")).exit_code == 1


async def test_session_calls_do_not_wait_for_the_slots_other_calls_nor_hold_them_up() -> None:
    async with StubSupervisor(slots=1) as stub, Client(stub.url, TOKEN) as client, client.leased() as key:
        slow = client.call(key, command="sleep 1000", timeout_s=60)
        stuck = client.call(key, "terminal", command="sleep 1000", session="stuck", timeout_s=60)
        await client.ask(slow, stuck)
        await client.running(0, 2)
        assert (await client.run(key, "echo beside", tool="terminal")).stdout == "beside\n"
        await client.send(client.named("cancel", slow))
        assert (await client.result(slow)).cancelled
        assert (await client.run(key, "echo next")).stdout == "next\n"
        await client.send(client.named("cancel", stuck))
        assert (await client.result(stuck)).cancelled
        busy = await client.run(key, "true", tool="terminal", session="stuck")
        assert busy.error == "session_busy"


async def test_a_call_asked_again_is_not_typed_again() -> None:
    async with StubSupervisor(slots=1) as stub, Client(stub.url, TOKEN) as client, client.leased() as key:
        command = "echo ran >> log; until [ -e go ]; do sleep 0.02; done; wc -l < log"
        call = client.call(key, "terminal", command=command, timeout_s=30)
        await client.ask(call)
        await client.running(0, 1)
        await client.cut()
        await client.connect()
        await client.ask(call)
        await client.run(key, "touch go")
        assert (await client.result(call)).stdout == "1\n"


async def test_a_lost_agent_ends_sessions_as_the_policys_doing() -> None:
    async with StubSupervisor(slots=1) as stub, Client(stub.url, TOKEN) as client:
        key: LeaseKey = await client.lease()
        call = client.call(key, "terminal", command="sleep 1000", timeout_s=60)
        await client.ask(call)
        await client.running(0, 1)
        await stub.kill_agent(0)
        result = await client.result(call)
        assert (result.fault, result.error) == ("policy", "slot_destroyed")
