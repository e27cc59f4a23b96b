"""Nothing that changes a job is sent on an old look at who owns it, however long ago that look was."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from agentenv.config import ContainerSettings, NomadSettings
from agentenv.errors import AgentEnvError, JobOwnedError
from agentenv.farm.nomad import NomadFarm
from agentenv.slots.backends.nomad import allocation_tasks, count, owner
from agentenv.slots.backends.nomad.allocation_tasks import AllocationTasks
from agentenv.slots.backends.nomad.api import NomadApi
from agentenv.slots.backends.nomad.explain import NomadError
from tests.unit.slots.backends.nomad.nomad_stub import JOB, Cluster, farm_at, served
from tests.waiting import DEADLINE_S, START_S


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "BEAT_S", 0.02)
    monkeypatch.setattr(owner, "LOOK_S", 0.01)
    monkeypatch.setattr(owner, "SURE_S", 10 * START_S)  # and a lock is waited for as long
    monkeypatch.setattr("agentenv.slots.backends.nomad.api._LOCK_TIMEOUT_S", START_S)
    monkeypatch.setattr(count, "RETRY_MIN_S", 0.01)
    monkeypatch.setattr(allocation_tasks, "_RETRY_MAX_S", 0.02)


CHANGES: dict[str, Callable[[NomadApi], Awaitable[object]]] = {
    "register": lambda api: api.register(JOB),
    "scale": lambda api: api.scale(1, "test"),
    "reschedule": lambda api: api.reschedule(),
    "stop": lambda api: api.stop("a"),
    "end": lambda api: api.deregister(purge=False),
    "purge": lambda api: api.deregister(purge=True),
    "token": lambda api: api.forget_token(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
async def test_what_changes_the_job_is_not_sent_when_it_is_not_ours(
    change: Callable[[NomadApi], Awaitable[object]],
) -> None:
    cluster, why = Cluster(), ""
    async with served(cluster) as address:
        api = NomadApi(NomadSettings(address=address, job_id="farm"), address)
        api.not_ours = lambda: why
        try:
            await change(api)
            assert len(cluster.changes) == 1
            why = "it is exp7's"
            with pytest.raises(NomadError, match="it is exp7's"):
                await change(api)
        finally:
            await api.aclose()
    assert len(cluster.changes) == 1


async def test_a_request_that_waited_for_its_turn_is_judged_when_it_leaves() -> None:
    """Few requests are under way at once; while one waits for the others, the job may become another's."""
    cluster, why = Cluster(when="GET /v1/allocations"), ""
    async with served(cluster) as address:
        api = NomadApi(NomadSettings(address=address, job_id="farm"), address)
        api.not_ours = lambda: why
        slow = [asyncio.create_task(api.left_over()) for _ in range(4)]
        async with asyncio.timeout(DEADLINE_S):
            while not cluster.theirs:
                await asyncio.sleep(0.005)
        late = asyncio.create_task(api.stop("a"))
        await asyncio.sleep(0)
        why = "it is exp7's"
        cluster.told.set()
        await asyncio.gather(*slow)
        with pytest.raises(NomadError, match="it is exp7's"):
            await late
        await api.aclose()
    assert cluster.changes == []


async def test_a_broken_container_is_stopped_once_the_job_is_ours() -> None:
    cluster, refused = Cluster(), list[str]()
    async with served(cluster) as address:
        api = NomadApi(NomadSettings(address=address, job_id="farm"), address)

        def not_ours() -> str:
            refused.append("it is exp7's")
            return refused[-1] if len(refused) < 3 else ""

        api.not_ours = not_ours
        tasks = AllocationTasks(api, None, ContainerSettings())  # type: ignore[arg-type]
        tasks.stop("a1", "it is broken", 0.0, lambda: not cluster.changes)
        async with asyncio.timeout(DEADLINE_S):
            while not cluster.changes:
                await asyncio.sleep(0.005)
        await tasks.aclose()
        await api.aclose()
    assert cluster.changes == ["POST /v1/allocation/a1/stop"]
    assert len(refused) == 3


@pytest.mark.parametrize(
    ("when", "sent"),
    [
        ("GET /v1/var/nomad/jobs/farm", []),
        ("DELETE /v1/job/farm false", ["DELETE /v1/job/farm false"]),
        ("GET /v1/allocations", ["DELETE /v1/job/farm false"]),
        ("DELETE /v1/job/farm true", ["DELETE /v1/job/farm false", "DELETE /v1/job/farm true"]),
    ],
)
async def test_a_farm_that_is_taken_over_while_it_closes_is_left_to_its_new_owner(
    when: str, sent: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    cluster = Cluster()
    async with served(cluster) as address, farm_at(address):
        cluster.changes.clear()
        cluster.when = when
    assert cluster.theirs
    assert cluster.changes == sent
    assert "is not purged" in caplog.text
    assert "'exp7'" in caplog.text


async def test_a_farm_that_is_taken_over_while_its_image_is_built_is_not_registered() -> None:
    cluster, loop = Cluster(), asyncio.get_running_loop()

    def build(_: str) -> None:  # in a thread, as a build is
        cluster.theirs = True
        asyncio.run_coroutine_threadsafe(cluster.told.wait(), loop).result()

    async with served(cluster) as address:
        with pytest.raises(JobOwnedError, match="'exp7'"):
            await farm_at(address, {"ensure_image": build}, build_image=True, purge_job_on_start=True).__aenter__()
    assert cluster.changes == []


async def test_a_farm_that_is_taken_over_while_it_purges_on_opening_stops_there() -> None:
    cluster = Cluster(when="DELETE /v1/job/farm false")
    async with served(cluster) as address:
        with pytest.raises(JobOwnedError, match="'exp7'"):
            await farm_at(address, purge_job_on_start=True).__aenter__()
    assert cluster.changes == ["DELETE /v1/job/farm false"]


async def test_down_that_loses_the_job_while_containers_end_purges_nothing() -> None:
    cluster = Cluster(when="GET /v1/allocations")
    async with served(cluster) as address:
        with pytest.raises(AgentEnvError, match="'exp7'"):
            await NomadFarm(NomadSettings(address=address, job_id="farm")).down()
    assert cluster.changes == ["DELETE /v1/job/farm false"]
