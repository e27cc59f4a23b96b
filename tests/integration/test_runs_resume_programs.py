"""A trainer that is killed while agent programs wait for it: their slots are free again, and the rest is played."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agentenv.config import ContainerSettings, PoolSettings
from agentenv.slots.backends.fake import FakeBackend
from agentenv.testing import Reply, ScriptedPolicy, Turn
from agentenv.wire.states import SlotState
from tests import programs
from tests.farm_service import served, token
from tests.integration.test_env_local import leftovers
from tests.integration.test_runs_resume import LOOK, agentenv, flags, is_killed, recorded, said, scored, the_run
from tests.waiting import START_S, until

ENVIRONMENT = Path(__file__).parent / "runs_program_env.py"
SLOTS = 3


Freed = Callable[[], bool]


@asynccontextmanager
async def on_a_farm(_: Path) -> AsyncIterator[tuple[dict[str, Any], Freed]]:
    """Settings of the environment, and whether all slots are free for others."""
    pool = PoolSettings(min_containers=1, max_containers=1)
    async with served(FakeBackend(ContainerSettings(slots_per_container=SLOTS)), pool) as farm:
        ledger = farm.farm.manager.ledger
        of_the_farm = {"env__tool_pool_mode": "farm", "env__farm_url": farm.url, "env__farm_token": token()}
        yield {**of_the_farm, "env__lease_ttl_s": 15}, lambda: ledger.slot_counts() == {SlotState.free: SLOTS}


@asynccontextmanager
async def on_this_machine(directory: Path) -> AsyncIterator[tuple[dict[str, Any], Freed]]:
    local = {"env__tool_pool_mode": "local", "env__max_containers": 1, "env__slots_per_container": SLOTS}
    yield local, lambda: leftovers(directory) == []


@pytest.mark.parametrize("slots", [on_a_farm, on_this_machine])
async def test_a_trainer_is_killed_in_the_middle_of_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slots: Any
) -> None:
    monkeypatch.setenv("AGENTENV_STATE_DIR", str(tmp_path / "state"))
    alive: list[Any] = []

    def player(turn: Turn) -> Reply:
        if alive and turn.step == 1 and len(recorded(tmp_path)) >= SLOTS:
            alive.pop().send_signal(signal.SIGKILL)  # it never sees this answer
        return Reply("looking", (LOOK,)) if turn.step == 0 else Reply("done" + "!" * turn.member)

    async with slots(tmp_path) as (settings, free), ScriptedPolicy({"*": [player] * SLOTS}) as policy:
        arguments = flags(policy, **settings, env__total_steps=3)
        async with programs.program(
            str(ENVIRONMENT), "process", *arguments, cwd=tmp_path, env=dict(os.environ), stdout=tmp_path / "out.txt"
        ) as process:
            alive.append(process)
            async with asyncio.timeout(START_S):
                assert await process.wait() == -signal.SIGKILL, said(tmp_path)
        kept, before = recorded(tmp_path), scored(tmp_path)
        await is_killed(tmp_path)
        assert SLOTS <= len(kept) < 9
        await until(free, START_S)
        secrets = ["--env.farm_token", token()] if "env__farm_token" in settings else []
        status, out = await agentenv(tmp_path, "runs", "resume", "last", "--openai.api_key", "k", *secrets)
    assert status == 0, out
    assert "scored   9 of 9 rollouts" in out
    assert not kept & set(scored(tmp_path)[len(before) :]), "what was written down is not played again"
    assert the_run(tmp_path).state == "finished"
