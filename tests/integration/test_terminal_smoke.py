"""examples/terminal_smoke as a process, with a policy that uses the terminal and one that does not."""

from __future__ import annotations

import asyncio
import json
import os
import re
from pathlib import Path

import pytest

from agentenv.testing import Call, Reply, ScriptedPolicy, Turn, build_tokenizer
from tests.programs import program
from tests.waiting import START_S

ISOLATION = "full" if os.geteuid() == 0 else "user"
ROOT = Path(__file__).resolve().parents[2]
COMMANDS = (". project/settings.sh", "answer")


def _play(turn: Turn, tool: str) -> Reply:
    if turn.step < len(COMMANDS):
        return Reply(calls=(Call(tool, {"command": COMMANDS[turn.step]}),))
    found = re.search(r"^(\d+)$", turn.last_output, re.MULTILINE)
    return Reply(found[1] if found else "none")


def stateful(turn: Turn) -> Reply:
    return _play(turn, "terminal")


def forgetful(turn: Turn) -> Reply:
    """A fresh shell for each command knows nothing of the one before."""
    return _play(turn, "bash")


@pytest.mark.parametrize("mode", ["fake", "local"])
async def test_only_a_shell_that_stays_finds_the_answer(mode: str, tmp_path: Path) -> None:
    tokenizer = build_tokenizer(tmp_path / "tokenizer")
    rollouts = tmp_path / "rollouts.jsonl"
    async with ScriptedPolicy({"*": [stateful, forgetful]}) as policy:
        options = {
            "openai.base_url": policy.base_url,
            "openai.api_key": "unused",
            "openai.model_name": "scripted",
            "env.tokenizer_name": str(tokenizer),
            "env.total_steps": "1",
            "env.group_size": "2",
            "env.use_wandb": "false",
            "env.data_path_to_save_groups": str(tmp_path / "groups.jsonl"),
            "env.rollouts_path": str(rollouts),
            "env.runs_dir": str(tmp_path / "runs"),
            "env.tool_pool_mode": mode,
            "env.isolation": ISOLATION,
            "env.slots_per_container": "2",
            "env.max_containers": "1",
            "env.send_trajectory_id": "true",
        }
        argv = [part for name, value in options.items() for part in (f"--{name}", value)]
        log, env = tmp_path / "log.txt", {**os.environ, "AGENTENV_STATE_DIR": str(tmp_path / "state")}
        command = ("-m", "examples.terminal_smoke.env", "process", *argv)
        async with (
            program(*command, cwd=ROOT, env=env, stdout=log) as process,
            asyncio.timeout(START_S),
        ):
            status = await process.wait()
    assert status == 0, log.read_text(errors="replace")
    (group,) = [json.loads(line) for line in rollouts.read_text().splitlines()]
    scores = [member["score"] for member in group["trajectories"]]
    assert scores == [1.0, 0.0], group["trajectories"][0]["messages"][3:]
