"""A farm on two nodes, with real wires between them and the environment: spread, drain, images from a peer, cuts, and
a node that dies."""

from __future__ import annotations

import asyncio
import os
import secrets
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from agentenv import AsyncFarm, shipped
from agentenv.api.farm_server.relay import serve_relay
from agentenv.config import ContainerSettings, PoolSettings
from agentenv.deadlines import scaled
from agentenv.dev import program
from agentenv.dev.agent import Ports
from agentenv.errors import LeaseLostError
from agentenv.image_placement.keepers import Keepers, keeper_at
from agentenv.sdk.roots import ImageRoot
from agentenv.slots.backends.nomad.backend import NomadBackend
from agentenv.slots.backends.nomad.job import hcl
from agentenv.wire.spec import MIB, SlotLimits
from hosts.nodes import GUEST, MachineNode
from tests.farm_service import served
from tests.nomad.cluster import Cluster
from tests.nomad.traffic import Farm, farm_at_work
from tests.nomad.two_nodes import Node, TwoNodes, two_nodes
from tests.registry import Registry, running_registry
from tests.small_image import small_image
from tests.waiting import START_S, until, wait_for

SLOTS, TRAJECTORIES = 4, 6
SMALL_SLOTS = SlotLimits(memory_bytes=512 * MIB, workspace_bytes=32 * MIB, tmp_bytes=32 * MIB, shm_bytes=16 * MIB)
WITH_IMAGES = {"image_volume": hcl("agentenv-images")}


@pytest.fixture(scope="module")
def nodes(cluster: Cluster) -> Iterator[TwoNodes]:
    """Needs ``cluster`` for the image and the program only."""
    guest = os.environ.get(GUEST)
    # A short path: sockets are below.
    with (
        tempfile.TemporaryDirectory(prefix="ae2-", ignore_cleanup_errors=True) as root,
        two_nodes(
            Path(root), program.nomad_program(lambda _: None), partial(MachineNode, guest=guest) if guest else Node
        ) as found,
    ):
        yield found


@pytest.fixture(autouse=True)
def _nothing_left(nodes: TwoNodes) -> Iterator[None]:
    """A farm that closed left no container in either engine, wherever the wire was cut."""
    yield
    wait_for(lambda: not any(node.containers() for node in nodes.nodes))


def farm_on(nodes: TwoNodes, job_id: str, **settings: object):  # type: ignore[no-untyped-def]  # of a Farm
    backend = NomadBackend(ContainerSettings(slots_per_container=SLOTS), nodes.settings(job_id, **settings))
    return farm_at_work(backend, containers=2, slots=SLOTS, trajectories=TRAJECTORIES)


def a_node_at_work(nodes: TwoNodes, farm: Farm) -> tuple[Node, set[str]]:
    """A node that runs some of the farm, and the containers that run on it."""
    places = {account.container: nodes.node_of(account.container) for account in farm.traffic.living()}
    node = next(iter(places.values()))
    return node, {container for container, place in places.items() if place == node}


async def spread(nodes: TwoNodes, job_id: str) -> float:
    """So much memory for each container that a node has room for one only."""
    (total,) = {
        nodes.nomad.get(f"/v1/node/{nodes.id_of(node)}")["NodeResources"]["Memory"]["MemoryMB"] for node in nodes.nodes
    }
    return float(total) * 0.6


async def test_both_nodes_work_and_one_is_drained(nodes: TwoNodes) -> None:
    """Leases on a draining node live on until their trajectories are over; new ones are had elsewhere."""
    memory_mib = int(await spread(nodes, "drained"))
    async with farm_on(nodes, "spread", memory_mib=memory_mib) as farm:
        await until(lambda: len(farm.traffic.living()) == TRAJECTORIES)
        places = {nodes.node_of(account.container) for account in farm.traffic.living()}
        assert places == set(nodes.nodes), "one container on each node, both at work"
    async with farm_on(nodes, "drained") as farm:
        node, containers = a_node_at_work(nodes, farm)
        there = [account for account in farm.traffic.living() if account.container in containers]
        drain(nodes, node, deadline_s=scaled(120))
        try:
            await until(lambda: "draining" in farm.pool.statistics().containers, explain=lambda: repr(farm.pool))
            answered = sum(len(account.answered) for account in there)
            await until(lambda: sum(len(account.answered) for account in there) > answered + 20)
            farm.traffic.finishing |= containers
            await farm.whole_again()
            await farm.flowing(50)
            assert all(account.finished for account in there), "nobody on the draining node was cut short"
            assert {nodes.node_of(account.container) for account in farm.traffic.living()} == {
                other for other in nodes.nodes if other != node
            }
        finally:
            drain(nodes, node, deadline_s=None)


def drain(nodes: TwoNodes, node: Node, *, deadline_s: float | None) -> None:
    """Begin to drain a node; None: end it, and let it take allocations again."""
    wish = None if deadline_s is None else {"Deadline": int(deadline_s * 1e9), "IgnoreSystemJobs": True}
    nodes.nomad.put(f"/v1/node/{nodes.id_of(node)}/drain", {"DrainSpec": wish, "MarkEligible": wish is None})


async def test_a_wire_cut_for_seconds_costs_nothing(nodes: TwoNodes) -> None:
    """Shorter than the farm's patience: what was under way is asked for again; no result is lost or made twice."""
    async with farm_on(nodes, "blink") as farm:
        held = farm.traffic.living()
        node, _ = a_node_at_work(nodes, farm)
        with node.cut_off():
            await asyncio.sleep(scaled(4))
        await farm.flowing(100)
        assert all(account.ended_by is None for account in held)
        assert [number for account in held for number in account.unsure] == []


