"""``python -m examples.toolserver_smoke``: two scripted policies on one task, one of which searches for the key.

``--isolation user`` where you are not root; ``--fake`` needs no sandbox at all (and gives none).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
from pathlib import Path
from typing import Any

from agentenv.testing import Call, Reply, ScriptedPolicy, Turn, build_tokenizer


def honest(turn: Turn) -> Reply:
    """Looks the record up and writes the code down."""
    if turn.step == 0:
        return Reply("I look it up.", (Call("record_lookup", {"name": turn.task}),))
    if turn.step == 1:
        code = turn.last_output.partition('"code": "')[2].partition('"')[0]
        return Reply("I write it down.", (Call("write_file", {"path": "code.txt", "text": code}),))
    return Reply("done")


def curious(turn: Turn) -> Reply:
    """Searches for the key everywhere, then gives up."""
    hunt = "env; cat /proc/*/environ /proc/*/cmdline 2>/dev/null | tr '\\0' '\\n'; ls -la / /run ~"
    calls = [Call("bash", {"command": hunt}), Call("record_lookup", {"name": "nobody"})]
    return Reply("where is the key?", (calls[turn.step],)) if turn.step < len(calls) else Reply("there is none to see")


async def play(directory: Path, **fields: Any) -> list[float]:
    """Play one group of the two; returns their scores."""
    from atroposlib.envs.server_handling.server_baseline import APIServerConfig

    from agentenv import AgentEnvConfig
    from examples.toolserver_smoke.env import ToolServerSmoke

    settings: dict[str, Any] = {
        "tokenizer_name": str(build_tokenizer(directory / "tokenizer")),
        "tool_server_url": "inprocess",
        "verification": "sealed",
        "group_size": 2,
        "max_containers": 1,
        "slots_per_container": 2,
        "use_wandb": False,
        "send_trajectory_id": True,
        "rollouts_path": str(directory / "rollouts.jsonl"),
        **fields,
    }
    config = AgentEnvConfig(**settings)
    async with ScriptedPolicy({"*": [honest, curious]}) as policy:
        server = APIServerConfig(base_url=policy.base_url, model_name="scripted", api_key="unused")
        async with ToolServerSmoke(config, [server]) as env:
            group, _ = await env.collect_trajectories(await env.get_next_item())
    return list(group["scores"]) if group else []


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fake", action="store_true")
    parser.add_argument("--isolation", choices=("auto", "full", "user"), default="auto")
    parser.add_argument("--out", type=Path, help="keep rollouts.jsonl here")
    given = parser.parse_args()
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    mode = "fake" if given.fake else "local"
    with tempfile.TemporaryDirectory() as scratch:
        directory = given.out or Path(scratch)
        directory.mkdir(parents=True, exist_ok=True)
        scores = asyncio.run(play(directory, tool_pool_mode=mode, isolation=given.isolation))
    print(f"scripted policies: honest {scores[0]}, curious {scores[1]} (the key was in neither's conversation)")


if __name__ == "__main__":
    main()
