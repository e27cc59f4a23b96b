"""The farm survives what happens to clusters: each test breaks one thing on the real cluster under load.

In each: no result that a container had is lost, no call runs twice, no infrastructure failure looks like a
command's, every lease lives on or ends with its type within 15 s, the pool is whole again, and nothing is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agentenv import shipped
from agentenv.config import ContainerSettings, NomadSettings, PoolSettings
from agentenv.containers.handle import ContainerHandle
from agentenv.errors import AcquireTimeoutError, ContainerLostError, LeaseLostError, SandboxUnavailableError
from agentenv.slots.backends.base import ContainerStarted
from agentenv.slots.backends.nomad.backend import NomadBackend
from agentenv.slots.pool import SlotPool
from tests.nomad import farm_process
from tests.nomad.cluster import Cluster, running_cluster
from tests.nomad.farm import allocation_of, docker_name
from tests.nomad.traffic import WHOLE_AGAIN_S, Farm, farm_at_work
from tests.waiting import START_S, until, wait_for

CONTAINERS, SLOTS, TRAJECTORIES = 2, 4, 8
SEVERAL = PoolSettings(min_containers=CONTAINERS, max_containers=CONTAINERS)


def small(cluster: Cluster, job_id: str, **settings: object) -> NomadSettings:
    """Containers of which several fit on the test's node."""
    return cluster.settings(
        job_id=job_id, build_image=False, cpu_mhz=20, memory_mib=1024, memory_oversubscription=True, **settings
    )


@contextmanager
def backend_on(cluster: Cluster, job_id: str, **settings: object) -> Iterator[NomadBackend]:
    """A backend whose job leaves nothing: checked when the block ends."""
    with nothing_left(cluster):
        yield NomadBackend(ContainerSettings(slots_per_container=SLOTS), small(cluster, job_id, **settings))


@contextmanager
def nothing_left(cluster: Cluster) -> Iterator[None]:
    """No Docker container is there at the end, running or not, that was not there before.

    The engine is asked: Nomad forgets a purged job's allocations at once, whatever became of their containers.
    """
    before = docker_names(cluster)
    yield
    wait_for(lambda: docker_names(cluster) <= before, 60.0, lambda: f"left: {docker_names(cluster) - before}")


def docker_names(cluster: Cluster) -> set[str]:
    return {str(one.name) for one in cluster.containers()}


def at_work(backend: NomadBackend):  # type: ignore[no-untyped-def]  # an async context manager of a Farm
    return farm_at_work(backend, containers=CONTAINERS, slots=SLOTS, trajectories=TRAJECTORIES)


def assert_typed(farm: Farm) -> None:
    """Whoever lost a lease was told so with the type that says what survived."""
    ended = [account for account in farm.traffic.accounts if account.ended_by is not None]
    assert all(isinstance(account.ended_by, LeaseLostError) for account in ended), ended


async def test_a_killed_container(cluster: Cluster, job_id: str) -> None:
    with backend_on(cluster, job_id) as backend:
        async with at_work(backend) as farm:
            victim = farm.traffic.accounts[0].container
            there = [account for account in farm.traffic.living() if account.container == victim]
            others = [account for account in farm.traffic.living() if account.container != victim]
            await asyncio.to_thread(cluster.container(allocation_of(victim)).kill)
            await farm.ended_in_time(there, time.monotonic())
            await farm.whole_again()
            assert all(isinstance(account.ended_by, ContainerLostError) for account in there)
            assert all(account.ended_by is None for account in others), "neighbours' leases live on"
            assert_typed(farm)


async def test_a_killed_nomad_client(cluster: Cluster, job_id: str) -> None:
    with backend_on(cluster, job_id) as backend:
        async with at_work(backend) as farm:
            held = farm.traffic.living()
            cluster.client.kill()
            await farm.flowing(100)
            cluster.client.start()
            await asyncio.to_thread(cluster.wait_ready)
            await farm.flowing(100)
            await farm.whole_again()
            assert all(account.ended_by is None for account in held), "the containers never noticed"


