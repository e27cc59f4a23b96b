"""Containers behind a relay: what works directly works through it, also while relays come and go."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import tracemalloc
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import aiohttp
import pytest
from aiohttp import web

from agentenv.api.farm_server.relay import serve_relay
from agentenv.config import ContainerSettings, ExecutorSettings, PoolSettings
from agentenv.containers.control import ContainerControl
from agentenv.containers.handle import ContainerHandle
from agentenv.containers.programs import checked_order, start_program
from agentenv.containers.transfer import download, upload
from agentenv.errors import ConnectionLostError, PolicyRefusalError, StaleLeaseError
from agentenv.executor.session import ToolSession
from agentenv.executor.tool_executor import ToolExecutor
from agentenv.farm_client.pool import FarmPool
from agentenv.sdk.tool_context import ToolContext
from agentenv.slots.backends.attached import AttachedBackend
from agentenv.slots.backends.fake import FakeBackend
from agentenv.slots.pool import SlotPool
from agentenv.tools.catalog import ToolCatalog
from agentenv.wire.calls import Batch
from agentenv.wire.leases import LeaseKey, LeaseRequest, RenewRequest, SealSlot, Tags
from agentenv.wire.passes import make_pass
from agentenv.wire.states import SlotState
from tests.contract.conftest import Client
from tests.contract.executor.farm import OWN, UNTIL_GO, sh, until_bash
from tests.farm_service import Served, served, token
from tests.faults.proxy import Proxy
from tests.relay_process import relay_process
from tests.waiting import DEADLINE_S, START_S, until

MIB = 1024 * 1024


@pytest.fixture
async def farm() -> AsyncIterator[Served]:
    """A farm of one container."""
    backend = FakeBackend(ContainerSettings(slots_per_container=4))
    async with served(backend, PoolSettings(min_containers=1, max_containers=1)) as one:
        await until(lambda: one.farm.manager.links)
        yield one


@pytest.fixture
def container(farm: Served) -> ContainerHandle:
    """The container, to be reached directly."""
    (link,) = farm.farm.manager.links.values()
    return link.handle


@pytest.fixture
async def relayed(container: ContainerHandle) -> AsyncIterator[ContainerHandle]:
    """The same container behind a relay in this process."""

    async def lookup(asked: str) -> str | None:
        return container.base_url if asked == container.id else None

    async with serve_relay(lookup) as url:
        yield replace(container, base_url=f"{url}/c/{container.id}")


@asynccontextmanager
async def executor_of(handle: ContainerHandle, **settings: float) -> AsyncIterator[ToolExecutor]:
    pool = SlotPool(
        AttachedBackend([handle]), PoolSettings(min_containers=1, max_containers=1, acquire_timeout_s=START_S)
    )
    async with pool, ToolExecutor(pool, ToolCatalog.builtin(), ExecutorSettings.model_validate(settings)) as executor:
        yield executor


@pytest.fixture
async def session(relayed: ContainerHandle) -> AsyncIterator[ToolSession]:
    async with executor_of(relayed) as executor, executor.open("t") as opened:
        yield opened


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# -- what works directly -----------------------------------------------------------------------------


async def test_calls_of_many_trajectories(relayed: ContainerHandle) -> None:
    async with executor_of(relayed) as executor:

        async def trajectory(number: int) -> list[str]:
            async with executor.open(f"t{number}") as session:
                return [await sh(session, f"echo {number} {call}") for call in range(10)]

        said = await asyncio.gather(*(trajectory(number) for number in range(8)))
    assert said == [[f"{number} {call}\n" for call in range(10)] for number in range(8)]


async def test_large_arguments_and_results(session: ToolSession) -> None:
    text = "ü" * MIB
    await session.call("write_file", {"path": "big", "content": text})
    read = await session.call("read_file", {"path": "big"})
    assert read.fault == "none", read.message
    assert (await sh(session, "sha256sum < big")).split()[0] == hashlib.sha256(text.encode()).hexdigest()
    assert await sh(session, "head -c 900000 /dev/zero | tr '\\0' x") == "x" * 900_000


async def test_programs_of_a_slot_reach_what_answers_behind_the_relay(session: ToolSession) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=(await request.read())[::-1])

    app = web.Application(client_max_size=16 * MIB)
    app.router.add_post("/", answer)
    ask = "import os,sys,urllib.request as u; sent = os.urandom(8 << 20)\n"
    ask += "for _ in range(3): print(u.urlopen(sys.argv[1], sent, 100).read()[::-1] == sent)"
    box = ToolContext(session)
    async with box.serve(app) as served:
        done = await box.exec(["python3", "-c", ask, served.url], timeout_s=300)
        assert (done.stdout, done.stderr) == ("True\n" * 3, "")


async def test_a_large_transfer_both_ways_in_little_memory(session: ToolSession, tmp_path: Path) -> None:
    source = tmp_path / "big"
    source.write_bytes(os.urandom(MIB) * 48)
    tracemalloc.start()
    try:
        sent = await upload(session.lease, source, "data/big")
        got = await download(session.lease, "data/big", tmp_path / "back")
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sent == got
    assert sha256_of(tmp_path / "back") == sent.sha256 == sha256_of(source)
    assert peak_bytes < 24 * MIB  # client, relay and container are in this process


async def test_a_cancelled_call_does_not_go_on(session: ToolSession) -> None:
    call = asyncio.create_task(session.call("bash", {"command": f"touch began; sleep 600{OWN}"}, timeout_s=900))
    beside = asyncio.create_task(session.call("terminal", {"command": "until [ -e began ]; do sleep 0.05; done"}))
    await beside
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    async with asyncio.timeout(START_S):  # if it went on, this call would wait for its end
        await until_bash(session, f"! ps -eo args | grep '^sleep 600{OWN}'")


async def test_output_is_shown_as_it_comes(session: ToolSession) -> None:
    shown: list[str] = []
    call = asyncio.create_task(
        session.call(
            "bash", {"command": f"echo first; {UNTIL_GO}; echo last"}, on_output=lambda _, text: shown.append(text)
        )
    )
    await until(lambda: "first\n" in "".join(shown))
    assert not call.done()
    await session.call("terminal", {"command": "touch go"})
    assert (await call).stdout == "".join(shown) == "first\nlast\n"


async def test_a_streamed_program(session: ToolSession) -> None:
    order = checked_order(command="head -c 3000000 >&2; seq 100000 500000; exit 3")
    async with await start_program(session.lease, order) as program:
        writing = program.write(bytes(range(256)) * 15_000)
        stdout, stderr, _ = await asyncio.gather(program.stdout.read(), program.stderr.read(), writing)
        assert stdout == b"".join(b"%d\n" % number for number in range(100_000, 500_001))
        assert stderr == (bytes(range(256)) * 15_000)[:3_000_000]
        assert await program.wait() == 3


async def test_a_batch_is_answered_line_by_line(container: ContainerHandle, relayed: ContainerHandle) -> None:
    async with Client.open(relayed) as client:
        slow, quick = await client.lease(slot=0), await client.lease(slot=1)
        calls = (client.call(slow, UNTIL_GO), client.call(quick, "echo quick"))
        results = client.results(*calls)
        async with asyncio.timeout(60):
            assert (await anext(results)).stdout == "quick\n"
            go = client.call(slow, "touch go", tool="terminal")
            assert [result.exit_code async for result in client.results(go)] == [0]
            assert [result.exit_code async for result in results] == [0]
        await client.end_all()


async def test_a_run_with_a_pass_and_its_container(container: ContainerHandle, relayed: ContainerHandle) -> None:
    """What a farm's client does: it has a pass and a key, and no control token."""
    request = LeaseRequest(slot=1, trajectory="t", ttl_s=60, request_id=uuid4().hex, tags=Tags(run="exp7"))
    async with ContainerControl(container) as farm:
        key = (await farm.lease(request)).key
    async with ContainerControl(replace(relayed, token=make_pass(container.token, "exp7"))) as client:
        assert (await client.info()).container == container.id
        assert (await client.renew(RenewRequest(keys=(key,), ttl_s=60))).renewed == (1,)
        assert (await client.act(key, SealSlot())).state is SlotState.leased
        with pytest.raises(PolicyRefusalError, match="a pass does not allow"):
            await client.slots()
        assert (await client.release(key)).state is SlotState.free
        with pytest.raises(StaleLeaseError):
            await client.act(key, SealSlot())
    async with ContainerControl(replace(relayed, token="wrong")) as stranger:
        with pytest.raises(PolicyRefusalError, match="token"):
            await stranger.info()


