"""Whole groups on fake slots: AgentEnv, pool, executor, wire, scripted model."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from agentenv.agent.transcript import GroupRecord
from agentenv.testing import Call, Reply
from tests.unit.env.env_stubs import IDLE, SOLVE, WRITE, AnswerEnv, environment


def records(directory: Path) -> list[GroupRecord]:
    return [GroupRecord.model_validate_json(line) for line in (directory / "rollouts.jsonl").read_text().splitlines()]


async def test_a_group_is_scored_member_by_member(tmp_path: Path) -> None:
    async with environment(AnswerEnv, tmp_path, {"item-0": [SOLVE, IDLE]}, include_messages=True) as env:
        group, again = await env.collect_trajectories(await env.get_next_item())
        env.config.include_messages = False
        without, _ = await env.collect_trajectories({"id": "item-0"})
    assert again == []
    assert group is not None
    assert without is not None
    assert "messages" not in without
    assert group["scores"] == [1.0, 0.0, 1.0, 0.0]
    assert group["group_overrides"]["group_size"] == 4
    for tokens, masks in zip(group["tokens"], group["masks"], strict=True):
        assert len(tokens) == len(masks) > 50
        assert set(masks) == {-100}
    assert all(override["trainable"] is False for override in group["overrides"])
    assert "inference_logprobs" not in group
    assert "write 42" in env.tokenizer.decode(group["tokens"][0])
    assert [message["role"] for message in group["messages"][0]] == ["system", "user", "assistant", "tool", "assistant"]
    json.dumps(group)
    record, _ = records(tmp_path)
    assert (record.outcome, record.item_id, record.item) == ("complete", "item-0", {"id": "item-0"})
    assert [transcript.score for transcript in record.trajectories] == [1.0, 0.0, 1.0, 0.0]
    first = record.trajectories[0]
    assert {phase.name for phase in first.phases} == {"slot_wait", "prepare", "model", "tool", "verify", "release"}
    assert first.totals["run_s"] > 0
    assert first.steps[0].usage is not None
    assert "exit code: 0" in first.steps[0].tool_calls[0].shown


async def test_more_trajectories_than_slots_all_finish_whatever_the_acquire_timeout(tmp_path: Path) -> None:
    slow = [Reply("", (Call("bash", {"command": "sleep 2.5; echo 42 > answer"}),)), Reply("done")]
    changed = {"max_containers": 1, "slots_per_container": 2, "group_size": 10, "acquire_timeout_s": 10}
    async with environment(AnswerEnv, tmp_path, {"*": [slow]}, **changed) as env:
        group, _ = await env.collect_trajectories({"id": "x"})
    assert group is not None
    assert group["scores"] == [1.0] * 10
    assert env.counts["infra_retries"] == 0


async def test_hooks_may_be_plain_or_async_and_see_what_they_are_promised(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Hooked(AnswerEnv):
        async def setup_agent_env(self) -> None:
            seen.append("setup")

        async def build_task(self, item: Any) -> str:
            return "[task:x] read given.txt"

        async def setup_trajectory_workspace(self, item: Any, *, trajectory_id: str, exec_tool: Any) -> dict[str, Any]:
            await exec_tool.write_file("in/given.txt", "hello")
            assert exec_tool.trajectory_id == trajectory_id
            return {"wrote": "in/given.txt"}

        async def verify_and_score_trajectory(  # type: ignore[override]
            self, item: Any, final_response: str, *, agent_result: Any, workspace_meta: Any, exec_tool: Any, **_: Any
        ) -> tuple[float, dict[str, Any]]:
            seen.append((workspace_meta, final_response, len(agent_result.steps)))
            return 0.5, {"text": await exec_tool.read_file("in/given.txt")}

    script = {"x": [[Reply("", (Call("read_file", {"path": "in/given.txt"}),)), Reply("it says hello")]]}
    async with environment(Hooked, tmp_path, script, group_size=1) as env:
        await env.collect_trajectories({"id": "x"})
    assert seen == ["setup", ({"wrote": "in/given.txt"}, "it says hello", 2)]
    (record,) = records(tmp_path)
    assert record.trajectories[0].verification == {"text": "hello"}
    assert record.trajectories[0].steps[0].tool_calls[0].shown == "hello"


async def test_score_trajectory_alone_is_enough(tmp_path: Path) -> None:
    class Simple(AnswerEnv):
        verify_and_score_trajectory = AnswerEnv.__mro__[1].verify_and_score_trajectory

        async def score_trajectory(self, item: Any, final_response: str) -> float:
            return 0.25 if final_response == "I give up" else 1.0

    async with environment(Simple, tmp_path, {"*": [IDLE, SOLVE]}) as env:
        group, _ = await env.collect_trajectories({"id": "x"})
    assert group is not None
    assert group["scores"] == [0.25, 1.0, 0.25, 1.0]


async def test_model_mistakes_are_answered_and_counted_not_fatal(tmp_path: Path) -> None:
    clumsy = [
        Reply("", (Call("bash", "{not json"), Call("nothing", {}), Call("bash", {"cmd": "ls"}))),
        Reply("", (Call("read_file", {"path": "/etc/passwd"}),)),
        *WRITE,
    ]
    async with environment(AnswerEnv, tmp_path, {"*": [clumsy]}, group_size=1) as env:
        group, _ = await env.collect_trajectories({"id": "x"})
    assert group is not None
    assert group["scores"] == [1.0]
    (record,) = records(tmp_path)
    calls = [call for step in record.trajectories[0].steps for call in step.tool_calls]
    assert [call.result.fault for call in calls if call.result] == ["model", "model", "model", "policy", "none"]


async def test_run_agent_works_outside_groups(tmp_path: Path) -> None:
    async with environment(AnswerEnv, tmp_path) as env:
        result = await env.run_agent("[task:x] do it")
    assert (result.final_response, result.finish_reason) == ("done", "stop")


class Judged(AnswerEnv):
    """Has another agent judge, while the rollout keeps its slot."""

    async def verify_and_score_trajectory(self, item: Any, final_response: str, **_: Any) -> Any:
        judged = await self.run_agent(f"[task:judge] was {final_response!r} right?")
        return float(judged.final_response == "yes"), {}


JUDGE = [Reply("", (Call("bash", {"command": "true"}),)), Reply("yes")]


@pytest.mark.parametrize("kept", [1, 2])
async def test_verifiers_ask_agents_in_a_farm_with_a_slot_for_each_rollout(tmp_path: Path, kept: int) -> None:
    script, farm = {"judge": [JUDGE], "*": [SOLVE]}, {"max_containers": 1, "slots_per_container": 3}
    async with environment(Judged, tmp_path, script, hook_slots=kept, group_size=6, **farm) as env:
        async with asyncio.timeout(60):
            group, _ = await env.collect_trajectories({"id": "x"})
    assert group is not None
    assert group["scores"] == [1.0] * 6
    assert env.counts["infra_retries"] == 0


async def test_without_slots_for_them_they_are_refused_and_nothing_waits_for_ever(tmp_path: Path) -> None:
    script, farm = {"judge": [JUDGE], "*": [SOLVE]}, {"max_containers": 1, "slots_per_container": 2}
    async with environment(Judged, tmp_path, script, group_size=2, **farm) as env:
        async with asyncio.timeout(60):
            group, _ = await env.collect_trajectories({"id": "x"})
    assert group is None
    (record,) = records(tmp_path)
    for member in record.trajectories:
        assert (member.score, member.fault, member.attempt) == (None, "task", 1)
        assert "hook_slots: is 0" in member.error
        assert "set it to the number of such agents that may run at once" in member.error


async def test_an_evaluation_while_serving_is_not_in_the_results_of_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with environment(AnswerEnv, tmp_path, {"*": [SOLVE]}, eval_items=2) as env:
        with env.progress.shown("serve", "groups", None):
            assert (await env.evaluate())["scored"] == 2
        assert env.progress.results.rollouts == 0
    assert "evaluation at step 0: {'items': 2.0, 'scored': 2.0" in capsys.readouterr().err


async def test_evaluate_means_over_items(tmp_path: Path) -> None:
    script = {"item-0": [SOLVE], "item-1": [IDLE], "*": [SOLVE]}
    changed = {"eval_items": 4, "data_dir_to_save_evals": str(tmp_path / "evals")}
    async with environment(AnswerEnv, tmp_path, script, **changed) as env:
        metrics = await env.evaluate()
    assert metrics == {"items": 4.0, "scored": 4.0, "mean_score": 0.75, "sd_score": 0.5, "stderr_score": 0.25}
    saved = json.loads((tmp_path / "evals" / "metrics.json").read_text())
    assert saved["results"]["all"]["mean_score"] == 0.75
    assert len((tmp_path / "evals" / "samples.jsonl").read_text().splitlines()) == 4


@pytest.mark.parametrize("enabled", [["files"], ["bash"]])
async def test_enabled_toolsets_are_what_the_model_gets_and_verifiers_still_have_all(
    tmp_path: Path, enabled: list[str]
) -> None:
    async with environment(AnswerEnv, tmp_path, group_size=1, enabled_toolsets=enabled) as env:
        group, _ = await env.collect_trajectories({"id": "x"})
    assert group is not None
    assert group["scores"] == [1.0 if enabled == ["bash"] else 0.0]
