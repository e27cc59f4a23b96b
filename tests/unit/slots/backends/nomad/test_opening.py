"""What a backend finds when it opens a job, and what it leaves alone while the job is another's."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from agentenv.containers.handle import ContainerHandle
from agentenv.errors import ConfigError, JobOwnedError
from agentenv.slots.backends.base import ContainerStarted
from agentenv.slots.backends.nomad import owner
from tests.unit.slots.backends.nomad.nomad_stub import JOB, Cluster, farm_at, served
from tests.waiting import DEADLINE_S, START_S, until

SCALE = "POST /v1/job/farm/scale"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "BEAT_S", 0.02)
    monkeypatch.setattr(owner, "LOOK_S", 0.01)
    monkeypatch.setattr(owner, "SURE_S", 10 * START_S)  # and a lock is waited for as long
    monkeypatch.setattr("agentenv.slots.backends.nomad.api._LOCK_TIMEOUT_S", START_S)
    monkeypatch.setattr(owner, "STANDBY_LOOK_S", 0.01)


def _job(count: int, **more: Any) -> dict[str, Any]:
    return {**JOB, "TaskGroups": [{"Name": "sandbox", "Count": count}], **more}


@pytest.mark.parametrize(
    ("job", "found"), [(None, 0), (_job(0), 0), (_job(3), 3), (_job(3, Stop=True), 0)], ids=["new", "0", "3", "stopped"]
)
async def test_what_runs_already_is_the_count_of_the_job_that_is_adopted(
    job: dict[str, Any] | None, found: int
) -> None:
    cluster = Cluster()
    cluster.job = job
    async with served(cluster) as address:
        backend = farm_at(address)
        assert backend.found == 0
        async with backend:
            assert backend.found == found
            assert SCALE not in cluster.changes


async def test_one_that_is_refused_changes_nothing_of_the_job_however_it_is_closed() -> None:
    cluster = Cluster()
    cluster.theirs, cluster.owner = True, {"run": "exp7", "host": "gpu3", "beats": "1"}
    async with served(cluster) as address:
        backend = farm_at(address, purge_job_on_start=True)
        opening = asyncio.create_task(backend.__aenter__())
        await until(lambda: cluster.looks > 2)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        await backend.__aexit__(None, None, None)
    assert cluster.changes == []


async def test_a_standby_opens_the_job_when_its_owner_has_gone() -> None:
    cluster, owners = Cluster(), list[tuple[str, str]]()
    cluster.theirs, cluster.job = True, _job(3)
    cluster.owner = {"run": "farm", "host": "node1", "pid": "17", "url": "http://node1:8700"}
    async with served(cluster) as address:
        options = {"standby": True, "url": "http://node2:8700", "on_standby": lambda *told: owners.append(told)}
        backend = farm_at(address, options, purge_job_on_shutdown=False)
        opening = asyncio.create_task(backend.__aenter__())
        await until(lambda: owners and cluster.looks > 3)
        [(url, words)] = owners
        assert url == "http://node1:8700"
        assert "'farm' at http://node1:8700 (somebody on node1, pid 17" in words
        assert (cluster.changes, backend.generation, backend.found) == ([], 0, 0)
        cluster.theirs, cluster.owner = False, None
        async with asyncio.timeout(DEADLINE_S):
            await opening
        assert backend.found == 3
        assert backend.generation > 0
        await backend.__aexit__(None, None, None)
    assert "POST /v1/jobs" in cluster.changes


async def test_a_standby_that_gives_up_changes_nothing() -> None:
    cluster = Cluster()
    cluster.theirs = True
    async with served(cluster) as address:
        backend = farm_at(address, {"standby": True})
        opening = asyncio.create_task(backend.__aenter__())
        await until(lambda: cluster.looks > 2)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        await backend.__aexit__(None, None, None)
    assert cluster.changes == []


def test_a_standby_never_purges_what_it_takes_over() -> None:
    with pytest.raises(ConfigError, match="purge_job_on_start: a standby takes over"):
        farm_at("http://nomad", {"standby": True}, purge_job_on_start=True)


async def test_one_that_has_lost_the_job_says_to_whom_and_when_it_is_back() -> None:
    cluster, owners, back = Cluster(), list[tuple[str, str]](), list[int]()
    options = {"on_standby": lambda *told: owners.append(told), "on_back": lambda: back.append(1)}
    async with served(cluster) as address, farm_at(address, options, purge_job_on_shutdown=False) as backend:
        assert backend.lost is None
        cluster.owner = {"run": "exp8", "host": "gpu4", "url": "http://gpu4:8700"}
        cluster.theirs = True
        await until(lambda: owners)
        assert owners[0][0] == "http://gpu4:8700"
        assert isinstance(backend.lost, JobOwnedError)
        assert "'exp8'" in backend.lost.message
        cluster.theirs = False
        await until(lambda: back)
        assert backend.lost is None


@pytest.mark.parametrize(("run", "purged"), [("exp7", False), ("", True), (None, True)])
async def test_a_job_on_which_runs_have_leases_is_not_purged(
    run: str | None, purged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A lease without a run is of a pool that ends with this backend, or of an operator's shell."""
    lease = {"slot": 0, "state": "leased", "epoch": 1, "tags": None if run is None else {"run": run}}
    reply = {"boot": "b", "slots": [{"slot": 1, "state": "free", "epoch": 0}, lease]}

    async def slots(_: web.Request) -> web.Response:
        return web.json_response(reply)

    container = web.Application()
    container.router.add_get("/v1/slots", slots)
    cluster = Cluster()
    async with TestServer(container) as server, served(cluster) as address:
        async with farm_at(address) as backend:
            handle = ContainerHandle("c", 0, str(server.make_url("")).rstrip("/"), "t", 2)
            backend._emit(ContainerStarted(handle))
            cluster.changes.clear()
        assert ("DELETE /v1/job/farm true" in cluster.changes) is purged
        assert ("job farm keeps running: leased to exp7" in caplog.text) is not purged
        assert purged or cluster.changes == []
