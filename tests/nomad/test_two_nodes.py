"""A farm on two nodes, with real wires between them and the environment: spread, drain, and cuts."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from agentenv.config import ContainerSettings
from agentenv.deadlines import scaled
from agentenv.dev import program
from agentenv.errors import LeaseLostError
from agentenv.slots.backends.nomad.backend import NomadBackend
from hosts.nodes import GUEST, MachineNode
from tests.nomad.cluster import Cluster
from tests.nomad.traffic import LEASE_END_S, Farm, farm_at_work
from tests.nomad.two_nodes import Node, TwoNodes, two_nodes
from tests.waiting import until, wait_for

SLOTS, TRAJECTORIES = 4, 6


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
            await until(lambda: "draining" in farm.pool.statistics().containers, scaled(30.0), lambda: repr(farm.pool))
            answered = sum(len(account.answered) for account in there)
            await until(lambda: sum(len(account.answered) for account in there) > answered + 20, scaled(30.0))
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
            await until(
                lambda: all(account.ended_by for account in there), LEASE_END_S + scaled(5), lambda: repr(farm.pool)
            )
            assert max(account.ended_at or 0.0 for account in there) - cut_at < LEASE_END_S
            answered = farm.traffic.answered()
            await asyncio.sleep(max(0.0, scaled(30) - (time.monotonic() - cut_at)))
            assert farm.traffic.answered() > answered, "the other node's calls go on"
        assert all(isinstance(account.ended_by, LeaseLostError) for account in there)
        assert all(account.ended_by is None for account in others)
        await farm.whole_again()
