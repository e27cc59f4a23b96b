"""Agent programs in the slots of a farm service, directly and behind a relay: what they ask for reaches the trainer,
and what the farm or a relay does in the middle of a turn costs an attempt at most."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agentenv.agent.program import AgentProgram
from agentenv.agent.transcript import Transcript
from agentenv.config import ContainerSettings, PoolSettings
from agentenv.deadlines import scaled
from agentenv.errors import LeaseReclaimedError
from agentenv.slots.backends.fake import FakeBackend
from agentenv.testing import Reply
from agentenv.wire.states import SlotState
from tests.farm_process import FarmProcess
from tests.farm_service import Served, served, token
from tests.faults.proxy import Proxy
from tests.integration.test_agent_programs import SOLVE, ProgramEnv, check_sampled, playing
from tests.integration.test_env_managed import records
from tests.relay_process import relay_process
from tests.unit.env.managed_stubs import managed
from tests.waiting import START_S, until

SLOTS = 3
POOL = PoolSettings(min_containers=1, max_containers=1, acquire_timeout_s=START_S)


@asynccontextmanager
async def farm_of(pool: PoolSettings = POOL, **options: Any) -> AsyncIterator[Served]:
    """A farm of one container, all of whose slots must be free at the end."""
    async with served(FakeBackend(ContainerSettings(slots_per_container=SLOTS)), pool, **options) as farm:
        yield farm
        await until(lambda: farm.farm.manager.ledger.slot_counts() == {SlotState.free: SLOTS}, START_S)


async def played(
    farm: Served, tmp_path: Path, kind: type[ProgramEnv], script: Any = None, **changed: Any
) -> tuple[list[Transcript], dict[str, Any]]:
    """The records of a group in this farm's slots, and the group, whose tokens have been checked."""
    script = {"*": [SOLVE]} if script is None else script
    of_the_farm: dict[str, Any] = {"tool_pool_mode": "farm", "farm_url": farm.url, "farm_token": token()}
    async with managed(kind, tmp_path, script, **of_the_farm, **changed) as (env, voice):
        group, _ = await env.collect_trajectories({"id": "x"})
        found = records(tmp_path)[-1].trajectories
        assert group is not None, found[0].error
        assert check_sampled(voice, group) >= len(found)
    return list(found), group


def meeting(fault: Callable[[], None]) -> dict[str, Any]:
    """A script whose second turn meets a fault, once."""
    faults = [fault]

    def player(turn: Any) -> Reply:
        if turn.step == 1 and faults:
            faults.pop()()
        return SOLVE[turn.step] if turn.step < len(SOLVE) else Reply("")

    return {"*": [player]}


@pytest.mark.parametrize("behaviour", ["rewriting", "forking"])
async def test_in_slots_of_a_farm(tmp_path: Path, behaviour: str) -> None:
    async with farm_of() as farm:
        found, group = await played(farm, tmp_path, playing(behaviour), group_size=3, agent_max_steps=20)
    assert group["scores"] == [1.0] * len(group["scores"])
    assert [(one.score, one.attempt, one.finish_reason) for one in found] == [(1.0, 1, "stop")] * 3


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM], ids=lambda one: one.name)
async def test_behind_a_relay_that_ends_in_the_middle_of_a_turn(tmp_path: Path, ending: signal.Signals) -> None:
    async with (
        Proxy(0) as address,
        farm_of(relay_url=f"http://127.0.0.1:{address.port}") as farm,
        relay_process(farm.url, token("*", "read")) as (first, process),
        relay_process(farm.url, token("*", "read")) as (second, _),
    ):
        address.upstream_port = port_of(first)

        def killed() -> None:
            address.upstream_port = port_of(second)
            process.send_signal(ending)

        (one,), _group = await played(
            farm, tmp_path, playing("plain"), meeting(killed), group_size=1, farm_route="relay"
        )
        assert address.passed["down"] > 0
        await process.wait()
    assert (one.score, one.attempt, one.fault, one.finish_reason) == (1.0, 2, "none", "stop"), one
    assert one.earlier_attempts[0].startswith("ConnectionLostError"), one.earlier_attempts


async def test_a_slot_that_the_farm_takes_back_in_the_middle_of_a_turn_is_no_attempt(tmp_path: Path) -> None:
    async with farm_of() as farm:
        queue = farm.farm.queue

        def reclaimed() -> None:
            (lease,) = queue.leases(lambda _: True)
            queue.end(lease.id, LeaseReclaimedError("the slot was reclaimed"))

        (one,), _ = await played(farm, tmp_path, playing("plain"), meeting(reclaimed), group_size=1, infra_retries=0)
    assert (one.score, one.attempt, one.fault) == (1.0, 2, "none"), one
    assert one.earlier_attempts[0].startswith("LeaseReclaimedError"), one.earlier_attempts


async def test_a_slot_whose_program_asks_nothing_for_longer_than_leases_last_stays_its_own(tmp_path: Path) -> None:
    ttl_s = scaled(10.0)

    class Slow(ProgramEnv):
        def agent_program(self, item: Any) -> AgentProgram:
            program = super().agent_program(item)
            return AgentProgram(
                ["sh", "-c", f'sleep {2 * ttl_s:g}; exec "$@"', "sh", *program.argv],
                env=program.env,
                plain_files=program.plain_files,
            )

    short = POOL.model_copy(update={"lease_ttl_s": ttl_s})
    async with farm_of(short) as farm:
        (one,), _ = await played(farm, tmp_path, Slow, group_size=1, infra_retries=0, lease_ttl_s=ttl_s)
    assert (one.score, one.attempt) == (1.0, 1), one


async def test_a_program_goes_on_when_the_farm_is_killed(tmp_path: Path) -> None:
    service = FarmProcess(tmp_path)
    try:
        await service.start()
        of_the_farm: dict[str, Any] = {
            "tool_pool_mode": "farm", "farm_url": service.url, "farm_token": await service.token("exp7")
        }  # fmt: skip
        script = meeting(lambda: os.kill(service.pid, signal.SIGKILL))
        async with managed(
            playing("plain"), tmp_path, script, group_size=1, require_sandbox=False, acquire_timeout_s=START_S,
            **of_the_farm,
        ) as (env, voice):  # fmt: skip
            first, _ = await env.collect_trajectories({"id": "x"})
            await service.start()
            second, _ = await env.collect_trajectories({"id": "x"})
            assert first is not None
            assert second is not None
            assert [check_sampled(voice, group) for group in (first, second)] == [3, 3]
    finally:
        await service.end()
    found = [one for group in records(tmp_path) for one in group.trajectories]
    assert [(one.score, one.attempt) for one in found] == [(1.0, 1)] * 2, found


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])
