"""Two runs on one farm, in one container: neither takes, hears, delays or starves the other."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp
import pytest

from agentenv.api.farm_server.audit import FarmAudit
from agentenv.config import ContainerSettings, PoolSettings
from agentenv.containers.handle import ContainerHandle
from agentenv.errors import SandboxUnavailableError
from agentenv.executor.session import ToolSession
from agentenv.executor.tool_executor import ToolExecutor
from agentenv.sandbox.server.call_queue import MAX_WAITING_BYTES
from agentenv.slots.backends.base import ContainerBackend
from agentenv.slots.backends.fake import FakeBackend
from agentenv.slots.backends.local import LocalBackend
from agentenv.tools.catalog import ToolCatalog
from agentenv.wire.farm import LeaseList, Scope
from tests.contract.conftest import Client
from tests.contract.executor.farm import UNTIL_GO, sh
from tests.contract.thief import refused_everywhere
from tests.farm_service import KEY, Served, served, token
from tests.waiting import START_S, eventually, until

MIB = 1024 * 1024
BIG_BYTES = 7 * MIB
ONE = PoolSettings(min_containers=1, max_containers=1, acquire_timeout_s=START_S)


def backend_of(kind: str, state_dir: Path, slots: int = 4) -> ContainerBackend:
    settings = ContainerSettings(slots_per_container=slots, require_sandbox=False)
    return FakeBackend(settings) if kind == "fake" else LocalBackend(settings, state_dir=state_dir)


@dataclass(frozen=True)
class Neighbours:
    """A session of each of two runs, in one container."""

    farm: Served
    one: ToolSession
    two: ToolSession

    @property
    def controlled(self) -> ContainerHandle:
        """The container with its control token."""
        (link,) = self.farm.farm.manager.links.values()
        return link.handle


@asynccontextmanager
async def neighbours(farm: Served) -> AsyncIterator[Neighbours]:
    async with session_of(farm, "one") as one, session_of(farm, "two") as two:
        assert one.lease.container.id == two.lease.container.id
        yield Neighbours(farm, one, two)


@asynccontextmanager
async def session_of(farm: Served, run: str) -> AsyncIterator[ToolSession]:
    async with (
        farm.pool(run, settings=ONE) as pool,
        ToolExecutor(pool, ToolCatalog.builtin()) as executor,
        executor.open(f"of-{run}") as session,
    ):
        yield session


@pytest.mark.parametrize("kind", ["fake", "local"])
async def test_the_pass_of_one_run_and_the_key_of_another_open_nothing(kind: str, tmp_path: Path) -> None:
    async with served(backend_of(kind, tmp_path), ONE) as farm, neighbours(farm) as both:
        async with Client.open(replace(both.one.lease.container)) as thief:
            await refused_everywhere(thief, both.two.lease.key)
        assert await sh(both.two, "ls -A") == ""
        assert await sh(both.one, "echo well") == "well\n"


async def test_the_control_token_is_never_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nor are the farm's key, and what clients lease with: in no answer to those who only look, log or audit line."""
    caplog.set_level(logging.DEBUG)
    audit = FarmAudit(tmp_path / "audit.jsonl")
    async with served(backend_of("fake", tmp_path), ONE, audit=audit) as farm, neighbours(farm) as both:
        control = both.controlled.token
        granted = {each.lease.container.token for each in (both.one, both.two)}
        granted |= {each.lease.key.secret for each in (both.one, both.two)}
        answers = [await answer(farm, path, "*", "admin") for path in LOOKS]
        listed = LeaseList.model_validate_json(answers[0])
        assert len(listed.leases) == 2
        await answer(farm, f"/v1/leases/{listed.leases[0].lease}", "*", "admin", method="DELETE")
        reprs = f"{farm.farm!r} {both.one.lease!r} {both.controlled!r} {farm.access()!r}"
    audit.close()
    told = "".join(answers) + caplog.text + (tmp_path / "audit.jsonl").read_text() + reprs
    assert "lease_ended" in told, "the audit log was written"
    assert not [secret for secret in {control, KEY} | granted if secret in told]


