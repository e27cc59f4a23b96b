"""What trackers get: metrics and readable rollouts, offline and disabled, in real wandb runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from agentenv.agent.result import AgentResult
from agentenv.agent.rollout_metrics import ROLLOUT_COLUMNS
from agentenv.env.hermes import BlockingToolContext, HermesAgentBaseEnv, HermesAgentEnvConfig
from agentenv.testing import Call, Reply, ScriptedPolicy
from tests.integration.test_env_commands import flags, run
from tests.unit.env.env_stubs import IDLE, SOLVE, AnswerEnv, environment, server_of, settings

CLUMSY = [Reply("", (Call("nothing", {}), Call("bash", {"command": "exit 3"}))), *SOLVE]  # type: ignore[misc]


@pytest.mark.parametrize("mode", ["offline", "disabled"])
async def test_process_reports_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    monkeypatch.setenv("WANDB_MODE", mode)
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    async with ScriptedPolicy({"*": [CLUMSY, IDLE]}) as policy:
        changed = {"env__use_wandb": True, "env__total_steps": 2, "env__data_path_to_save_groups": tmp_path / "g.jsonl"}
        status, log = await run(
            tmp_path, "process", *flags(tmp_path, policy, **changed), own_interpreter=mode == "offline"
        )
    assert status == 0, log
    written = b"".join(path.read_bytes() for path in tmp_path.glob("wandb/offline-run-*/*.wandb"))
    tables = [path.read_text() for path in tmp_path.glob("wandb/offline-run-*/files/media/table/train/*.json")]
    if mode == "disabled":
        assert (written, tables) == (b"", [])
        return
    names = {found.decode() for found in re.findall(rb"agentenv/[a-z_0-9]+", written)}
    assert {
        "agentenv/group_completeness", "agentenv/tool_error_rate", "agentenv/call_fault_model_rate",
        "agentenv/tool_latency_s_p95", "agentenv/slot_wait_s_mean", "agentenv/turn_truncated_rate",
        "agentenv/groups_complete",
    } <= names  # fmt: skip
    assert {b"train/rollouts", b"train/tool_errors_count"} <= set(re.findall(rb"train/[a-z_]+", written))
    assert any('"conversation"' in table and "exit code: 3" in table for table in tables)


async def test_metrics_are_of_the_groups_since_the_last_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[dict[str, Any]] = []
    monkeypatch.setattr("wandb.log", lambda metrics, step: logged.append(metrics))
    async with environment(AnswerEnv, tmp_path, {"*": [CLUMSY, IDLE]}, group_size=2, use_wandb=True) as env:
        for _ in range(2):
            group, _again = await env.collect_trajectories({"id": "x"})
            assert group is not None
            await env.add_rollouts_for_wandb(group)
            await env.wandb_log({"mine": 1})
        await env.wandb_log()
    first, second, third = logged
    assert first["mine"] == 1
    assert (first["agentenv/tool_calls"], second["agentenv/tool_calls"]) == (3, 3)
    assert first["agentenv/tool_error_rate"] == pytest.approx(2 / 3)
    assert first["agentenv/call_fault_model_rate"] == pytest.approx(1 / 3)
    assert (first["train/rollouts"].columns, len(first["train/rollouts"].data)) == ([*ROLLOUT_COLUMNS], 1)
    assert first["train/tool_errors_count"] == 2
    unknown, failed = first["train/tool_error_details"].splitlines()
    assert unknown.startswith("[turn 1] nothing({}) -> model fault: ")
    assert failed == '[turn 1] bash({"command": "exit 3"}) -> exit code 3'
    assert second["agentenv/groups_complete"] == 2, "counts go on"
    assert "agentenv/tool_calls" not in third
    assert "train/rollouts" not in third
    assert third["train/tool_errors_count"] == 0
    assert "train/tool_error_details" not in third


class Formatting(HermesAgentBaseEnv):
    """As written for hermes-agent, with a table of rollouts of its own format, which fails at the second."""

    fails_at = 2

    async def setup(self) -> None:
        self.shown = 0

    async def get_next_item(self) -> Any:
        return {"id": "x"}

    def format_prompt(self, item: Any) -> str:
        return "do it"

    async def compute_reward(self, item: Any, result: AgentResult, ctx: BlockingToolContext) -> float:
        return 1.0

    def _format_trajectory_for_display(self, messages: list[dict[str, Any]]) -> str:  # type: ignore[override]
        self.shown += 1
        if self.shown == self.fails_at:
            raise KeyError("content")
        calls = [call["function"]["name"] for message in messages for call in message.get("tool_calls", [])]
        return f"{[message['role'] for message in messages]} called {calls}"


class Keeping(Formatting):
    fails_at = 0

    async def add_rollouts_for_wandb(self, scored_data: Any, item: Any = None) -> None:
        for messages, score in zip(scored_data["messages"], scored_data["scores"], strict=True):
            self.rollouts_for_wandb.append([(self._format_trajectory_for_display(messages), score)])


@pytest.mark.parametrize("kind", [Formatting, Keeping])
async def test_a_format_of_the_environments_own_is_in_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: type[Formatting]
) -> None:
    logged: list[dict[str, Any]] = []
    monkeypatch.setattr("wandb.log", lambda metrics, step: logged.append(metrics))
    config = HermesAgentEnvConfig(
        **settings(tmp_path, group_size=1, include_messages=True, use_wandb=True).model_dump(exclude_unset=True)
    )
    async with ScriptedPolicy({"*": [SOLVE]}) as policy, kind(config, server_of(policy)) as env:
        for _ in range(2):
            group, _again = await env.collect_trajectories({"id": "x"})
            if kind is Formatting or not logged:
                await env.add_rollouts_for_wandb(group)
            await env.wandb_log()
    text = "['user', 'assistant', 'tool', 'assistant'] called ['bash']"
    tables = [metrics["train/rollouts"] for metrics in logged]
    if kind is Formatting:
        assert tables[0].data[0][-1] == text
        assert tables[1].data[0][-1].startswith("## user\ndo it"), "ours, as its own raised"
        assert "own format of conversations failed" in caplog.text
    else:
        assert (tables[0].columns, tables[0].data) == (["text", "score"], [[text, 1.0]])
        assert tables[1].columns == [*ROLLOUT_COLUMNS]
