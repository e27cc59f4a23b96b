"""Servers, agents and supervisors that die; slots and leases that do not."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import aiohttp
import pytest

from agentenv.containers.handle import ContainerHandle
from agentenv.containers.watch import watch
from agentenv.errors import ConnectionLostError, InfraError
from agentenv.sandbox.slot_loss import WAYS, LossReason
from agentenv.wire.leases import LeaseKey, Tags
from agentenv.wire.watch import GENERATION_HEADER, WatchBeat, WatchList
from tests.integration.server_client import Client, sealing
from tests.integration.server_stub import TOKEN, StubSupervisor, descriptors
from tests.waiting import DEADLINE_S, START_S

TAGS = Tags(run="exp7", environment="repair", kind="eval", group="g", item="1")


async def test_a_server_that_comes_back_finds_slots_and_leases_alive() -> None:
    async with StubSupervisor(slots=3) as stub:
        async with Client(stub.url, TOKEN) as client:
            boot = client.boot
            key = await client.lease(0, request_id="r" * 20, tags=TAGS)
            await client.run(key, "echo kept > file; sleep 1000 >/dev/null 2>&1 &")
            done = client.call(key, command="echo done")
            await client.ask(done)
            await client.result(done)
            running = client.call(key, command="echo ran >> log; exec sleep 2000")
            waiting = client.call(key, command="echo ran >> log")
            await client.ask(running, waiting)
            await client.running(0, 2)
            await stub.crash()
        async with Client(stub.url, TOKEN) as client:
            assert client.boot != boot
            report = await client.slot(0)
            assert (report.trajectory, report.tags) == ("t", TAGS)
            assert (await client.slot(1)).state == "free"
            assert await client.lease(0, request_id="r" * 20) == key, "a grant whose answer was lost is asked for again"
            for call in (done, running, waiting):
                await client.ask(call)
                result = await client.result(call)
                assert (result.fault, result.error) == ("infra", "call_lost")
            assert (await client.run(key, "cat file log")).stdout.startswith("kept\n")
            left = await client.run(key, "pgrep -af sleep")
            assert "sleep 1000" in left.stdout, "what an earlier call left in the background lives on"
            assert "sleep 2000" not in left.stdout, "what nobody can have the answer of does not"
            for number in range(40):
                assert (await client.run(key, f"echo {number}")).stdout == f"{number}\n"
            await stub.crash()
        async with Client(stub.url, TOKEN) as client:
            assert (await client.run(key, "cat file")).stdout == "kept\n"
            assert await client.release(key) == "free"
            assert (await client.slot(0)).epoch == key.epoch + 1


async def test_a_lease_whose_client_died_with_the_server_expires() -> None:
    async with StubSupervisor(slots=1) as stub:
        async with Client(stub.url, TOKEN) as client:
            await client.lease(0, ttl_s=0.5)
            await stub.crash()
        async with Client(stub.url, TOKEN) as client, asyncio.timeout(START_S):
            while (await client.slot(0)).state != "free":
                await asyncio.sleep(0.01)
            assert stub.slots[0].lease is None


async def test_a_server_that_comes_back_obeys_no_farm_of_before() -> None:
    async with StubSupervisor(slots=1) as stub, Client(stub.url, TOKEN) as client:
        heartbeat = {"keys": [], "ttl_s": 5}
        assert (await client.post("/v1/leases/renew", heartbeat))[0] == 200
        assert (await client.post("/v1/leases/renew", heartbeat, {GENERATION_HEADER: "7"}))[0] == 200
        await stub.crash()
        for headers in ({}, {GENERATION_HEADER: "6"}):
            status, reply = await client.post("/v1/leases/renew", heartbeat, headers)
            assert (status, reply["error"]) == (409, "fenced")
        assert (await client.post("/v1/leases/renew", heartbeat, {GENERATION_HEADER: "7"}))[0] == 200


async def test_a_server_that_ends_says_so_to_its_watchers() -> None:
    async with StubSupervisor(slots=1) as stub:
        lines = watch(ContainerHandle("stub", 0, stub.url, TOKEN, 1), silence_s=DEADLINE_S)
        assert isinstance(await anext(lines), WatchList)
        assert stub.server is not None
        stub.server.terminate()
        while not (isinstance(line := await anext(lines), WatchBeat) and line.draining):
            pass
        with pytest.raises(ConnectionLostError, match="cut"):
            await anext(lines)


async def test_an_agent_that_dies_ends_its_lease_and_no_other() -> None:
    async with StubSupervisor(slots=2) as stub, Client(stub.url, TOKEN) as client:
        key, other = await client.lease(0), await client.lease(1)
        lost, waiting = client.call(key, command="sleep 1000"), client.call(key, command="true")
        safe = client.call(other, command="sleep 0.5; echo safe")
        await client.ask(lost, waiting, safe)
        await client.running(0, 2)
        await stub.kill_agent(0)
        for call in (lost, waiting):
            result = await client.result(call)
            assert (result.fault, result.error) == ("policy", "slot_destroyed")
        assert (await client.result(safe)).stdout == "safe\n"
        assert (await client.run(key, "true")).error == "slot_destroyed", "a late call hears the same"
        renewed = await client.post("/v1/leases/renew", {"keys": [key.model_dump()], "ttl_s": 5})
        assert [(loss["slot"], loss["error"]) for loss in renewed[1]["lost"]] == [(0, "slot_destroyed")]
        async with asyncio.timeout(START_S):
            while (await client.slot(0)).state != "free":
                await asyncio.sleep(0.01)
        again = await client.lease(0)
        assert again.epoch == key.epoch + 1
        assert (await client.run(again, "echo new")).stdout == "new\n"


@pytest.mark.parametrize("loss", [loss for loss, error in WAYS.items() if issubclass(error, InfraError)])
async def test_a_slot_lost_to_something_above_it_is_nobody_s_in_it(loss: LossReason) -> None:
    async with StubSupervisor(slots=1) as stub, Client(stub.url, TOKEN) as client:
        key = await client.lease(0)
        running = client.call(key, command="sleep 1000")
        await client.ask(running)
        await client.running(0, 1)
        await stub.kill_agent(0, loss)
        result = await client.result(running)
        assert (result.fault, result.error) == ("infra", "lease_lost")
        assert (await client.run(key, "true")).fault == "infra"


async def test_a_slot_that_ends_before_anything_ran_in_it_was_destroyed_by_nobody() -> None:
    async with StubSupervisor(slots=1) as stub, Client(stub.url, TOKEN) as client:
        key = await client.lease(0)
        await stub.kill_agent(0)
        async with asyncio.timeout(START_S):
            while (await client.slot(0)).epoch == key.epoch:
                await asyncio.sleep(0.01)
        assert (await client.run(key, "true")).error == "lease_lost"


async def test_a_slot_that_cannot_be_proved_clean_is_quarantined() -> None:
    async with StubSupervisor(slots=2) as stub, Client(stub.url, TOKEN) as client:
        key = await client.lease(0)
        stub.fail_next_reset = True
        assert await client.release(key) == "quarantined"
        report = await client.slot(0)
        assert (report.state, report.reason) == ("quarantined", "this reset was configured to fail")
        status, reply = await client.post(
            "/v1/leases", {"slot": 0, "trajectory": "t", "ttl_s": 5, "request_id": "q" * 20}
        )
        assert (status, reply["error"]) == (409, "stale_lease")
        assert (await client.run(await client.lease(1), "echo other")).stdout == "other\n"


async def test_a_seal_that_fails_ends_the_lease() -> None:
    async with StubSupervisor(slots=1) as stub, Client(stub.url, TOKEN) as client:
        key = await client.lease(0)
        stub.may_seal.clear()
        waiting = asyncio.create_task(client.post("/v1/leases/act", sealing(key)))
        await stub.until_sealing()
        queued = client.call(key, command="true")
        await client.ask(queued)
        await client.running(0, 1)
        stub.fail(0, "no namespaces left")
        status, reply = await waiting
        assert (status, reply["error"]) == (409, "lease_lost")
        assert "no namespaces left" in reply["message"]
        assert (await client.result(queued)).error == "lease_lost"
        stub.may_seal.set()


async def test_release_during_a_seal_resets_the_slot() -> None:
    async with StubSupervisor(slots=1) as stub, Client(stub.url, TOKEN) as client:
        key = await client.lease(0)
        await client.run(key, "touch left")
        stub.may_seal.clear()
        under_way = asyncio.create_task(client.post("/v1/leases/act", sealing(key)))
        await stub.until_sealing()
        releasing = asyncio.create_task(client.release(key))
        async with asyncio.timeout(DEADLINE_S):
            while (await client.slot(0)).state != "resetting":
                await asyncio.sleep(0.005)
        stub.may_seal.set()
        assert await releasing == "free"
        assert (await under_way)[0] == 409
        key = await client.lease(0)
        assert (await client.run(key, "ls")).stdout == ""


async def test_a_server_told_to_stop_says_goodbye_and_leaves_the_slots() -> None:
    async with StubSupervisor(slots=1) as stub:
        assert stub.server is not None
        async with Client(stub.url, TOKEN) as client:
            key = await client.lease(0)
            await client.ask(client.call(key, command="sleep 1000"))
            await client.next_message()
            await client.running(0, 1)
            stub.server.send_signal(signal.SIGTERM)
            assert client.stream is not None
            frame = await client.stream.receive()
            assert frame.type in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSING)
            assert client.stream.close_code == 1001
            assert stub.server.wait(START_S) == 0
        assert stub.slots[0].agent is not None
        assert not stub.slots[0].agent.ended.done()
        await stub.crash()
        async with Client(stub.url, TOKEN) as client:
            assert (await client.run(LeaseKey.model_validate(key), "echo alive")).stdout == "alive\n"


async def test_a_server_ends_with_its_supervisor() -> None:
    async with StubSupervisor(slots=1) as stub:
        assert stub.server is not None
        stub.hang_up()
        assert await asyncio.to_thread(stub.server.wait, START_S) == 0


async def test_a_crashed_server_leaks_no_descriptors_into_the_next() -> None:
    async with StubSupervisor(slots=1) as stub:
        assert stub.server is not None
        async with Client(stub.url, TOKEN) as client:
            key = await client.lease(0)
            await client.run(key, "true")
            await client.ask(*(client.call(key, command=f"sleep 0.0{n}") for n in range(9)))
            await stub.crash()
        async with Client(stub.url, TOKEN) as client:
            await client.run(key, "true")
            first = await descriptors(stub.server.pid)
        for _ in range(4):
            await stub.crash()
            async with Client(stub.url, TOKEN) as client:
                await client.run(key, "true")
        async with Client(stub.url, TOKEN) as client:
            await client.run(key, "true")
            # A spare shell may be in the making at either moment: its three descriptors, not one of each server.
            assert abs(await descriptors(stub.server.pid) - first) <= 3
        assert Path(f"/proc/{stub.server.pid}").exists()
