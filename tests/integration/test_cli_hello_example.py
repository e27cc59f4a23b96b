"""The environment of the README: it is the file shown there, and it runs as the README says."""

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


def test_the_readme_shows_the_file_itself() -> None:
    (shown,) = re.findall(r"```python\n(import itertools.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    source = (ROOT / "examples/hello/env.py").read_text()
    assert shown == source.partition('"""\n\n')[2]


def counting(turn: Turn) -> Reply:
    """Members 0 and 1 count; the others guess."""
    if turn.member >= 2:
        return Reply("1")
    if turn.step == 0:
        return Reply(calls=(Call("bash", {"command": "wc -w < text.txt"}),))
    found = re.search(r"stdout:\n(\d+)", turn.last_output)
    return Reply(found[1] if found else "none")


@pytest.mark.parametrize("mode", ["fake", "local"])
async def test_it_runs_as_the_readme_says(mode: str, tmp_path: Path) -> None:
    tokenizer = build_tokenizer(tmp_path / "tokenizer")
    rollouts = tmp_path / "rollouts.jsonl"
    async with ScriptedPolicy({"*": [counting] * 4}) as policy:
        options = {
            "openai.base_url": policy.base_url,
            "openai.api_key": "unused",
            "openai.model_name": "scripted",
            "env.tokenizer_name": str(tokenizer),
            "env.total_steps": "2",
            "env.group_size": "4",
            "env.use_wandb": "false",
            "env.data_path_to_save_groups": str(tmp_path / "groups.jsonl"),
            "env.rollouts_path": str(rollouts),
            "env.runs_dir": str(tmp_path / "runs"),
            "env.tool_pool_mode": mode,
            "env.isolation": ISOLATION,
            "env.slots_per_container": "4",
            "env.max_containers": "1",
            "env.send_trajectory_id": "true",
        }
        argv = [part for name, value in options.items() for part in (f"--{name}", value)]
        log, env = tmp_path / "log.txt", {**os.environ, "AGENTENV_STATE_DIR": str(tmp_path / "state")}
        command = ("-m", "examples.hello.env", "process", *argv)
        async with (
            program(*command, cwd=ROOT, env=env, stdout=log, own_interpreter=mode == "local") as process,
            asyncio.timeout(START_S),
        ):
            status = await process.wait()
    assert status == 0, log.read_text(errors="replace")
    groups = [json.loads(line) for line in rollouts.read_text().splitlines()]
    assert len(groups) == 2
    for group in groups:
        assert sorted(member["score"] for member in group["trajectories"]) == [0.0, 0.0, 1.0, 1.0]
