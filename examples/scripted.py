"""Plays records with scripted players: the oracle must score 1, and a player that changes nothing must score 0."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from agentenv.errors import AgentEnvError, ConfigError
from agentenv.report import read_records
from agentenv.testing import Player, ScriptedPolicy, build_tokenizer

if TYPE_CHECKING:
    from agentenv import AgentEnv

EXPECTED: Final[Mapping[str, float]] = {"oracle": 1.0, "empty": 0.0}
Scores = dict[str, list[float | None]]
R = TypeVar("R")


async def play(
    directory: Path,
    kind: type[AgentEnv[Any]],
    fields: Mapping[str, Any],
    records: Callable[[Any], Mapping[str, R]],
    players: Callable[[R], list[Player]],
) -> Scores:
    """Play every record once with each of its players; returns the scores by record, None without a score.

    ``fields`` are the environment's settings, beside those that any such play has; ``records`` returns its records by
    id, and ``kind.item_of`` makes items of them. Transcripts go to ``directory``. Raises: ConfigError and what the
    environment's setup raises.
    """
    from atroposlib.envs.server_handling.server_baseline import APIServerConfig

    log = directory / "rollouts.jsonl"
    settings: dict[str, Any] = {
        "tokenizer_name": str(build_tokenizer(directory / "tokenizer")),
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
        async with kind(kind.env_config_cls(**settings), [server]) as env:
            found = records(env)
            script |= {name: players(record) for name, record in found.items()}
            for record in found.values():
                await env.collect_trajectories(env.item_of(record))
    return {group.item_id: [member.score for member in group.trajectories] for group in read_records(log)}


def report(names: list[str], playing: Callable[[Path], Any], out: Path | None) -> int:
    """Run ``playing(directory)`` and print each record's scores beside what they must be.

    Returns the exit code: 1 when a record failed or nothing could be played, 2 when a setting or record is malformed.
    """
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    with ExitStack() as stack:
        directory = out or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "rollouts.jsonl").unlink(missing_ok=True)
        try:
            scores: Scores = asyncio.run(playing(directory))
        except AgentEnvError as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            return 2 if isinstance(error, ConfigError) else 1
    expected = [EXPECTED[name] for name in names]
    for record, found in scores.items():
        said = ", ".join(f"{name} {score}" for name, score in zip(names, found, strict=True))
        print(f"{'ok ' if found == expected else 'BAD'} {record}: {said}")
    return 0 if scores and all(found == expected for found in scores.values()) else 1
