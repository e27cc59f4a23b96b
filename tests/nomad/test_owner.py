"""Two trainers, one job: the second is refused by name, the dead are succeeded, and nobody's containers are ended."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agentenv.config import ContainerSettings, PoolSettings
from agentenv.errors import AcquireTimeoutError, ConfigError, JobOwnedError
from agentenv.farm.nomad import NomadFarm, OperatorApi
from agentenv.slots.backends.base import ContainerStarted
from agentenv.slots.backends.nomad.backend import NomadBackend
from agentenv.slots.backends.nomad.lock_owner import LockOwner
from agentenv.slots.pool import SlotPool
from agentenv.wire.states import ContainerState
from tests.contract.conftest import Client
from tests.nomad.cluster import Cluster
from tests.nomad.farm import KillableNomad, nomad_farm
from tests.waiting import START_S, until, wait_for

TTL_OVER_S = 22.0
"""Nomad frees a silent holder's lock so long after its last word."""


def _farm(cluster: Cluster, job_id: str, slots: int = 2, **settings: Any) -> KillableNomad:
    given = {"image": cluster.image, "job_id": job_id, **settings}
    return nomad_farm(cluster.address, ContainerSettings(slots_per_container=slots), **given)


async def _started(backend: NomadBackend) -> str:
    async with asyncio.timeout(START_S):
        async for event in backend.events():
            if isinstance(event, ContainerStarted):
                return event.handle.id
    raise AssertionError("unreachable")


def _registered(cluster: Cluster, job_id: str) -> tuple[int, int]:
    """What any registration, scaling or purge would change."""
    job = cluster.nomad.get(f"/v1/job/{job_id}")
    return job["JobModifyIndex"], job["TaskGroups"][0]["Count"]


async def test_the_second_trainer_is_refused_and_told_whose_the_job_is(cluster: Cluster, job_id: str) -> None:
    one = PoolSettings(min_containers=2, max_containers=2, acquire_timeout_s=START_S)
    async with SlotPool(_farm(cluster, job_id, run_name="exp7"), one) as pool:
        lease = await pool.lease("working")
        await until(lambda: len(cluster.allocations(job_id)) == 2, START_S)
        before, allocations = _registered(cluster, job_id), {one["ID"] for one in cluster.allocations(job_id)}
        began = time.monotonic()
        for slots in (2, 16):
            with pytest.raises(JobOwnedError) as refused:
                await _farm(cluster, job_id, slots).__aenter__()
            assert "'exp7'" in refused.value.message
            assert f"pid {os.getpid()}" in refused.value.message
            assert os.uname().nodename in refused.value.message
            assert "sandbox_job_id" in refused.value.next_step
        assert time.monotonic() - began < 2 * TTL_OVER_S, "a live holder is not waited out"
        assert "'exp7'" in (await NomadFarm(cluster.settings(job_id=job_id)).census()).owner
        with pytest.raises(JobOwnedError, match="exp7"):
            await NomadFarm(cluster.settings(job_id=job_id)).down()

        assert _registered(cluster, job_id) == before
        assert {one["ID"] for one in cluster.allocations(job_id)} == allocations
        async with Client.open(lease.container) as client:
            assert (await client.run(lease.key, "echo alive")).stdout == "alive\n"
    assert cluster.nomad.get("/v1/jobs", prefix=job_id) == []
    assert cluster.nomad.get("/v1/vars", prefix=f"nomad/jobs/{job_id}") == []


@dataclass
class Trainer:
    """A process that has opened the job."""

    process: subprocess.Popen[str]
    generation: int


@contextmanager
def _trainer(cluster: Cluster, job_id: str, place: Path) -> Iterator[Trainer]:
    """Another trainer's process, its job open. Also a farm service's, as far as Nomad sees it."""
    nomad = {
        "address": cluster.address, "job_id": job_id, "image": cluster.image, "build_image": False, "cpu_mhz": 20,
        "memory_mib": 1024, "memory_oversubscription": True, "run_name": "other",
    }  # fmt: skip
    path = place / "settings.json"
    path.write_text(json.dumps({"slots": 2, "nomad": nomad, "url": "http://other:8700"}))
    argv = [sys.executable, "-m", "tests.nomad.owner_process", str(path)]
    with (place / "log").open("w") as log:
        process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, (place / "log").read_text()
        said = json.loads(line)
        assert said["open"]
        yield Trainer(process, said["generation"])
    finally:
        process.kill()
        process.communicate()