async def test_a_stream_with_a_wrong_token_is_refused_by_the_container(relayed: ContainerHandle) -> None:
    async with aiohttp.ClientSession() as http:
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await http.ws_connect(f"{relayed.base_url}/v1/stream", headers={"Authorization": "Bearer wrong"})
    assert refused.value.status == 401


# -- relays that come and go -------------------------------------------------------------------------


@dataclass
class Relays:
    """A container behind one address, behind which relays take turns."""

    farm: Served
    container: ContainerHandle
    address: Proxy
    handle: ContainerHandle

    def use(self, url: str) -> None:
        self.address.upstream_port = port_of(url)

    def another(self) -> AbstractAsyncContextManager[tuple[str, Process]]:
        return relay_of(self.farm)


@pytest.fixture
async def relays(farm: Served, container: ContainerHandle) -> AsyncIterator[Relays]:
    async with Proxy(0) as address:
        handle = replace(container, base_url=f"http://127.0.0.1:{address.port}/c/{container.id}")
        yield Relays(farm, container, address, handle)


def port_of(url: str) -> int:
    port = urlsplit(url).port
    assert port is not None
    return port


def relay_of(farm: Served) -> AbstractAsyncContextManager[tuple[str, Process]]:
    return relay_process(farm.url, token("*", "read"))


