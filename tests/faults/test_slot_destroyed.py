"""A policy that destroys its own slot has used its attempt up: end to end, through the wire, on the fake backend."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agentenv.agent.transcript import GroupRecord, Transcript
from agentenv.containers.control import ContainerControl
from agentenv.errors import SlotDestroyedError
from agentenv.testing import Call, Reply
from tests.unit.env.env_stubs import SOLVE, WRITE, AnswerEnv, environment
from tests.unit.env.managed_stubs import managed
from tests.waiting import DEADLINE_S

LONG_S = 5 * DEADLINE_S
"""A call lasts longer than its slot may take to be destroyed."""
SLEEP = Reply("", (Call("bash", {"command": f"sleep {LONG_S}"}),))


def records(directory: Path) -> list[Transcript]:
    lines = (directory / "rollouts.jsonl").read_text().splitlines()
    return [member for line in lines for member in GroupRecord.model_validate_json(line).trajectories]


class Breaking(AnswerEnv):
    """Its players end their slots while their own command runs, by what ``breaks`` says of the trajectory."""

    def breaks(self, trajectory: str) -> bool:
        return trajectory.endswith("-0")

    def setup_trajectory_workspace(self, item: Any, *, trajectory_id: str, exec_tool: Any) -> Any:
        if self.breaks(trajectory_id):
            self.breaking = asyncio.create_task(self._break(trajectory_id))

    async def _break(self, trajectory: str) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not await destroy(self, trajectory, least_running=1):  # what ran nothing has destroyed nothing
                await asyncio.sleep(0.01)


async def destroy(env: AnswerEnv, trajectory: str, *, least_running: int = 0) -> bool:
    """The commands of this trajectory, when there are so many, destroy its own slot."""
    for container in env.backend.containers:
        async with ContainerControl(container) as control:
            for report in (await control.slots()).slots:
                if report.trajectory == trajectory and report.running_calls >= least_running:
                    await env.backend.destroy_slot(container.id, report.slot)
                    return True
    return False


async def test_a_policy_that_destroys_its_slot_is_not_asked_again(tmp_path: Path) -> None:
    asked = []

    def guesses(turn: Any) -> Reply:
        asked.append(turn)
        return SLEEP if len(asked) < 3 else Reply("3")

    class Guess(Breaking):
        async def verify_and_score_trajectory(self, item: Any, final_response: str, **_: Any) -> Any:
            return float(final_response == "3"), {}

    async with environment(Guess, tmp_path, {"*": [guesses]}, group_size=1, tool_timeout_s=LONG_S) as env:
        group, again = await env.collect_trajectories({"id": "x"})
        assert (len(asked), again) == (1, [])
        assert group is not None
        assert group["scores"] == [0.0]
        assert env.counts["fault_policy"] == 1
        assert env.counts["infra_retries"] == 0
        metrics = env.rollout_metrics.drain()
        assert metrics["finish_slot_destroyed_rate"] == metrics["rollout_fault_policy_rate"] == 1.0
    (transcript,) = records(tmp_path)
    assert (transcript.attempt, transcript.fault, transcript.finish_reason) == (1, "policy", "slot_destroyed")
    assert transcript.error.startswith("SlotDestroyedError: ")
    assert transcript.steps[0].tool_calls[0].result is not None


async def test_its_siblings_go_on(tmp_path: Path) -> None:
    async with environment(Breaking, tmp_path, {"*": [[SLEEP], SOLVE]}, group_size=2, tool_timeout_s=LONG_S) as env:
        group, _ = await env.collect_trajectories({"id": "x"})
    assert group is not None
    assert group["scores"] == [0.0, 1.0]


async def test_its_tokens_are_trained_on(tmp_path: Path) -> None:
    async with managed(Breaking, tmp_path, {"*": [[SLEEP]]}, group_size=1, tool_timeout_s=LONG_S) as (env, _):
        group, _again = await env.collect_trajectories({"id": "x"})
    assert group is not None
    assert (group["scores"], len(group["tokens"])) == ([0.0], 1)
    assert any(mask != -100 for mask in group["masks"][0])


@pytest.mark.parametrize("verification", ["live", "sealed"])
async def test_a_slot_destroyed_under_its_verifier(tmp_path: Path, verification: str) -> None:
    class Late(AnswerEnv):
        """As what a policy left would; and its verifier takes no notice."""

        async def verify_and_score_trajectory(self, item: Any, final_response: str, **more: Any) -> Any:
            assert await destroy(self, more["trajectory_id"])
            with pytest.raises(SlotDestroyedError):
                await more["exec_tool"].terminal("cat answer")
            with pytest.raises(SlotDestroyedError):
                await more["exec_tool"].upload(tmp_path / "rollouts.jsonl", "x")
            return 1.0, {}

    async with environment(Late, tmp_path, {"*": [WRITE]}, group_size=1, verification=verification) as env:
        (tmp_path / "rollouts.jsonl").touch()
        group, _ = await env.collect_trajectories({"id": "x"})
    assert group is not None
    assert group["scores"] == [0.0]
