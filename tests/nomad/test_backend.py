"""NomadBackend on a real cluster: what the suites for every backend cannot ask of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agentenv.config import ContainerSettings, NomadSettings, PoolSettings
from agentenv.errors import AcquireTimeoutError, ConfigError, SandboxUnavailableError
from agentenv.executor.tool_executor import ToolExecutor
from agentenv.farm.nomad import OperatorApi
from agentenv.slots.backends.base import ContainerDraining, ContainerEvent, ContainerGone, ContainerStarted
from agentenv.slots.backends.nomad.api import SILENT_AFTER_S, EventStream, open_stream_session
from agentenv.slots.backends.nomad.backend import NomadBackend
from agentenv.slots.backends.nomad.job import hcl, job_text
from agentenv.slots.lease import SlotLease
from agentenv.slots.pool import SlotPool
from agentenv.tools.catalog import ToolCatalog
from agentenv.wire.spec import MIB, SlotLimits
from agentenv.wire.states import ContainerState
from tests.contract.conftest import Client
from tests.nomad.cluster import Cluster
from tests.nomad.farm import KillableNomad, nomad_farm
from tests.waiting import START_S, eventually, until

ONE = PoolSettings(min_containers=1, max_containers=1, acquire_timeout_s=START_S)


def _farm(cluster: Cluster, slots: int = 2, **settings: Any) -> KillableNomad:
    given = {"image": cluster.image, **settings}
    return nomad_farm(cluster.address, ContainerSettings(slots_per_container=slots), **given)


@asynccontextmanager
async def _pool(backend: NomadBackend, settings: PoolSettings = ONE) -> AsyncIterator[SlotPool]:
    async with SlotPool(backend, settings) as pool:
        yield pool


async def _take(backend: NomadBackend, *kinds: type[ContainerEvent]) -> list[ContainerEvent]:
    """The next events, which must be of these kinds."""
    found: list[ContainerEvent] = []
    async with asyncio.timeout(START_S):
        async for event in backend.events():
            found.append(event)
            if len(found) == len(kinds):
                break
    assert [type(event) for event in found] == list(kinds)
    return found


async def _says(lease: SlotLease, command: str) -> str:
    async with Client.open(lease.container) as client:
        return (await client.run(lease.key, command)).stdout


async def test_a_job_that_is_there_is_adopted_with_its_containers(cluster: Cluster, job_id: str) -> None:
    async with _farm(cluster, job_id=job_id, purge_job_on_shutdown=False) as first:
        await first.scale(2)
        started = await _take(first, ContainerStarted, ContainerStarted)
    ids = {event.handle.id for event in started if isinstance(event, ContainerStarted)}
    assert {one["ClientStatus"] for one in cluster.allocations(job_id)} == {"running"}
    async with _farm(cluster, job_id=job_id) as second:
        await second.scale(2)
        adopted = await _take(second, ContainerStarted, ContainerStarted)
        assert {event.handle.id for event in adopted if isinstance(event, ContainerStarted)} == ids
        await until(lambda: second.status().following == "stream")
        assert second.status().problem == ""
    assert {one["ClientStatus"] for one in cluster.allocations(job_id)} <= {"complete"}, "closing leaves nothing behind"
    assert cluster.nomad.get("/v1/jobs", prefix=job_id) == []


async def test_a_farm_that_up_keeps_outlives_its_trainer(cluster: Cluster, job_id: str) -> None:
    async with _farm(cluster, job_id=job_id) as trainer:
        await trainer.scale(1)
        await _take(trainer, ContainerStarted)
        async with OperatorApi.opened(cluster.settings(job_id=job_id)) as api:
            await api.keep(job_id, kept=True)
    assert {one["ClientStatus"] for one in cluster.allocations(job_id)} == {"running"}


async def test_purging_at_the_start_begins_anew(cluster: Cluster, job_id: str) -> None:
    async with _farm(cluster, job_id=job_id, purge_job_on_shutdown=False) as first:
        await first.scale(1)
        (old,) = await _take(first, ContainerStarted)
    async with _farm(cluster, job_id=job_id, purge_job_on_start=True) as second:
        await second.scale(1)
        (new,) = await _take(second, ContainerStarted)
    assert isinstance(old, ContainerStarted)
    assert isinstance(new, ContainerStarted)
    assert old.handle.id != new.handle.id


async def test_a_wrong_image_fails_leases_early_and_by_name(cluster: Cluster) -> None:
    async with _pool(_farm(cluster, image="no-such-image:1")) as pool:
        with pytest.raises(SandboxUnavailableError, match="cannot pull image 'no-such-image:1'"):
            await pool.lease("t", timeout_s=120)


async def test_a_container_that_refuses_to_serve_says_why_itself(cluster: Cluster) -> None:
    nonsense = hcl(json.dumps({"slots": 2, "isolation": "nonsense"}))
    async with _pool(_farm(cluster, slots=2, variables={"spec": nonsense})) as pool:
        with pytest.raises(SandboxUnavailableError, match=r"isolation.*nonsense.*auto, full, user"):
            await pool.lease("t", timeout_s=120)


async def test_a_field_of_its_containers_given_as_a_variable_is_checked_before_anything_is_registered(
    cluster: Cluster, job_id: str
) -> None:
    with pytest.raises(ConfigError, match=r"variables.isolation: got 'nonsense'"):
        await _farm(cluster, job_id=job_id, variables={"isolation": '"nonsense"'}).__aenter__()
    assert cluster.nomad.get("/v1/jobs", prefix=job_id) == []


async def test_no_capacity_is_told_in_nomads_terms(cluster: Cluster) -> None:
    backend = _farm(cluster, memory_mib=10_000_000)
    async with _pool(backend) as pool:
        await until(lambda: "memory exhausted" in backend.status().waiting_for)
        with pytest.raises(AcquireTimeoutError, match="cannot place a container: memory exhausted on 1 node"):
            await pool.lease("t", timeout_s=3)


async def test_what_keeps_it_from_opening_is_typed(cluster: Cluster, tmp_path: Path) -> None:
    with pytest.raises(
        SandboxUnavailableError, match=r"no Nomad server responds at http://127.0.0.1:9.*make nomad-dev"
    ):
        await NomadBackend(nomad=NomadSettings(address="http://127.0.0.1:9", build_image=False)).__aenter__()
    with pytest.raises(ConfigError, match="namespace: 'nowhere' does not exist"):
        await _farm(cluster, namespace="nowhere").__aenter__()
    with pytest.raises(ConfigError, match="region"):
        await _farm(cluster, region="mars").__aenter__()
    bad = tmp_path / "bad.hcl"
    bad.write_text(job_text(NomadSettings()) + "\njob {")
    with pytest.raises(ConfigError, match=r"job_file.*[Uu]nclosed"):
        await _farm(cluster, job_file=bad).__aenter__()


async def test_a_drained_container_keeps_its_leases_and_ends_when_they_do(cluster: Cluster) -> None:
    backend = _farm(cluster)
    async with _pool(backend) as pool:
        lease = await pool.lease("working")
        (node,) = {one["NodeID"] for one in cluster.allocations(backend.status().job_id)}
        cluster.nomad.put(f"/v1/node/{node}/drain", {"DrainSpec": {"Deadline": 600_000_000_000}})
        try:
            await until(lambda: pool.statistics().containers == {ContainerState.draining: 1})
            await until(lambda: "no node is ready and eligible" in backend.status().waiting_for)
            with pytest.raises(AcquireTimeoutError, match="no node is ready and eligible"):
                await pool.lease("new", timeout_s=3)
            assert await _says(lease, "echo alive") == "alive\n"
            assert lease.lost is None
            await lease.release()
            await until(lambda: not pool.statistics().containers)
        finally:
            cluster.nomad.put(f"/v1/node/{node}/drain", {"DrainSpec": None, "MarkEligible": True})
        async with await pool.lease("next") as again:
            assert again.container.id != lease.container.id
        assert pool.statistics().leases_lost == 0


async def test_a_drain_that_is_over_ends_leases_typed(cluster: Cluster) -> None:
    backend = _farm(cluster)
    async with _pool(backend) as pool:
        lease = await pool.lease("slow")
        (node,) = {one["NodeID"] for one in cluster.allocations(backend.status().job_id)}
        cluster.nomad.put(f"/v1/node/{node}/drain", {"DrainSpec": {"Deadline": 3_000_000_000}})
        try:
            error = await asyncio.wait_for(lease.wait_lost(), 60)
            assert error.code == "container_lost"
        finally:
            cluster.nomad.put(f"/v1/node/{node}/drain", {"DrainSpec": None, "MarkEligible": True})


async def test_a_replaced_container_gives_way_to_another(cluster: Cluster) -> None:
    async with _farm(cluster) as backend:
        await backend.scale(1)
        (old,) = await _take(backend, ContainerStarted)
        assert isinstance(old, ContainerStarted)
        await backend.replace(old.handle.id, "it is broken")
        rest: list[ContainerEvent] = []
        async with asyncio.timeout(START_S):
            async for event in backend.events():
                rest.append(event)
                if {type(event) for event in rest} >= {ContainerGone, ContainerStarted}:
                    break
        assert (
            rest.count(ContainerGone(old.handle.id, next(e.reason for e in rest if isinstance(e, ContainerGone)))) == 1
        )
        assert {type(event) for event in rest} <= {ContainerDraining, ContainerGone, ContainerStarted}
        await backend.replace("unknown", "nothing happens")


async def test_a_restarted_server_disturbs_no_lease(cluster: Cluster) -> None:
    backend = _farm(cluster)
    settings = PoolSettings(min_containers=1, max_containers=2, acquire_timeout_s=START_S)
    async with _pool(backend, settings) as pool:
        lease = await pool.lease("through it all")
        cluster.server.kill()
        try:
            await until(lambda: backend.status().following == "unreachable")
            assert await _says(lease, "echo meanwhile") == "meanwhile\n"
            other = await pool.lease("also meanwhile")
            third = asyncio.create_task(pool.lease("needs another container"))
            await asyncio.sleep(1)
        finally:
            cluster.server.start()
            await asyncio.to_thread(cluster.wait_ready)
        async with await third as late:
            assert late.container.id != lease.container.id
        assert (lease.lost, other.lost) == (None, None)
        await until(lambda: backend.status().following == "stream")
        await lease.release()
        await other.release()


async def test_a_job_that_somebody_stopped_comes_back(cluster: Cluster) -> None:
    backend = _farm(cluster)
    async with _pool(backend) as pool:
        lease = await pool.lease("t")
        cluster.nomad.delete(f"/v1/job/{backend.status().job_id}", no_shutdown_delay="true")
        error = await asyncio.wait_for(lease.wait_lost(), 60)
        assert error.code == "container_lost"
        async with await pool.lease("after") as again:
            assert await _says(again, "echo back") == "back\n"


async def test_a_cluster_where_nothing_happens_is_not_a_dead_stream(cluster: Cluster, job_id: str) -> None:
    """Nomad's heartbeats come well within the silence after which a stream counts as cut."""
    settings = cluster.settings(job_id=job_id)
    async with (
        open_stream_session(settings) as session,
        aclosing(EventStream(session, settings, cluster.address).lines(after=0, nodes=False)) as lines,
    ):
        assert [await anext(lines), await anext(lines)] == [{}, {}], "connected, and Nomad's greeting"
        async with asyncio.timeout(0.8 * SILENT_AFTER_S):
            assert await anext(lines) == {}