async def test_a_restarted_nomad_server(cluster: Cluster, job_id: str) -> None:
    with backend_on(cluster, job_id) as backend:
        async with at_work(backend) as farm:
            held = farm.traffic.living()
            cluster.server.kill()
            await farm.flowing(100)
            cluster.server.start()
            await asyncio.to_thread(cluster.wait_ready)
            await farm.flowing(100)
            assert all(account.ended_by is None for account in held)
            # What happens after the restart is heard of again.
            victim = held[0].container
            there = [account for account in held if account.container == victim]
            await asyncio.to_thread(cluster.container(allocation_of(victim)).kill)
            await farm.ended_in_time(there, time.monotonic())
            assert_typed(farm)
            await until(lambda: victim not in repr(farm.pool), explain=lambda: repr(farm.pool))
            await farm.whole_again()


async def test_a_stopped_allocation(cluster: Cluster, job_id: str) -> None:
    """Its leases live on until their trajectories are over; then it goes, and another takes its place."""
    with backend_on(cluster, job_id) as backend:
        async with at_work(backend) as farm:
            victim = farm.traffic.accounts[0].container
            there = [account for account in farm.traffic.living() if account.container == victim]
            cluster.nomad.put(f"/v1/allocation/{allocation_of(victim)}/stop", {})
            await until(
                lambda: farm.pool.statistics().containers.get("draining") == 1, START_S, lambda: repr(farm.pool)
            )
            answered = sum(len(account.answered) for account in there)
            await until(lambda: sum(len(account.answered) for account in there) > answered + 20, START_S)
            farm.traffic.finishing.add(victim)
            await farm.whole_again()
            assert all(account.finished for account in there), "every one of them ended by itself"
            assert not farm.traffic.ended_since(0.0), "no lease was lost"


async def test_an_environment_killed_in_the_middle_of_a_hundred_calls_and_started_again(
    cluster: Cluster, job_id: str, tmp_path: Path
) -> None:
    nomad = small(cluster, job_id, purge_job_on_shutdown=False)
    given = {"nomad": json.loads(nomad.model_dump_json()), "containers": CONTAINERS, "slots": SLOTS}
    (tmp_path / "settings.json").write_text(json.dumps(given))
    command = [sys.executable, "-m", "tests.nomad.farm_process", str(tmp_path / "settings.json")]
    doomed = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert doomed.stdout is not None
    said = [json.loads(line) async for line in take_until(doomed.stdout, "answered", 20)]
    assert {"under_way": farm_process.CALLS} in said
    doomed.kill()
    died_at = time.monotonic()
    await doomed.wait()
    before = {one["ID"] for one in cluster.allocations(job_id)}
    there = {docker_name(one) for one in before}
    assert there <= docker_names(cluster), "they outlive the environment"

    again = nomad.model_copy(update={"purge_job_on_shutdown": True})
    backend = NomadBackend(ContainerSettings(slots_per_container=SLOTS), again)
    async with farm_at_work(backend, containers=CONTAINERS, slots=SLOTS, trajectories=TRAJECTORIES) as farm:
        # All slots work for the new environment: nobody holds one for the dead.
        await until(lambda: len({a.trajectory for a in farm.traffic.living() if a.answered}) == TRAJECTORIES, START_S)
        assert time.monotonic() - died_at < START_S
        assert {allocation_of(a.container) for a in farm.traffic.accounts} == before, "its containers were adopted"
        ran = await farm.calls_run()
        fresh = farm.traffic.answered() + TRAJECTORIES
        assert ran <= farm_process.CALLS + fresh, "no call of the dead ran twice"
    wait_for(lambda: there.isdisjoint(docker_names(cluster)), 60.0, lambda: f"left of {there}")


async def take_until(stream: asyncio.StreamReader, key: str, count: int) -> AsyncIterator[bytes]:
    """Lines until so many of them have the key."""
    async with asyncio.timeout(START_S):
        while count and (line := await stream.readline()):
            count -= key in json.loads(line)
            yield line


