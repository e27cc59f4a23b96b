"""The farm survives what happens to clusters: each test breaks one thing on the real cluster under load.

In each: no result that a container had is lost, no call runs twice, no infrastructure failure looks like a
command's, every lease lives on or ends with its type within 15 s, the pool is whole again within 60 s, and
nothing is left.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from agentenv.config import ContainerSettings
from agentenv.errors import ContainerLostError, LeaseLostError
from agentenv.slots.backends.nomad import NomadBackend
from tests.nomad.cluster import Cluster, wait_for
from tests.nomad.traffic import LEASE_END_S, Farm, farm_at_work, until

pytestmark = pytest.mark.timeout(300)

CONTAINERS, SLOTS, TRAJECTORIES = 2, 4, 8


@contextmanager
def backend_on(cluster: Cluster, job_id: str, **settings: object) -> Iterator[NomadBackend]:
    """A backend whose job leaves nothing: checked when the block ends."""
    wanted = cluster.settings(job_id=job_id, build_image=False, cpu_mhz=20, memory_mib=1024, **settings)
    yield NomadBackend(ContainerSettings(slots_per_container=SLOTS), wanted)
    gone = wait_for(lambda: [] if not containers_of(cluster, job_id) else None, 30.0, lambda: cluster.tell(job_id))
    assert gone == []


def containers_of(cluster: Cluster, job_id: str) -> list[str]:
    """Docker containers of the job that are there, running or not."""
    ids = {one["ID"] for one in cluster.allocations(job_id)}
    return [name for one in cluster.containers() if (name := str(one.name)).removeprefix("sandbox-") in ids]


def at_work(backend: NomadBackend):  # type: ignore[no-untyped-def]  # an async context manager of a Farm
    return farm_at_work(backend, containers=CONTAINERS, slots=SLOTS, trajectories=TRAJECTORIES)


def allocation_of(container: str) -> str:
    return container.partition(".")[0]


def assert_typed_and_soon(farm: Farm, broke_at: float) -> None:
    """Whoever lost a lease was told so in time, and with the type that says what survived."""
    ended = [account for account in farm.traffic.accounts if account.ended_by is not None]
    assert all(isinstance(account.ended_by, LeaseLostError) for account in ended), ended
    assert max(farm.traffic.ended_since(broke_at), default=0.0) < LEASE_END_S


async def test_a_killed_container(cluster: Cluster, job_id: str) -> None:
    with backend_on(cluster, job_id) as backend:
        async with at_work(backend) as farm:
            victim = farm.traffic.accounts[0].container
            there = [account for account in farm.traffic.living() if account.container == victim]
            others = [account for account in farm.traffic.living() if account.container != victim]
            broke_at = time.monotonic()
            cluster.container(allocation_of(victim)).kill()
            await until(lambda: all(account.ended_by for account in there), LEASE_END_S, lambda: repr(farm.pool))
            await farm.whole_again()
            assert all(isinstance(account.ended_by, ContainerLostError) for account in there)
            assert all(account.ended_by is None for account in others), "neighbours' leases live on"
            assert_typed_and_soon(farm, broke_at)


async def test_a_killed_nomad_client(cluster: Cluster, job_id: str) -> None:
    with backend_on(cluster, job_id) as backend:
        async with at_work(backend) as farm:
            held = farm.traffic.living()
            cluster.client.kill()
            await farm.flowing(100)
            cluster.client.start()
            cluster.wait_ready()
            await farm.flowing(100)
            assert farm.is_whole()
            assert all(account.ended_by is None for account in held), "the containers never noticed"


async def test_a_restarted_nomad_server(cluster: Cluster, job_id: str) -> None:
    with backend_on(cluster, job_id) as backend:
        async with at_work(backend) as farm:
            held = farm.traffic.living()
            cluster.server.kill()
            await farm.flowing(100)
            cluster.server.start()
            cluster.wait_ready()
            await farm.flowing(100)
            assert all(account.ended_by is None for account in held)
            # What happens after the restart is heard of again.
            victim = held[0].container
            broke_at = time.monotonic()
            cluster.container(allocation_of(victim)).kill()
            await until(lambda: held[0].ended_by is not None, LEASE_END_S, lambda: repr(farm.pool))
            assert_typed_and_soon(farm, broke_at)
            await until(lambda: farm.is_whole() and victim not in repr(farm.pool), 60.0, lambda: repr(farm.pool))


async def test_a_stopped_allocation(cluster: Cluster, job_id: str) -> None:
    with backend_on(cluster, job_id) as backend:
        async with at_work(backend) as farm:
            victim = farm.traffic.accounts[0].container
            there = [account for account in farm.traffic.living() if account.container == victim]
            broke_at = time.monotonic()
            cluster.nomad.put(f"/v1/allocation/{allocation_of(victim)}/stop", {})
            await until(
                lambda: all(account.ended_by for account in there) and farm.is_whole(), 60.0, lambda: repr(farm.pool)
            )
            # The container gets SIGTERM and kill_timeout: its leases may go on until then, and end with their type.
            assert all(isinstance(account.ended_by, LeaseLostError) for account in there)
            assert max(farm.traffic.ended_since(broke_at)) < 30.0