@asynccontextmanager
async def beside(container: ContainerHandle, key: LeaseKey) -> AsyncIterator[Any]:
    """Commands in the slot that do not go through relays."""
    async with Client.open(container) as client:

        async def run(command: str) -> None:
            result = await client.run(key, command, timeout_s=60, tool="terminal")
            assert result.exit_code == 0, result

        yield run


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_calls_survive_the_end_of_their_relay(relays: Relays, number: int) -> None:
    """They are asked again by id through the next relay, and have run once."""
    async with relays.another() as (first, process), relays.another() as (second, _):
        relays.use(first)
        async with executor_of(relays.handle, reconnect_deadline_s=START_S) as executor, executor.open("t") as session:
            running = asyncio.create_task(sh(session, f"echo ran >> log; {UNTIL_GO}; echo finished"))
            async with beside(relays.container, session.lease.key) as run:
                await run("until [ -e log ]; do sleep 0.05; done")
                relays.use(second)
                process.send_signal(number)
                assert await process.wait() == (-number if number == signal.SIGKILL else 0)
                await run("touch go")
            assert await running == "finished\n"
            assert await sh(session, "cat log") == "ran\n"


async def test_a_trainer_uses_the_relay_that_its_farm_names() -> None:
    """`agentenv farm relay` behind the `relay_url` of the settings; the trainer's calls go on when it is killed."""
    async with Proxy(0) as address:
        backend = FakeBackend(ContainerSettings(slots_per_container=1))
        relay_url = f"http://127.0.0.1:{address.port}"
        settings = PoolSettings(min_containers=1, max_containers=1, acquire_timeout_s=START_S)
        async with (
            served(backend, settings, relay_url=relay_url) as farm,
            relay_of(farm) as (first, process),
            relay_of(farm) as (second, _),
        ):
            address.upstream_port = port_of(first)
            async with (
                FarmPool(replace(farm.access(), route="relay"), settings=settings) as pool,
                ToolExecutor(pool, ToolCatalog.builtin(), ExecutorSettings(reconnect_deadline_s=START_S)) as executor,
                executor.open("t") as session,
            ):
                assert session.lease.container.base_url == f"{relay_url}/c/{session.lease.container.id}"
                assert await sh(session, "echo before") == "before\n"
                address.upstream_port = port_of(second)
                process.kill()
                assert await sh(session, "echo after") == "after\n"


async def test_a_transfer_survives_the_death_of_its_relay(relays: Relays, tmp_path: Path) -> None:
    source = tmp_path / "big"
    source.write_bytes(os.urandom(MIB) * 24)
    async with relays.another() as (first, process), relays.another() as (second, _):
        relays.use(first)
        async with executor_of(relays.handle, reconnect_deadline_s=START_S) as executor, executor.open("t") as session:

            def progress(done: int, total: int | None) -> None:
                if done > 4 * MIB and process.returncode is None:
                    relays.use(second)
                    process.kill()

            sent = await upload(session.lease, source, "big", progress=progress)
            await process.wait()
            assert (await sh(session, "sha256sum < big")).split()[0] == sent.sha256 == sha256_of(source)


async def test_a_drained_relay_ends_streams_and_finishes_requests(farm: Served, container: ContainerHandle) -> None:
    async with relay_of(farm) as (url, process):
        behind = replace(container, base_url=f"{url}/c/{container.id}")
        async with Client.open(container) as direct, Client.open(behind) as client:
            key = await direct.lease(slot=0)
            stream = await client.session.ws_connect(f"{behind.base_url}/v1/stream")
            results = client.results(client.call(key, f"touch began; {UNTIL_GO}", timeout_s=START_S))
            waiting = asyncio.ensure_future(anext(results))
            assert (await direct.run(key, "until [ -e began ]; do sleep 0.05; done", tool="terminal")).exit_code == 0
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(START_S):
                assert (await stream.receive()).type is aiohttp.WSMsgType.CLOSE
                assert stream.close_code == 1001
                with pytest.raises(aiohttp.ClientConnectorError):
                    async with aiohttp.ClientSession() as fresh:
                        await fresh.get(f"{url}/health")
                assert (await direct.run(key, "touch go", tool="terminal")).exit_code == 0
                assert (await waiting).exit_code == 0
                assert [result async for result in results] == []
            await client.session.close()
            assert await process.wait() == 0
            await direct.end_all()


async def test_without_its_container_a_relay_says_so(container: ContainerHandle, relayed: ContainerHandle) -> None:
    other = replace(relayed, base_url=relayed.base_url + "x")
    async with ContainerControl(other) as control:
        with pytest.raises(ConnectionLostError, match="is known here"):
            await control.request("GET", "/v1/info", timeout_s=DEADLINE_S)
    async with aiohttp.ClientSession() as http, http.get(f"{other.base_url}/v1/info") as response:
        assert (response.status, (await response.json())["error"]) == (503, "connection_lost")


async def test_a_client_that_goes_away_ends_its_request_at_the_container(
    container: ContainerHandle, relayed: ContainerHandle
) -> None:
    async with Client.open(container) as direct:
        key = await direct.lease(slot=0)
        async with Client.open(relayed) as client:
            call = client.call(key, f"touch began; {UNTIL_GO}")
            body = Batch(calls=(call,)).model_dump_json()
            response = await client.session.post(f"{relayed.base_url}/v1/batch", data=body)
            await response.content.readline()
            response.close()
        await direct.end_all()
