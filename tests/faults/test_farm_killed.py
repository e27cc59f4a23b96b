"""A farm service that is killed: what others own goes on, and its successor knows all of it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from agentenv.config import PoolSettings
from agentenv.errors import ContainerLostError
from agentenv.executor.tool_executor import ToolExecutor
from agentenv.farm_client.access import FarmAccess
from agentenv.farm_client.client import FarmClient
from agentenv.farm_client.pool import FarmPool
from agentenv.tools.catalog import ToolCatalog
from agentenv.wire import farm as wire
from tests.farm_process import COMMAND, FarmProcess
from tests.plain_http import plain_http
from tests.waiting import START_S, eventually, until

PATIENT = PoolSettings(acquire_timeout_s=START_S)


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[FarmProcess]:
    made = FarmProcess(tmp_path)
    try:
        await made.start()
        token = await made.token("exp7")

        async def ready() -> bool:
            async with FarmClient(made.url, token) as client:
                return (await client.info()).load.slots.get("free", 0) >= 2

        await eventually(ready, START_S)
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


async def test_killed_again_and_again_it_fails_nobody(service: FarmProcess) -> None:
    access = FarmAccess((service.url,), await service.token("exp7"), "exp7")
    calls, ended = asyncio.Semaphore(0), asyncio.Event()
    async with FarmPool(access, settings=PATIENT) as pool, ToolExecutor(pool, ToolCatalog.builtin()) as executor:

        async def rollouts(name: str) -> int:
            """Rollouts one after the other, each in a slot that nobody has used or uses."""
            done = 0
            while not ended.is_set():
                async with executor.open(f"{name}-{done}") as session:
                    for number in range(3):
                        result = await session.call("bash", {"command": f"echo {number} >> mine; cat mine"})
                        assert result.stdout.split() == [str(each) for each in range(number + 1)]
                        calls.release()
                done += 1
            return done

        async with asyncio.TaskGroup() as group:
            trajectories = [group.create_task(rollouts(f"t{number}")) for number in range(6)]
            for _ in range(4):
                for _ in range(20):
                    await asyncio.wait_for(calls.acquire(), START_S)
                await service.kill()
                await service.start()
            ended.set()
        assert all(task.result() for task in trajectories)
        assert executor.tally.infra_faults == 0
        assert pool.statistics().leases_lost == 0

    async def all_free() -> bool:
        async with FarmClient(service.url, access.token) as client:
            slots = (await client.info()).load.slots
            return set(slots) == {"free"} and sum(slots.values()) >= 2

    await eventually(all_free)


async def test_a_frozen_farm_delays_new_leases_only(service: FarmProcess) -> None:
    access = FarmAccess((service.url,), await service.token("exp7"), "exp7")
    async with FarmPool(access, settings=PATIENT) as pool, ToolExecutor(pool, ToolCatalog.builtin()) as executor:
        async with executor.open("holder") as session:
            await session.call("bash", {"command": "true"})
            os.kill(service.pid, signal.SIGSTOP)
            try:
                waiting = asyncio.create_task(pool.lease("later"))
                assert (await session.call("bash", {"command": "echo on"})).stdout == "on\n"
                done, _ = await asyncio.wait({waiting}, timeout=8)  # longer than clients wait for its next line
                assert not done
            finally:
                os.kill(service.pid, signal.SIGCONT)
            await (await asyncio.wait_for(waiting, START_S)).release()
        assert (executor.tally.infra_faults, pool.statistics().leases_lost) == (0, 0)


async def test_jumps_of_its_clock_change_nothing(tmp_path: Path) -> None:
    """A day forward, then two back: only the ends of tokens go by the time of day."""
    clock, library = tmp_path / "clock", next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))
    clock.write_text("+0\n")
    jumping = {
        "LD_PRELOAD": library, "FAKETIME_TIMESTAMP_FILE": clock, "FAKETIME_NO_CACHE": 1, "DONT_FAKE_MONOTONIC": 1
    }  # fmt: skip
    service = FarmProcess(tmp_path, beneath=("env", *(f"{name}={value}" for name, value in jumping.items())))
    try:
        await service.start()
        access = FarmAccess((service.url,), await service.token("exp7"), "exp7")
        async with (
            aiohttp.ClientSession() as http,
            FarmPool(access, settings=PATIENT) as pool,
            ToolExecutor(pool, ToolCatalog.builtin()) as executor,
            executor.open("holder") as session,
        ):
            for jump_s in (86_400, -86_400):
                clock.write_text(f"{jump_s:+d}\n")

                async def jumped(jump_s: int = jump_s) -> bool:
                    async with http.get(service.url + "/health") as reply:
                        told_s = parsedate_to_datetime(reply.headers["Date"]).timestamp()
                    return abs(told_s - time.time() - jump_s) < 3600

                await eventually(jumped)
                assert (await session.call("bash", {"command": "echo on"})).stdout == "on\n"
                await (await asyncio.wait_for(pool.lease(f"after {jump_s:+d} s"), START_S)).release()
            assert (executor.tally.infra_faults, pool.statistics().leases_lost) == (0, 0)
    finally:
        await service.end()


async def test_a_second_farm_of_the_same_name_is_told_who_has_it(service: FarmProcess, tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *COMMAND, "farm", "serve", "--config", str(tmp_path / "farm.toml"), "--port", "0",
        env=service.environment, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    _, said = await asyncio.wait_for(process.communicate(), START_S)
    assert process.returncode == 2
    assert f"is run by process {service.pid}" in " ".join(said.decode().split())


async def test_a_container_that_dies_ends_its_leases_typed_and_at_once(service: FarmProcess) -> None:
    async with FarmPool(FarmAccess((service.url,), await service.token("exp7")), settings=PATIENT) as pool:
        lease = await pool.lease("unlucky")
        os.kill(_first_process(lease.container.id), signal.SIGKILL)
        assert isinstance(await asyncio.wait_for(lease.wait_lost(), START_S), ContainerLostError)
        async with await pool.lease("next") as another:
            assert another.container.id != lease.container.id


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM], ids=lambda one: one.name)
async def test_a_trajectory_over_plain_http_finds_its_slot_and_its_running_call_again(
    service: FarmProcess, ending: signal.Signals
) -> None:
    token = await service.token("exp7")
    command = "echo ran >> log; until [ -e go ]; do sleep 0.05; done; cat log"
    asked_again: dict[str, Any] = {"command": command, "call_id": "c-1", "timeout_s": START_S}
    access = FarmAccess((service.url,), token, "exp7")
    async with plain_http(service.url, token) as http, FarmPool(access, settings=PATIENT) as pool:
        lease = (await http.bash("t1", "echo kept > file")).body["lease"]
        another = await pool.lease("t1")  # the same name, and nobody's business
        cut = asyncio.create_task(http.bash("t1", **asked_again))

        async def runs() -> bool:
            return (await http.tool("t1", "terminal", {"command": "cat log"})).output.startswith("ran")

        await eventually(runs)
        await service.kill(ending)
        await asyncio.wait({cut})
        assert cut.exception() is not None or cut.result().status == 503
        await service.start()
        joined = asyncio.create_task(http.bash("t1", **asked_again))
        touched = await http.tool("t1", "terminal", {"command": "touch go"}, lease=lease)
        assert (touched.status, touched.body["lease"]) == (200, lease)
        assert (await joined).output == "ran\n", "it goes on, and runs once"
        assert (await http.bash("t1", **asked_again)).output == "ran\n", "remembered by the container"
        await service.kill(ending)
        await service.start()
        assert (await http.post("/artifacts/read", trajectory_id="t1", path="file")).body["content"] == "kept\n"
        await service.kill(ending)
        await service.start()
        assert await http.release("t1"), "also by a farm that has not heard its name"
        assert (await http.bash("t1", "ls", call_id="c-1")).output == ""
        assert another.lost is None


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
