"""Faults while an agent program waits for a turn: each is the infrastructure's, which is played again, or the policy's,
which is verified as it is."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentenv.agent.transcript import Transcript
from agentenv.slots.backends.fake import FakeBackend
from agentenv.slots.backends.local import LocalBackend
from agentenv.testing import Reply
from tests.faults.test_slot_destroyed import destroy
from tests.integration.test_agent_programs import SOLVE, WRITE, ProgramEnv, check_sampled, playing
from tests.integration.test_env_managed import records
from tests.integration.test_server_container import _command_line, _descendants
from tests.unit.env.managed_stubs import managed
from tests.waiting import START_S

LOCAL: dict[str, Any] = {
    "tool_pool_mode": "local",
    "max_containers": 1,
    "slots_per_container": 2,
    "acquire_timeout_s": START_S,
    "verification": "sealed",
}
FAKE: dict[str, Any] = {"tool_pool_mode": "fake"}


def kill_containers(env: Any) -> None:
    backend = env.backend
    if isinstance(backend, LocalBackend):
        for pid in backend.pids.values():
            os.kill(pid, signal.SIGKILL)
    else:
        assert isinstance(backend, FakeBackend)
        for handle in backend.containers:
            backend.kill(handle.id)


def kill_server(env: Any) -> None:
    (pid,) = env.backend.pids.values()
    (server,) = (one for one in _descendants(pid) if "agentenv.sandbox.serve" in _command_line(one))
    os.kill(server, signal.SIGKILL)


async def met(
    tmp_path: Path, kind: type[ProgramEnv], fault: Callable[[Any], None], **changed: Any
) -> tuple[Transcript, dict[str, Any] | None]:
    """A group of one whose second turn meets a fault, once."""
    once: list[Any] = []

    def player(turn: Any) -> Reply:
        if turn.step == 1 and once:
            fault(once.pop())
        return SOLVE[turn.step] if turn.step < len(SOLVE) else Reply("")

    async with managed(kind, tmp_path, {"*": [player]}, group_size=1, **changed) as (env, voice):
        once.append(env)
        group, _ = await env.collect_trajectories({"id": "x"})
        if group is not None:
            assert check_sampled(voice, group) >= 1
    return records(tmp_path)[-1].trajectories[0], group


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTENV_STATE_DIR", str(tmp_path / "state"))


@pytest.mark.parametrize("slots", [FAKE, LOCAL], ids=["fake", "local"])
async def test_a_container_that_dies_during_a_turn_is_played_again(tmp_path: Path, slots: dict[str, Any]) -> None:
    one, group = await met(tmp_path, playing("plain"), kill_containers, **slots)
    assert group is not None
    assert (one.score, one.attempt, one.fault) == (1.0, 2, "none"), one
    assert one.earlier_attempts[0].startswith(("ContainerLostError", "LeaseLostError", "ConnectionLostError")), one


async def test_a_sandbox_server_that_dies_during_a_turn_is_played_again(tmp_path: Path) -> None:
    one, group = await met(tmp_path, playing("plain"), kill_server, **LOCAL)
    assert group is not None
    assert (one.score, one.attempt, one.fault) == (1.0, 2, "none"), one


async def test_a_slot_that_its_policy_destroys_is_not_played_again(tmp_path: Path) -> None:
    def destroyed(env: Any) -> None:
        trajectory = env.current
        env.destroying = asyncio.create_task(destroy(env, trajectory))

    class Named(playing("plain")):  # type: ignore[misc]
        def setup_trajectory_workspace(self, item: Any, *, trajectory_id: str) -> None:
            self.current = trajectory_id

    one, group = await met(tmp_path, Named, destroyed, **FAKE)
    assert group is not None
    assert (one.score, one.attempt, one.fault, one.finish_reason) == (0.0, 1, "policy", "slot_destroyed")


async def test_a_policy_that_kills_what_leads_to_its_model_is_verified(tmp_path: Path) -> None:
    async with managed(playing("deafening"), tmp_path, {"*": [[WRITE]]}, group_size=1, **LOCAL) as (env, _):
        group, _again = await env.collect_trajectories({"id": "x"})
    assert group is not None
    (one,) = records(tmp_path)[-1].trajectories
    assert (one.score, one.attempt, one.fault, one.finish_reason) == (1.0, 1, "none", "program_failed")


async def test_everything_that_programs_do_holds_on_real_slots(tmp_path: Path) -> None:
    for behaviour, turns in (("plain", 3), ("rewriting", 3), ("forking", 7), ("twins", 6)):
        changed = {**LOCAL, "agent_max_steps": 20}
        async with managed(playing(behaviour), tmp_path / behaviour, {"*": [SOLVE]}, group_size=2, **changed) as made:
            env, voice = made
            group, _ = await env.collect_trajectories({"id": "x"})
            assert group is not None, records(tmp_path / behaviour)[0].trajectories[0].error
            assert group["scores"][0] == 1.0
            assert check_sampled(voice, group) == 2 * turns
