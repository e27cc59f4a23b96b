"""Environments of other harnesses run here with other imports, and score as they did there."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from agentenv.testing import ScriptedPolicy, build_tokenizer
from tests.porting.ports import honest_file, play_smoke, play_swe, play_terminal_test, scores
from tests.programs import program

ROOT = Path(__file__).resolve().parents[2]
LOCAL: dict[str, Any] = {"tool_pool_mode": "local", "isolation": "full" if os.geteuid() == 0 else "user"}


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTENV_STATE_DIR", str(tmp_path / "state"))


async def test_a_base_class_with_blocking_tools(tmp_path: Path) -> None:
    record = await play_terminal_test(tmp_path, LOCAL)
    assert scores(record) == [1.0, 0.5, 0.0]
    assert record.trajectories[0].messages[0]["content"].startswith("You have a terminal and file tools.")


async def test_results_read_from_the_steps(tmp_path: Path) -> None:
    record = await play_smoke(tmp_path, LOCAL)
    assert scores(record) == [1.0, 0.0]
    assert record.trajectories[0].verification["tool_calls"] == 3


async def test_hooks_that_call_tools_as_values(tmp_path: Path) -> None:
    record = await play_swe(tmp_path, LOCAL)
    assert scores(record) == [1.0, 0.0, 0.0]
    assert record.trajectories[0].verification["passed"] is True
    assert record.trajectories[1].verification["phase"] == "pytest"


async def test_their_settings_file_on_the_command_line(tmp_path: Path) -> None:
    rollouts, log = tmp_path / "rollouts.jsonl", tmp_path / "log.txt"
    async with ScriptedPolicy({"*": [honest_file]}) as policy:
        options = {
            "config": "tests/porting/terminal_test_env.yaml",
            "env.tokenizer_name": str(build_tokenizer(tmp_path / "tokenizer")),
            "env.isolation": str(LOCAL["isolation"]),
            "env.rollouts_path": str(rollouts),
            "env.runs_dir": str(tmp_path / "runs"),
            "env.data_path_to_save_groups": str(tmp_path / "groups.jsonl"),
            "openai.base_url": policy.base_url,
        }
        argv = [part for name, value in options.items() for part in (f"--{name}", value)]
        command = ("-m", "tests.porting.terminal_test_env", "process", *argv)
        async with program(*command, cwd=ROOT, env=dict(os.environ), stdout=log) as process:
            status = await process.wait()
    said = log.read_text(errors="replace")
    assert status == 0, said
    assert said.count("slots have no network here (allow_network)") == 1
    members = [member for line in rollouts.read_text().splitlines() for member in json.loads(line)["trajectories"]]
    assert [member["score"] for member in members] == [1.0] * 6
