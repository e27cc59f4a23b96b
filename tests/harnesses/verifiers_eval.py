"""`eval` of verifiers on slots of this machine, by examples/harnesses/verifiers_slots.py: programs of rollouts have no
network, and their calls of the model end at interception by verifiers."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

from agentenv.testing import Reply, ScriptedPolicy, Turn
from tests.harnesses import program
from tests.harnesses.lost_container import kill_container_of

RECIPE = Path(__file__).parents[2] / "examples/harnesses/verifiers_slots.py"
REPAIR = "sed -i s/-/+/ /app/sum; sh /app/sum"


async def evaluate(out: Path, policy: ScriptedPolicy, *options: str) -> list[dict[str, Any]]:
    """The traces of a run over the taskset in verifiers_task.py."""
    words = [str(RECIPE), "verifiers-task", "-o", str(out), "--run.dir", "run", "--no-push", "--no-rich"]
    words += ["--model", "scripted", "--client.base-url", policy.base_url]
    words += ["--env.agent.runtime.type", "agentenv", "--env.agent.runtime.image", "debian:bookworm-slim", *options]
    code, printed = await program.run(*words, env={"PYTHONPATH": f"{os.environ['PYTHONPATH']}:{Path(__file__).parent}"})
    assert code == 0, printed
    episodes = (out / "run/traces.jsonl").read_text().splitlines()
    return [trace for line in episodes for trace in json.loads(line)["traces"]]


async def test_rollouts_are_played_and_a_lost_one_is_not_scored(tmp_path: Path) -> None:
    losses: list[asyncio.Future[None]] = []

    def loses(turn: Turn) -> Reply:
        losses.append(asyncio.ensure_future(asyncio.to_thread(kill_container_of, "sleep", "300.875")))
        return Reply("sleep 300.875")

    async with ScriptedPolicy({"repaired": [[Reply(REPAIR), Reply("done")]], "lost": [loses]}) as policy:
        played = await evaluate(tmp_path, policy, "-n", "1", "-r", "3", "--env.agent.runtime.slots", "3")
        assert [(one["ok"], one["rewards"]["repaired"]["score"], one["errors"]) for one in played] == [
            (True, 1, [])
        ] * 3
        for one in played:
            said = [node["message"]["content"] for node in one["nodes"]]
            assert said == ["[task:repaired] repair /app/sum", REPAIR, "42", "done"]
        both = await evaluate(tmp_path / "again", policy, "--env.agent.runtime.slots", "1")
        await losses[0]
    assert sorted(one["ok"] for one in both) == [False, True]
    (lost,) = (one for one in both if not one["ok"])
    assert (lost["nodes"][0]["message"]["content"], lost["rewards"]) == ("[task:lost] repair /app/sum", {})
    assert [error["type"] for error in lost["errors"]] == ["SandboxError"], lost["errors"]