async def test_a_token_that_is_not_the_containers(cluster: Cluster, job_id: str) -> None:
    """Somebody changed the job's token: whoever adopts the job cannot use the containers, and replaces them."""
    nomad = small(cluster, job_id, purge_job_on_shutdown=False)
    async with NomadBackend(ContainerSettings(slots_per_container=SLOTS), nomad) as backend:
        await backend.scale(1)
        (old,) = await started(backend, 1)
    cluster.nomad.put_token(job_id, "f" * 64)
    again = nomad.model_copy(update={"purge_job_on_shutdown": True})
    adopted_at = time.monotonic()
    async with farm_at_work(
        NomadBackend(ContainerSettings(slots_per_container=SLOTS), again), containers=1, slots=SLOTS, trajectories=2
    ) as farm:
        assert time.monotonic() - adopted_at < START_S
        assert {account.container for account in farm.traffic.accounts}.isdisjoint({old.id})
    wait_for(lambda: docker_name(old.id) not in docker_names(cluster), 60.0)


async def test_an_image_that_comes_late(cluster: Cluster, job_id: str) -> None:
    """Its name was wrong, or nobody had built it: the leases say so, and once it is there the farm is whole."""
    late = f"{job_id}:1"
    with backend_on(cluster, job_id, image=late) as backend:
        async with SlotPool(backend, SEVERAL) as pool:
            with pytest.raises(SandboxUnavailableError, match="cannot pull"):
                await pool.lease("early", timeout_s=60)
            assert cluster.docker.images.get(cluster.image).tag(late)
            try:
                await whole_within(pool, WHOLE_AGAIN_S)
                async with await pool.lease("late"):
                    pass
            finally:
                cluster.docker.images.remove(late)


async def test_capacity_that_comes_late(cluster: Cluster, job_id: str) -> None:
    """No node takes a container: leases say so when they have waited too long; then the farm is whole."""
    (node,) = cluster.nomad.get("/v1/nodes")
    with backend_on(cluster, job_id) as backend, contextlib.ExitStack() as until_there_is:
        eligible(cluster, node["ID"], yes=False)
        until_there_is.callback(eligible, cluster, node["ID"], yes=True)
        async with SlotPool(backend, SEVERAL) as pool:
            await until(lambda: "cannot place 2 containers" in backend.status().waiting_for)
            with pytest.raises(AcquireTimeoutError, match="Nomad cannot place 2 containers: no node is ready"):
                await pool.lease("early", timeout_s=5)
            until_there_is.close()
            await whole_within(pool, WHOLE_AGAIN_S)


def eligible(cluster: Cluster, node_id: str, *, yes: bool) -> None:
    wish = "eligible" if yes else "ineligible"
    cluster.nomad.put(f"/v1/node/{node_id}/eligibility", {"Eligibility": wish})


async def whole_within(pool: SlotPool, seconds: float) -> None:
    """Until every slot of CONTAINERS can be had."""
    await until(lambda: pool.statistics().slots_total == CONTAINERS * SLOTS, seconds, lambda: repr(pool))


async def started(backend: NomadBackend, count: int) -> list[ContainerHandle]:
    """The first containers it reports."""
    found: list[ContainerHandle] = []
    async with asyncio.timeout(START_S):
        async for event in backend.events():
            if isinstance(event, ContainerStarted):
                found.append(event.handle)
                if len(found) == count:
                    break
    return found


async def test_a_full_disk_on_the_client(tmp_path_factory: pytest.TempPathFactory, cluster: Cluster) -> None:
    """The containers keep nothing on disk and go on; a new one cannot start until there is space, and says why."""
    root = tmp_path_factory.mktemp("full")
    disk = root / "c1" / "data"  # the client's alone: a server without a disk is another story
    disk.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512m", "tmpfs", str(disk)], check=True)
    try:
        with running_cluster(root, cluster.client.program) as small, backend_on(small, small.job_id()) as backend:
            assert small.data_dir == disk
            async with at_work(backend) as farm:
                with filled(disk):
                    await farm.flowing(100)
                    await farm.whole_again()
                    assert not farm.traffic.ended_since(0.0), "no lease ended"
                    victim = farm.traffic.accounts[0].container
                    small.container(allocation_of(victim)).kill()
                    await until(
                        lambda: victim_is_replaced(farm, victim) or said_why(farm), START_S, lambda: repr(farm.pool)
                    )
                await farm.whole_again()
    finally:
        if disk.is_mount():  # else the cluster's end has unmounted it
            subprocess.run(["umount", str(disk)], check=True)


