"""A farm service that is killed: what others own goes on, and its successor knows all of it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from agentenv.config import PoolSettings
from agentenv.errors import ContainerLostError
from agentenv.executor.tool_executor import ToolExecutor
from agentenv.slots.farm_access import FarmAccess
from agentenv.slots.farm_client import FarmClient
from agentenv.slots.farm_pool import FarmPool
from agentenv.tools.catalog import ToolCatalog
from agentenv.wire import farm as wire
from tests.farm_process import FarmProcess
from tests.waiting import START_S, eventually, until

PATIENT = PoolSettings(acquire_timeout_s=START_S)


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[FarmProcess]:
    made = FarmProcess(tmp_path)
    try:
        await made.start()
        yield made
    finally:
        await made.end()


async def test_leases_and_calls_go_on_without_the_farm(service: FarmProcess) -> None:
    token = await service.token("exp7")
    async with (
        FarmPool(FarmAccess((service.url,), token, "exp7"), settings=PATIENT) as pool,
        ToolExecutor(pool, ToolCatalog.builtin()) as executor,
    ):
        async with executor.open("holder") as session:
            await session.call("bash", {"command": "echo kept > file"})
            running = asyncio.create_task(session.call("bash", {"command": "until [ -e go ]; do sleep 0.05; done"}))
            await service.kill()
            await session.call("terminal", {"command": "touch go"})
            assert (await asyncio.wait_for(running, START_S)).exit_code == 0
            later = asyncio.create_task(pool.lease("later"))
            await asyncio.sleep(0)
            said = await service.start()
            assert said["generation"] == 2
            async with await asyncio.wait_for(later, START_S) as lease:
                assert lease.lost is None
            assert (await session.call("bash", {"command": "cat file"})).stdout == "kept\n"

            async def known() -> bool:
                async with FarmClient(service.url, token) as client:
                    (run,) = (await client.runs()).runs
                    return run.held == {"train": 1}

            await eventually(known)
        assert executor.tally.infra_faults == 0


async def test_a_grant_that_was_lost_on_its_way_is_found_again(service: FarmProcess) -> None:
    token = await service.token("exp7")
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(FarmClient(service.url, token))
        ask = wire.Ask(request_id="a" * 32, trajectories=("one", "two"))
        (first,) = (await client.ask([ask], wait_s=25)).asks
        assert first.state == "granted"
        await service.kill()
        await service.start()
        (again,) = (await client.ask([ask], wait_s=25)).asks
        assert [lease.key for lease in again.leases] == [lease.key for lease in first.leases]
        (run,) = (await client.runs()).runs
        assert run.held == {"train": 2}, "the slots are counted once"


async def test_a_container_that_dies_ends_its_leases_typed_and_at_once(service: FarmProcess) -> None:
    async with FarmPool(FarmAccess((service.url,), await service.token("exp7")), settings=PATIENT) as pool:
        lease = await pool.lease("unlucky")
        os.kill(_first_process(lease.container.id), signal.SIGKILL)
        assert isinstance(await asyncio.wait_for(lease.wait_lost(), START_S), ContainerLostError)
        async with await pool.lease("next") as another:
            assert another.container.id != lease.container.id


async def test_a_release_ends_with_its_container(service: FarmProcess) -> None:
    """It is under way when the container dies, and is not tried again until its timeout."""
    settings = PoolSettings(acquire_timeout_s=START_S, reset_timeout_s=3600, lease_ttl_s=3600)
    async with FarmPool(FarmAccess((service.url,), await service.token("exp7")), settings=settings) as pool:
        lease = await pool.lease("finished")
        container = _processes(lease.container.id)
        for process in container:
            os.kill(process, signal.SIGSTOP)
        releasing = asyncio.create_task(lease.release())
        await until(lambda: lease.released)
        os.kill(container[0], signal.SIGKILL)
        await asyncio.wait_for(releasing, START_S)


def _first_process(container: str) -> int:
    """The process that all of the container ends with."""
    return _processes(container)[0]


def _processes(container: str) -> list[int]:
    """Its supervisor and its server."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"agentenv.sandbox" in words and any(container.encode() in word for word in words):
                found.append(int(entry.name))
    return sorted(found)
