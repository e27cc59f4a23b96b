"""A short soak on the real cluster: leases leave nothing behind in a container of Nomad's."""

from __future__ import annotations

from agentenv.config import ContainerSettings, PoolSettings
from agentenv.executor.tool_executor import ToolExecutor
from agentenv.slots.pool import SlotPool
from agentenv.tools.catalog import ToolCatalog
from benchmarks.farm import Farm
from benchmarks.soak import at_rest, cycles, drift, footprint
from tests.nomad.cluster import Cluster
from tests.nomad.farm import first_pid, nomad_farm
from tests.waiting import START_S

SLOTS = 4
ONE = PoolSettings(min_containers=1, max_containers=1, acquire_timeout_s=START_S)


async def test_leases_leave_nothing_behind(cluster: Cluster) -> None:
    backend = nomad_farm(cluster.address, ContainerSettings(slots_per_container=SLOTS), image=cluster.image)
    async with SlotPool(backend, ONE) as pool, ToolExecutor(pool, ToolCatalog.builtin()) as executor:
        async with executor.open("first") as session:
            container = session.lease.container.id
        farm = Farm(pool, executor, container, frozenset({first_pid(container)}))
        await cycles(executor, 3 * SLOTS, SLOTS)
        before = await at_rest(farm)
        assert before.container_processes >= 3, "the container's init, its supervisor and its server"
        await cycles(executor, 200, SLOTS)
        assert drift(before, await at_rest(farm, before)) == {}
        async with executor.open("stays") as session:
            await session.call("bash", {"command": "(sleep 300 &)"})
            assert {"slots_not_free", "slot_processes"} <= drift(before, footprint(farm)).keys()
        assert drift(before, await at_rest(farm, before)) == {}