async def test_without_an_event_stream_lists_do(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentenv.slots.backends.nomad.api._PATH", "/v1/event/nothing")
    backend = _farm(cluster)
    async with _pool(backend) as pool:
        lease = await pool.lease("t")
        assert backend.status().following == "polling"
        backend.kill_container(lease.container.id)
        await asyncio.wait_for(lease.wait_lost(), 60)
        async with await pool.lease("next"):
            pass

        async def whole() -> bool:
            return backend.status().asked == 1 and list(backend.status().containers.values()) == ["serving"]

        await eventually(whole)


async def test_all_slots_may_use_what_each_is_allowed_at_once(cluster: Cluster, job_id: str) -> None:
    """By default a container's own limit is never met before its slots' are."""
    limits = SlotLimits(memory_bytes=1024 * MIB, workspace_bytes=64 * MIB)
    containers = ContainerSettings(slots_per_container=3, limits=limits)
    nomad = cluster.settings(job_id=job_id, build_image=False, cpu_mhz=20)
    hold = "b = b'x' * (900 << 20); import time; time.sleep(5); print(len(b) >> 20)"
    async with (
        SlotPool(NomadBackend(containers, nomad), ONE) as pool,
        ToolExecutor(pool, ToolCatalog.builtin()) as executor,
        AsyncExitStack() as stack,
    ):
        sessions = [await stack.enter_async_context(executor.open(f"t{number}")) for number in range(3)]
        calls = (one.call("bash", {"command": f'python3 -c "{hold}"'}, timeout_s=START_S) for one in sessions)
        results = await asyncio.gather(*calls)
    assert [(one.exit_code, one.stdout) for one in results] == [(0, "900\n")] * 3


async def test_less_memory_than_slots_may_use_is_said_before_anything_is_registered(
    cluster: Cluster, job_id: str
) -> None:
    for given in ({"memory_mib": 1024}, {"variables": {"memory_mib": "1024"}}):
        nomad = cluster.settings(job_id=job_id, build_image=False, **given)
        with pytest.raises(ConfigError, match=r"memory_mib: a container of 1024 MiB cannot hold 10 slots of 2048 MiB"):
            await NomadBackend(ContainerSettings(), nomad).__aenter__()
    assert cluster.nomad.get("/v1/jobs", prefix=job_id) == []