def victim_is_replaced(farm: Farm, victim: str) -> bool:
    """A replacement needs a few KiB, and may find them."""
    return farm.is_whole() and all(account.container != victim for account in farm.traffic.living())


def said_why(farm: Farm) -> bool:
    return farm.pool.statistics().faults.get("start_failed", 0) > 0


@contextmanager
def filled(directory: Path) -> Iterator[None]:
    """No space left below ``directory``, also not what is given free meanwhile."""
    over = threading.Event()
    hog = threading.Thread(target=_fill, args=(directory / "hog", over))
    hog.start()
    try:
        yield
    finally:
        over.set()
        hog.join()
        (directory / "hog").unlink()


def _fill(path: Path, over: threading.Event) -> None:
    with path.open("wb", buffering=0) as file:
        while not over.wait(0.02):
            for size in (65536, 4096, 1):
                with contextlib.suppress(OSError):
                    while not over.is_set() and file.write(b"\0" * size):
                        pass


async def test_the_clock_of_the_containers_jumps(cluster: Cluster, job_id: str, tmp_path: Path) -> None:
    """An hour forward, then two back: leases, deadlines and resets go by another clock."""
    clock = tmp_path / "clock"
    set_clock(clock, "+0")
    source = shipped.path("nomad/sandbox.nomad.hcl").read_text()
    with_clock = source.replace("readonly_rootfs = true\n", "readonly_rootfs = true\n" + FAKE_CLOCK_MOUNTS, 1).replace(
        'task "sandbox" {\n', 'task "sandbox" {\n' + FAKE_CLOCK_ENV, 1
    )
    library = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))
    job_file = tmp_path / "job.hcl"
    job_file.write_text(with_clock.replace("@LIBRARY@", str(library)).replace("@CLOCK@", str(clock)))
    with backend_on(cluster, job_id, job_file=job_file) as backend:
        async with at_work(backend) as farm:
            assert abs(await wall_clock_of(cluster, farm) - time.time()) < 60
            for offset_s in (3600, -3600):
                set_clock(clock, f"{offset_s:+d}")
                assert abs(await wall_clock_of(cluster, farm) - time.time() - offset_s) < 60, "the jump is real"
                await farm.flowing(100)
            await farm.whole_again()
            assert not farm.traffic.ended_since(0.0), "no lease ended"


FAKE_CLOCK_ENV = """
      env {
        LD_PRELOAD               = "/clock/libfaketime.so.1"
        FAKETIME_TIMESTAMP_FILE  = "/clock/now"
        FAKETIME_NO_CACHE        = "1"
        DONT_FAKE_MONOTONIC      = "1"
      }
"""
FAKE_CLOCK_MOUNTS = """
        volumes = ["@LIBRARY@:/clock/libfaketime.so.1:ro", "@CLOCK@:/clock/now"]
"""


def set_clock(path: Path, offset: str) -> None:
    """What libfaketime reads: seconds from the machine's own clock. In place: the file is mounted."""
    path.write_text(offset + "\n")


async def wall_clock_of(cluster: Cluster, farm: Farm) -> float:
    """The time of day in a container, as its sandbox server's Python sees it."""
    container = cluster.container(allocation_of(farm.traffic.accounts[0].container))

    def told() -> bytes:
        code, output = container.exec_run(["python3", "-c", "import time; print(time.time())"])
        assert code == 0, output
        return bytes(output)  # empty now and then: a loaded engine can lose what an exec printed

    return float(await asyncio.to_thread(wait_for, told))
