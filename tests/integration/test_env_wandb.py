"""What trackers get: metrics and readable rollouts, offline and disabled, in real wandb runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from agentenv.agent.rollout_metrics import ROLLOUT_COLUMNS
from agentenv.testing import Call, Reply, ScriptedPolicy
from tests.integration.test_env_commands import flags, run
from tests.unit.env.env_stubs import IDLE, SOLVE, AnswerEnv, environment

CLUMSY = [Reply("", (Call("nothing", {}), Call("bash", {"command": "exit 3"}))), *SOLVE]  # type: ignore[misc]


@pytest.mark.parametrize("mode", ["offline", "disabled"])
async def test_process_reports_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    monkeypatch.setenv("WANDB_MODE", mode)
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    async with ScriptedPolicy({"*": [CLUMSY, IDLE]}) as policy:
        changed = {"env__use_wandb": True, "env__total_steps": 2, "env__data_path_to_save_groups": tmp_path / "g.jsonl"}
        status, log = await run(
            tmp_path, "process", *flags(tmp_path, policy, **changed), timeout_s=110, own_interpreter=mode == "offline"
        )
    assert status == 0, log
    written = b"".join(path.read_bytes() for path in tmp_path.glob("wandb/offline-run-*/*.wandb"))
    tables = [path.read_text() for path in tmp_path.glob("wandb/offline-run-*/files/media/table/agentenv/*.json")]
    if mode == "disabled":
        assert (written, tables) == (b"", [])
        return
    names = {found.decode() for found in re.findall(rb"agentenv/[a-z_0-9]+", written)}
    assert {
        "agentenv/group_completeness", "agentenv/tool_error_rate", "agentenv/call_fault_model_rate",
        "agentenv/tool_latency_s_p95", "agentenv/slot_wait_s_mean", "agentenv/turn_truncated_rate",
        "agentenv/rollout_table", "agentenv/groups_complete",
    } <= names  # fmt: skip
    assert b"train/rollouts" in written
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
    assert (first["agentenv/rollout_table"].columns, len(first["agentenv/rollout_table"].data)) == (
        [*ROLLOUT_COLUMNS],
        1,
    )
    assert first["train/rollouts"].columns == ["text", "score"]
    assert second["agentenv/groups_complete"] == 2, "counts go on"
    assert "agentenv/tool_calls" not in third
    assert "agentenv/rollout_table" not in third