async def test_a_wire_cut_for_half_a_minute_in_the_middle_of_a_batch(nodes: TwoNodes) -> None:
    """Leases beyond the cut end with their type within 15 s, the others live on, and the farm is whole again."""
    memory_mib = int(await spread(nodes, "cut"))
    async with farm_on(nodes, "cut", memory_mib=memory_mib) as farm:
        node, containers = a_node_at_work(nodes, farm)
        there = [account for account in farm.traffic.living() if account.container in containers]
        others = [account for account in farm.traffic.living() if account.container not in containers]
        with node.cut_off():
            cut_at = time.monotonic()
            await farm.ended_in_time(there, cut_at)
            answered = farm.traffic.answered()
            await asyncio.sleep(max(0.0, scaled(30) - (time.monotonic() - cut_at)))
            assert farm.traffic.answered() > answered, "the other node's calls go on"
        assert all(isinstance(account.ended_by, LeaseLostError) for account in there)
        assert all(account.ended_by is None for account in others)
        await farm.whole_again()


@pytest.mark.skipif(
    os.environ.get(GUEST) == "bookworm", reason="Linux 6.1 cannot keep in memory what image slots write"
)
async def test_a_node_gets_an_image_from_the_other_and_a_relay_reaches_both(nodes: TwoNodes, tmp_path: Path) -> None:
    """The registry is gone when the second node needs the image; the trainer only reaches the relay."""
    memory_mib = int(await spread(nodes, "images"))
    containers = ContainerSettings(slots_per_container=1, limits=SMALL_SLOTS)
    backend = NomadBackend(containers, nodes.settings("images", memory_mib=memory_mib, variables=WITH_IMAGES))
    pool = PoolSettings(min_containers=2, max_containers=2, acquire_timeout_s=scaled(120))
    behind: dict[str, str] = {}
    """What the relay reaches, by the containers' ids."""

    async def lookup(container: str) -> str | None:
        return behind.get(container)

    with ExitStack() as running:
        registry = running.enter_context(running_registry(tmp_path, host=nodes.nodes[0].host))
        small_image(tmp_path / "layout")
        image = registry.push(tmp_path / "layout", "small")
        async with (
            keepers(nodes, registry) as images,
            serve_relay(lookup) as relay_url,
            served(backend, pool, containers=containers, keepers=images, relay_url=relay_url) as farm,
            AsyncFarm("farm", farm=replace(farm.access(), route="relay"), start_timeout_s=scaled(120)) as trainer,
        ):
            await until(lambda: len(farm.farm.manager.links) == 2, START_S)
            behind.update({name: link.handle.base_url for name, link in farm.farm.manager.links.items()})
            root = ImageRoot(image, cpus=1, memory_mib=256, storage_mib=64)
            async with trainer.sandbox(root) as first:
                running.close()
                async with trainer.sandbox(root) as second:
                    boxes = {box._usable().lease.container.id: box for box in (first, second)}
                    assert {nodes.node_of(container) for container in boxes} == set(nodes.nodes)
                    for container, box in boxes.items():
                        assert box._usable().lease.container.base_url == f"{relay_url}/c/{container}"
                        assert (await box.run("echo $((6 * 7)); id -u")).stdout == "42\n0\n"


@asynccontextmanager
async def keepers(nodes: TwoNodes, registry: Registry) -> AsyncIterator[Keepers]:
    """The shipped job on both nodes, which may ask the registry."""
    token, port, job_id = secrets.token_hex(32), Ports.free().http, "two-nodes-images"
    path = f"nomad/jobs/{job_id}"
    nodes.nomad.put(f"/v1/var/{path}", {"Path": path, "Items": {"token": token}})
    given = {
        "job_id": job_id, "driver": "raw_exec", "command": nodes.nodes[0].agentenv, "port": port, "cpu_mhz": 20,
        "memory_mib": 256, "store": "${meta.agentenv_data_dir}/../store",
        "args": ["--registry", registry.address, "--no-tls-verify", "--patience", "1"],
    }  # fmt: skip
    text = shipped.path("nomad/images.nomad.hcl").read_text()
    job = nodes.nomad.parse_job(text, {name: hcl(value) for name, value in given.items()})
    nodes.nomad.put("/v1/jobs", {"Job": job})
    try:
        yield Keepers(token, keeper_at(port))
    finally:
        nodes.nomad.delete(f"/v1/job/{job_id}?purge=true")


async def test_a_node_that_dies_ends_its_leases_and_is_used_again_when_it_is_back(nodes: TwoNodes) -> None:
    memory_mib = int(await spread(nodes, "died"))
    async with farm_on(nodes, "died", memory_mib=memory_mib) as farm:
        node, containers = a_node_at_work(nodes, farm)
        there = [account for account in farm.traffic.living() if account.container in containers]
        others = [account for account in farm.traffic.living() if account.container not in containers]
        await asyncio.to_thread(node.die)
        died_at = time.monotonic()
        await farm.ended_in_time(there, died_at)
        await farm.flowing(50)
        await asyncio.to_thread(node.start_again)
        await asyncio.to_thread(nodes.start, node)
        await farm.whole_again(scaled(120.0))
        await until(lambda: {nodes.node_of(one.container) for one in farm.traffic.living()} == set(nodes.nodes))
    assert all(isinstance(account.ended_by, LeaseLostError) for account in there)
    assert all(account.ended_by is None for account in others)
