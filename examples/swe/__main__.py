"""``python -m examples.swe DATASET``: checks records. Each is played by two scripted players.

The oracle applies the gold patch and must score 1; the empty player changes nothing and must score 0. Exit code 1
when a record fails this check, 2 when a setting or a record is malformed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from agentenv.errors import AgentEnvError, ConfigError
from agentenv.report import read_records
from agentenv.testing import Player, ScriptedPolicy, build_tokenizer

EXPECTED = {"oracle": 1.0, "empty": 0.0}


async def play(directory: Path, names: list[str], **fields: Any) -> dict[str, list[float | None]]:
    """Play every record once with each of these players; returns the scores by record, None without a score.

    Raises: ConfigError and what SweEnv.setup raises.
    """
    from atroposlib.envs.server_handling.server_baseline import APIServerConfig

    from examples.swe import players
    from examples.swe.env import SweConfig, SweEnv

    log = directory / "rollouts.jsonl"
    settings: dict[str, Any] = {
        "tokenizer_name": str(build_tokenizer(directory / "tokenizer")),
        "group_size": len(names),
        "max_containers": 1,
        "slots_per_container": 2,
        "use_wandb": False,
        "send_trajectory_id": True,
        "rollouts_path": str(log),
        "agent_max_steps": 4,
        "item_retries": 0,
        **fields,
    }
    script: dict[str, list[Player]] = {}
    async with ScriptedPolicy(script) as policy:
        server = APIServerConfig(base_url=policy.base_url, model_name="scripted", api_key="unused")
        async with SweEnv(SweConfig(**settings), [server]) as env:
            for record in env.records.values():
                script[record.instance_id] = [getattr(players, name)(record) for name in names]
            for record in env.records.values():
                await env.collect_trajectories(env.item_of(record))
    return {group.item_id: [member.score for member in group.trajectories] for group in read_records(log)}


def main() -> int:
    """See the module."""
    given = _arguments()
    names = [name for name in EXPECTED if getattr(given, name)] or list(EXPECTED)
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    fields = {
        "dataset_name": given.dataset,
        "dataset_split": given.split,
        "repositories": str(given.repositories) if given.repositories else None,
        "clone_url": given.clone_url,
        "only_repos": given.only_repos,
        "only_instances": given.only_instances,
        "python_only": given.python_only,
        "max_records": given.max_records,
        "patch_is": given.patch_is,
        "dependencies": given.dependencies,
        "tool_pool_mode": "fake" if given.fake else "local",
        "isolation": given.isolation,
    }
    with contextlib.ExitStack() as stack:
        directory = given.out or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "rollouts.jsonl").unlink(missing_ok=True)
        try:
            scores = asyncio.run(play(directory, names, **fields))
        except AgentEnvError as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            return 2 if isinstance(error, ConfigError) else 1
    expected = [EXPECTED[name] for name in names]
    for instance, found in scores.items():
        said = ", ".join(f"{name} {score}" for name, score in zip(names, found, strict=True))
        print(f"{'ok ' if found == expected else 'BAD'} {instance}: {said}")
    return 0 if all(found == expected for found in scores.values()) else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.swe", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dataset", help="a .jsonl file of records, or a dataset's name")
    parser.add_argument("--split", default="test")
    parser.add_argument("--repositories", type=Path, help="local git repositories: owner/name[.git]")
    parser.add_argument("--clone-url", default="", help="clone missing ones from here, with {repo} in it")
    parser.add_argument("--oracle", action="store_true", help="only the oracle plays")
    parser.add_argument("--empty", action="store_true", help="only the empty player plays")
    parser.add_argument("--only-repos", type=_names, default=[], help="separated by commas")
    parser.add_argument("--only-instances", type=_names, default=[], help="separated by commas")
    parser.add_argument("--python-only", action="store_true", help="leave out records whose tests are no pytest ids")
    parser.add_argument("--max-records", type=int)
    parser.add_argument("--patch-is", choices=("fix", "bug"), default="fix", help="bug: as in SWE-smith")
    parser.add_argument("--dependencies", help="directory of the repositories' dependencies")
    parser.add_argument("--fake", action="store_true", help="no sandbox at all: only for code you trust")
    parser.add_argument("--isolation", choices=("auto", "full", "user"), default="auto")
    parser.add_argument("--out", type=Path, help="keep rollouts.jsonl here")
    return parser.parse_args()


def _names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


if __name__ == "__main__":
    sys.exit(main())
