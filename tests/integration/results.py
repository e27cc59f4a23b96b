"""What examples of task sets print and record."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Mapping
from pathlib import Path

from agentenv.agent.transcript import GroupRecord
from agentenv.report import read_records
from agentenv.testing import ScriptedPolicy, build_tokenizer
from tests.programs import program
from tests.waiting import START_S

ROOT = Path(__file__).resolve().parents[2]


def rows(table: str) -> list[str]:
    """The rows below a check's heading, with one blank between columns and S for the seconds."""
    return [re.sub(r" \d+\.\d( |$)", r" S\1", " ".join(line.split())) for line in table.splitlines()[1:]]


async def processed(
    directory: Path, policy: ScriptedPolicy, module: str, settings: Mapping[str, str]
) -> list[GroupRecord]:
    """One group of two by an environment's own command, as for a model."""
    rollouts = directory / "rollouts.jsonl"
    options = {
        "openai.base_url": policy.base_url,
        "openai.api_key": "unused",
        "openai.model_name": "scripted",
        "env.tokenizer_name": str(build_tokenizer(directory / "tokenizer")),
        "env.total_steps": "1",
        "env.group_size": "2",
        "env.use_wandb": "false",
        "env.rollouts_path": str(rollouts),
        "env.runs_dir": str(directory / "runs"),
        "env.data_path_to_save_groups": str(directory / "groups.jsonl"),
        "env.slots_per_container": "2",
        "env.max_containers": "1",
        "env.send_trajectory_id": "true",
        **{f"env.{name}": value for name, value in settings.items()},
    }
    argv = [part for name, value in options.items() for part in (f"--{name}", value)]
    log = directory / "log.txt"
    async with (
        program("-m", module, "process", *argv, cwd=ROOT, env=dict(os.environ), stdout=log) as process,
        asyncio.timeout(3 * START_S),
    ):
        status = await process.wait()
    assert status == 0, log.read_text(errors="replace")
    return list(read_records(rollouts))
