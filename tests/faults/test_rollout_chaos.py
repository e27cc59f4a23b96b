"""Containers die again and again under many groups at once: every score is what it would have been."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from agentenv.agent.transcript import GroupRecord
from agentenv.testing import Call, Reply
from tests.unit.env.env_stubs import IDLE, WRITE, AnswerEnv, environment

KILLS = 12
"""Enough to hit many rollouts; a machine too slow to finish one between two kills would never end otherwise."""
LONG = [*(Reply("", (Call("bash", {"command": f"echo {n}; sleep 0.03"}),)) for n in range(5)), *WRITE]
HALF = [Reply("", (Call("bash", {"command": "echo 41 > answer"}),)), Reply("done")]


async def test_scores_survive_dying_containers(tmp_path: Path) -> None:
    kills = 0

    async def kill_now_and_then(backend: Any) -> None:
        nonlocal kills
        while kills < KILLS:
            await asyncio.sleep(0.35)
            if containers := backend.containers:
                backend.kill(containers[kills % len(containers)].id)
                kills += 1

    changed = {"max_containers": 3, "slots_per_container": 4, "min_containers": 2, "infra_retries": 60}
    async with environment(AnswerEnv, tmp_path, {"*": [LONG, HALF, IDLE, WRITE]}, **changed) as env:
        killer = asyncio.create_task(kill_now_and_then(env.backend))
        try:
            groups = await asyncio.gather(*(env.collect_trajectories({"id": f"g{n}"}) for n in range(8)))
        finally:
            killer.cancel()
            await asyncio.gather(killer, return_exceptions=True)
    assert kills > 0
    assert env.counts["infra_retries"] > 0
    for group, again in groups:
        assert again == []
        assert group is not None
        assert group["scores"] == [1.0, 0.0, 0.0, 1.0]
    records = [GroupRecord.model_validate_json(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    assert {record.outcome for record in records} == {"complete"}