LOOKS = ("/v1/leases", "/v1/containers", "/v1/farm", "/v1/runs", "/openapi.json", "/nowhere", "/health", "/ready")


async def answer(farm: Served, path: str, run: str, scope: Scope, method: str = "GET") -> str:
    headers = {"Authorization": f"Bearer {token(run, scope)}"}
    async with aiohttp.ClientSession() as http, http.request(method, farm.url + path, headers=headers) as reply:
        return await reply.text()


async def test_a_run_that_holds_all_it_may_delays_only_itself(tmp_path: Path) -> None:
    """Its calls wait behind one that does not end, up to the bytes that a lease may hold. Meanwhile calls of its
    neighbour end, and its own are cancelled."""
    async with served(backend_of("local", tmp_path), ONE) as farm, neighbours(farm) as both:
        greedy, other = both.one, both.two
        first = asyncio.create_task(sh(greedy, f"{UNTIL_GO}; echo ended"))
        big = {"command": "true #" + "x" * BIG_BYTES}
        waiting = [asyncio.create_task(greedy.call("bash", big)) for _ in range(MAX_WAITING_BYTES // BIG_BYTES + 4)]

        def refused() -> list[asyncio.Task[object]]:
            return [task for task in waiting if task.done()]

        await until(refused, START_S)
        for number in range(20):
            assert await sh(other, f"echo {number}") == f"{number}\n"
        assert not first.done()
        assert {type(task.exception()) for task in refused()} == {SandboxUnavailableError}
        assert len(waiting) - len(refused()) > MAX_WAITING_BYTES // BIG_BYTES // 2, "the others wait all the time"

        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

        async def let_go() -> bool:
            return await held_bytes(both.controlled) < BIG_BYTES

        await eventually(let_go)
        assert not first.done()
        await greedy.call("terminal", {"command": "touch go"})
        assert await first == "ended\n"


async def held_bytes(container: ContainerHandle) -> int:
    headers = {"Authorization": f"Bearer {container.token}"}
    async with aiohttp.ClientSession() as http, http.get(f"{container.base_url}/v1/statistics", headers=headers) as got:
        return int((await got.json())["held_bytes"])


async def test_neither_long_nor_short_stays_starve_the_other(tmp_path: Path) -> None:
    """By their own ledgers, which two trainers had before there was a farm, one of them got next to nothing."""
    async with (
        served(backend_of("fake", tmp_path, slots=10), ONE) as farm,
        farm.pool("long", settings=ONE) as long,
        farm.pool("short", settings=ONE) as short,
    ):

        def held(run: str) -> int:
            return sum(farm.farm.run(run).held.values())

        stays = [await long.lease(f"stays-{number}") for number in range(10)]
        queue = [asyncio.create_task(long.lease(f"queues-{number}")) for number in range(10)]
        await until(lambda: farm.farm.run("long").waiting == 10)
        goes_on = True
        counts = itertools.count()
        leased = 0

        async def short_stays() -> None:
            nonlocal leased
            while goes_on:
                async with await short.lease(f"short-{next(counts)}"):
                    leased += 1

        # Many more than can hold a slot: so at every moment some wait, however late others are to ask again.
        visitors = [asyncio.create_task(short_stays()) for _ in range(60)]
        await until(lambda: farm.farm.run("short").waiting == 60)
        for lease in stays[:5]:
            await lease.release()
        await until(lambda: leased >= 100)
        assert not any(task.done() for task in queue), "half of the slots are the other run's, though it came later"
        assert held("long") == 5

        for number, lease in enumerate(stays[5:], 1):  # each comes back to the run that has less than its half
            await lease.release()
            await until(lambda: sum(task.done() for task in queue) >= number)  # noqa: B023
        goes_on = False
        await asyncio.gather(*visitors)
        for lease in await asyncio.gather(*queue):
            await lease.release()
