"""Limits above a slot that are met by others: never reported as the doing of a command below its own limit."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from agentenv.config import ContainerSettings, PoolSettings
from agentenv.errors import InfraError, LeaseLostError
from agentenv.executor.session import ToolSession
from agentenv.executor.tool_executor import ToolExecutor
from agentenv.slots.backends.local import LocalBackend
from agentenv.slots.pool import SlotPool
from agentenv.tools.catalog import ToolCatalog
from agentenv.wire.states import SlotState
from tests.integration.supervisor_harness import cgroups_of
from tests.waiting import START_S, until

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root's containers have cgroups")
MIB = 2**20


def _limit_file(backend: LocalBackend, *names: str) -> Path:
    """A limit of the container's own cgroup, as Docker's or Nomad's would be."""
    (name,) = backend.pids
    found = [base / file for base in cgroups_of(name) for file in names if (base / file).exists()]
    assert found, f"no {names} in {cgroups_of(name)}"
    return found[0]


@pytest.fixture
def backend(tmp_path: Path) -> LocalBackend:
    return LocalBackend(ContainerSettings(slots_per_container=4), state_dir=tmp_path)


async def _stdout(session: ToolSession, command: str) -> str:
    return (await session.call("bash", {"command": command}, timeout_s=60)).stdout


async def test_a_container_out_of_memory_is_no_command_s_doing(backend: LocalBackend) -> None:
    async with (
        SlotPool(backend, PoolSettings(max_containers=1)) as pool,
        ToolExecutor(pool, ToolCatalog.builtin()) as executor,
        executor.open("innocent") as innocent,
        executor.open("neighbour") as neighbour,
    ):
        limit = _limit_file(backend, "memory.limit_in_bytes", "memory.max")
        limit.write_text(str(400 * MIB))
        await _stdout(neighbour, "head -c 330M /dev/zero > big")
        outcomes: list[str] = []
        for _ in range(3):
            # Whichever of its processes the kernel takes, and however the shell's own exit code hides it.
            try:
                command = 'perl -e \'my $x = "x" x (90<<20); print "done\\n"\' | cat'
                result = await innocent.call("bash", {"command": command}, timeout_s=60)
                assert not result.oom_killed, "it was below its own limit"
                outcomes.append(result.stdout)
            except LeaseLostError:  # the kernel took the slot's first process
                outcomes.append("infra")
                break
            except InfraError as error:
                outcomes.append("infra" if "ran out of memory" in str(error) else str(error))
        assert "infra" in outcomes
        assert set(outcomes) <= {"infra", "done\n"}, "what was killed is never data"


async def test_a_slot_s_own_memory_limit_is_data(backend: LocalBackend) -> None:
    async with (
        SlotPool(backend, PoolSettings(max_containers=1)) as pool,
        ToolExecutor(pool, ToolCatalog.builtin()) as executor,
        executor.open("hog") as hog,
    ):
        await hog.call("bash", {"command": "true"})
        base = _limit_file(backend, "memory.limit_in_bytes", "memory.max").parent
        own = next(
            base / f"slot-{hog.lease.key.slot}" / name
            for name in ("memory.limit_in_bytes", "memory.max")
            if (base / f"slot-{hog.lease.key.slot}" / name).exists()
        )
        own.write_text(str(100 * MIB))
        result = await hog.call("bash", {"command": "perl -e 'my $x = \"x\" x (200<<20)'"}, timeout_s=60)
        assert (result.fault, result.exit_code, result.oom_killed) == ("none", 137, True)


async def test_no_process_to_be_had_in_the_container_is_no_command_s_doing_and_passes(backend: LocalBackend) -> None:
    async with (
        SlotPool(backend, PoolSettings(max_containers=1)) as pool,
        ToolExecutor(pool, ToolCatalog.builtin()) as executor,
        executor.open("innocent") as innocent,
    ):
        assert await _stdout(innocent, "echo before") == "before\n"
        limit = _limit_file(backend, "pids.max")
        limit.write_text("1")
        with contextlib.suppress(InfraError):  # by the spare shell, when that had started already
            await innocent.call("bash", {"command": "true"}, timeout_s=START_S)
        for _ in range(2):
            with pytest.raises(InfraError, match="no process to spare"):
                await innocent.call("bash", {"command": "true"}, timeout_s=START_S)
        limit.write_text("max")
        with contextlib.suppress(InfraError):  # by a spare shell that was refused before
            await innocent.call("bash", {"command": "true"}, timeout_s=START_S)
        assert await _stdout(innocent, "echo after") == "after\n"


async def test_a_slot_reset_while_there_is_no_process_to_be_had_comes_back(backend: LocalBackend) -> None:
    async with SlotPool(backend, PoolSettings(max_containers=1)) as pool:
        lease = await pool.lease("t")
        await until(lambda: pool.statistics().slots.get(SlotState.free, 0) == 3)
        limit = _limit_file(backend, "pids.max")
        limit.write_text("1")
        pool._leases.give_back(lease)
        log = backend._running[lease.container.id].files
        await until(lambda: log.last_words().count("start") >= 5)
        assert SlotState.quarantined not in pool.statistics().slots
        limit.write_text("max")
        await until(lambda: pool.statistics().slots.get(SlotState.free, 0) == 4)