async def test_a_killed_trainer_of_this_machine_is_succeeded_at_once(
    cluster: Cluster, job_id: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with _trainer(cluster, job_id, tmp_path) as other:
        [allocation] = cluster.serving(job_id)
        other.process.kill()
        other.process.wait()
        with caplog.at_level(logging.INFO):
            async with _farm(cluster, job_id) as backend:
                await backend.scale(1)
                assert await _started(backend) == allocation
                assert backend.generation > other.generation
    assert "is dead" in caplog.text
    assert "is silent" not in caplog.text


async def test_a_silent_holder_of_another_machine_is_waited_out(
    cluster: Cluster, job_id: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with OperatorApi.opened(cluster.settings(job_id=job_id)) as api:
        elsewhere = LockOwner(run="far", host="elsewhere", pid="1", process="boot:pid:[1]:1:1", since="yesterday")
        taken = await api.take_lock(elsewhere.items(), None)
        assert taken is not None
        speaking = asyncio.create_task(_speak(api, elsewhere, taken.id))
        with pytest.raises(JobOwnedError, match=r"'far' .* on elsewhere"):
            await _farm(cluster, job_id).__aenter__()
        speaking.cancel()
        async with _farm(cluster, job_id) as backend:
            assert backend.status().problem == ""
    assert "'far'" in caplog.text
    assert "is silent" in caplog.text


async def _speak(api: OperatorApi, holder: LockOwner, held: str) -> None:
    for number in range(1_000):
        await api.take_lock({**holder.items(), "beats": str(number)}, held)
        await asyncio.sleep(3)


async def test_a_frozen_trainer_that_lost_its_job_changes_nothing_of_it(
    cluster: Cluster, job_id: str, tmp_path: Path
) -> None:
    with _trainer(cluster, job_id, tmp_path) as trainer:
        other = trainer.process
        [allocation] = cluster.serving(job_id)
        os.kill(other.pid, signal.SIGSTOP)
        async with _farm(cluster, job_id, run_name="successor") as backend:
            await backend.scale(2)
            both = set(await asyncio.to_thread(cluster.serving, job_id, 2))
            assert allocation in both
            before = _registered(cluster, job_id)
            os.kill(other.pid, signal.SIGCONT)
            assert other.stdout is not None
            said: dict[str, str] = {}
            while not {"problem", "told"} <= said.keys():  # on a loaded machine it is told twice before the problem
                said |= json.loads(await asyncio.to_thread(other.stdout.readline))
            assert said.keys() == {"problem", "told"}
            assert "'successor'" in said["problem"]
            assert "'successor'" in said["told"]
            out, _ = await asyncio.to_thread(other.communicate)  # it closes; purging at the end is its default
            assert json.loads(out.splitlines()[-1]) == {"closed": True}, (tmp_path / "log").read_text()
            assert "is not purged" in (tmp_path / "log").read_text()
            assert _registered(cluster, job_id) == before
            assert set(cluster.serving(job_id, 2)) == both


async def test_a_standby_succeeds_a_frozen_farm_and_keeps_its_containers(
    cluster: Cluster, job_id: str, tmp_path: Path
) -> None:
    owners = list[tuple[str, str]]()
    with _trainer(cluster, job_id, tmp_path) as other:
        [allocation] = cluster.serving(job_id)
        settings = cluster.settings(job_id=job_id, memory_mib=1024, purge_job_on_shutdown=False, build_image=False)
        backend = NomadBackend(
            ContainerSettings(slots_per_container=2),
            settings.model_copy(update={"cpu_mhz": 20, "memory_oversubscription": True}),
            url="http://standby:8700",
            standby=True,
            on_standby=lambda *told: owners.append(told),
        )
        opening = asyncio.create_task(backend.__aenter__())
        try:
            await until(lambda: owners)
            assert owners[0][0] == "http://other:8700"
            assert "'other'" in owners[0][1]
            before = _registered(cluster, job_id)
            assert not opening.done()
            os.kill(other.process.pid, signal.SIGSTOP)
            async with asyncio.timeout(TTL_OVER_S + START_S):
                await opening
            assert len(owners) == 1
            assert backend.found == 1
            assert backend.generation > other.generation
            assert await _started(backend) == allocation
            assert cluster.nomad.get(f"/v1/job/{job_id}")["TaskGroups"][0]["Count"] == before[1]
        finally:
            opening.cancel()
            await backend.__aexit__(None, None, None)
    assert cluster.serving(job_id).keys() == {allocation}


async def test_a_second_run_keeps_the_containers_it_finds_until_they_are_idle(cluster: Cluster, job_id: str) -> None:
    two = PoolSettings(min_containers=2, max_containers=2, acquire_timeout_s=START_S)
    async with SlotPool(_farm(cluster, job_id, purge_job_on_shutdown=False), two) as pool:
        await until(lambda: pool.statistics().containers.get(ContainerState.ready) == 2, START_S)
    before, count = set(cluster.serving(job_id, 2)), _registered(cluster, job_id)[1]
    assert (len(before), count) == (2, 2)
    patient = PoolSettings(min_containers=1, max_containers=4, acquire_timeout_s=START_S, idle_containers_after_s=3600)
    async with SlotPool(_farm(cluster, job_id, purge_job_on_shutdown=False), patient) as pool:
        await until(lambda: pool.statistics().containers.get(ContainerState.ready) == 2, START_S)
        assert pool.statistics().goal_containers == 2
    assert _registered(cluster, job_id)[1] == 2
    assert {one["ID"] for one in cluster.allocations(job_id)} == before, "none was stopped, none started"
    hasty = patient.model_copy(update={"idle_containers_after_s": 2})
    async with SlotPool(_farm(cluster, job_id, purge_job_on_shutdown=False), hasty):
        await until(lambda: _registered(cluster, job_id)[1] == 1, START_S)


async def test_another_number_of_slots_is_refused_while_containers_run(cluster: Cluster, job_id: str) -> None:
    async with _farm(cluster, job_id, 2, purge_job_on_shutdown=False) as first:
        await first.scale(1)
        container = await _started(first)
    before = _registered(cluster, job_id)
    with pytest.raises(ConfigError, match=r"slots_per_container: is 3, but the 1 containers .* have 2 slots") as error:
        await _farm(cluster, job_id, 3).__aenter__()
    assert "purge_job_on_start" in error.value.next_step
    assert _registered(cluster, job_id) == before
    assert cluster.serving(job_id).keys() == {container}


async def test_containers_that_somebody_gave_other_slots_are_left_alone(cluster: Cluster, job_id: str) -> None:
    """The job is changed under a trainer, by hand: what runs then is not its own to end."""
    one = PoolSettings(min_containers=1, max_containers=1, acquire_timeout_s=START_S)
    async with SlotPool(_farm(cluster, job_id), one) as pool:
        async with await pool.lease("first") as lease:
            ours = lease.container.id
        job = cluster.nomad.get(f"/v1/job/{job_id}")
        for template in job["TaskGroups"][0]["Tasks"][0]["Templates"]:
            template["EmbeddedTmpl"] = template["EmbeddedTmpl"].replace('"slots":2', '"slots":3')
        cluster.nomad.put("/v1/jobs", {"Job": job})

        def replaced() -> str | None:
            wanted = (one for one in cluster.allocations(job_id) if one["DesiredStatus"] == "run")
            return next((one["ID"] for one in wanted if one["ID"] != ours and one["ClientStatus"] == "running"), None)

        theirs = await asyncio.to_thread(wait_for, replaced, START_S)
        await until(lambda: pool.statistics().faults.get("start_failed"), START_S)
        with pytest.raises(AcquireTimeoutError, match="has 3 slots, 2 were requested"):
            await pool.lease("second", timeout_s=5)
        assert cluster.serving(job_id).keys() == {theirs}
