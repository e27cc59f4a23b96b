"""Nothing that changes a job is sent on an old look at who owns it, however long ago that look was."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from agentenv.config import ContainerSettings, NomadSettings
from agentenv.errors import AgentEnvError, JobOwnedError
from agentenv.farm.nomad import NomadFarm
from agentenv.slots.backends.nomad import allocation_tasks, count, owner
from agentenv.slots.backends.nomad.allocation_tasks import AllocationTasks
from agentenv.slots.backends.nomad.api import NomadApi
from agentenv.slots.backends.nomad.backend import NomadBackend
from agentenv.slots.backends.nomad.explain import NomadError

JOB = {"ID": "farm", "ModifyIndex": 1, "TaskGroups": [{"Name": "sandbox", "Count": 0}]}
LOCK = "/v1/var/nomad/jobs/farm/owner"


class Cluster:
    """A Nomad with one job. ``when``: the request, as ``changes`` has them, after which another run owns the job.
    It is answered only when the first owner has heard so: whatever it sends then, it sends on an older look."""

    def __init__(self, when: str = "") -> None:
        self.when = when
        self.changes: list[str] = []
        self.theirs = False
        self.refusals = 0
        self.told = asyncio.Event()
        self.job: dict[str, Any] | None = dict(JOB)

    async def answer(self, request: web.Request) -> web.Response:
        said = f"{request.method} {request.path} {request.query.get('purge', '')}".rstrip()
        if request.path == LOCK:
            return self._lock(request)
        if request.method not in ("GET", "HEAD") and said != "PUT /v1/jobs/parse":
            self.changes.append(said)
        if said == self.when:
            self.theirs = True
            await self.told.wait()
        if request.path == "/v1/job/farm":
            return web.json_response(self.job, status=404 if self.job is None else 200)
        lists = ("/v1/allocations", "/v1/job/farm/allocations", "/v1/job/farm/evaluations", "/v1/nodes")
        answer: Any = [] if request.path in lists else {}
        if request.path == "/v1/var/nomad/jobs/farm" and request.method == "GET":
            answer = {"Items": {"token": "t"}}
        return web.json_response(answer, headers={"X-Nomad-Index": "1"})

    def _lock(self, request: web.Request) -> web.Response:
        if self.theirs and request.method == "PUT":
            self.refusals += 1
            if self.refusals > 1:  # it has read the first one
                self.told.set()
            return web.json_response({}, status=409)
        held = {"Lock": {"ID": "l"}, "ModifyIndex": 1, "Items": {"run": "exp7", "host": "gpu3", "pid": "17"}}
        return web.json_response(held)


@asynccontextmanager
async def served(cluster: Cluster) -> AsyncIterator[str]:
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", cluster.answer)
    async with TestServer(application) as server:
        yield str(server.make_url("")).rstrip("/")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "BEAT_S", 0.02)
    monkeypatch.setattr(owner, "LOOK_S", 0.01)
    monkeypatch.setattr(count, "RETRY_MIN_S", 0.01)
    monkeypatch.setattr(allocation_tasks, "_RETRY_MAX_S", 0.02)


def _farm(address: str, *, ensure_image: Callable[[str], object] | None = None, **settings: Any) -> NomadBackend:
    nomad = NomadSettings(address=address, job_id="farm", **{"build_image": False, **settings})
    return NomadBackend(ContainerSettings(slots_per_container=2), nomad, ensure_image=ensure_image)


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
        async with asyncio.timeout(20):
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
        async with asyncio.timeout(20):
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
    async with served(cluster) as address, _farm(address):
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
            await _farm(address, ensure_image=build, build_image=True, purge_job_on_start=True).__aenter__()
    assert cluster.changes == []


async def test_a_farm_that_is_taken_over_while_it_purges_on_opening_stops_there() -> None:
    cluster = Cluster(when="DELETE /v1/job/farm false")
    async with served(cluster) as address:
        with pytest.raises(JobOwnedError, match="'exp7'"):
            await _farm(address, purge_job_on_start=True).__aenter__()
    assert cluster.changes == ["DELETE /v1/job/farm false"]


async def test_down_that_loses_the_job_while_containers_end_purges_nothing() -> None:
    cluster = Cluster(when="GET /v1/allocations")
    async with served(cluster) as address:
        with pytest.raises(AgentEnvError, match="'exp7'"):
            await NomadFarm(NomadSettings(address=address, job_id="farm")).down()
    assert cluster.changes == ["DELETE /v1/job/farm false"]
