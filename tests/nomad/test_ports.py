"""Environments score on a cluster as they do on this machine: the ports of tests/porting, and a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentenv.tasks.pinned import fetch_runner
from agentenv.testing import Call, Reply, ScriptedPolicy, build_tokenizer
from tests.integration import test_recipes_docs as recipes
from tests.nomad.cluster import Cluster
from tests.porting.ports import play_smoke, play_swe, play_terminal_test, scores
from tests.unit.env.env_stubs import server_of


def on_the_cluster(cluster: Cluster, job_id: str) -> dict[str, Any]:
    """Settings of a small container on the test cluster."""
    return {
        "tool_pool_mode": "nomad",
        "nomad_address": cluster.address,
        "sandbox_job_id": job_id,
        "container_memory_mib": 1024,
        "container_memory_oversubscription": True,
        "container_cpu_mhz": 20,
        "acquire_timeout_s": 120.0,
    }


@pytest.mark.parametrize(
    ("play", "expected"),
    [(play_terminal_test, [1.0, 0.5, 0.0]), (play_smoke, [1.0, 0.0]), (play_swe, [1.0, 0.0, 0.0])],
)
async def test_scores_are_the_same(
    play: Any, expected: list[float], cluster: Cluster, tmp_path: Path, job_id: str
) -> None:
    assert scores(await play(tmp_path, on_the_cluster(cluster, job_id))) == expected


async def test_a_recipe_moves_to_a_cluster_by_one_setting(cluster: Cluster, tmp_path: Path, job_id: str) -> None:
    """docs/recipes.md, "From laptop to cluster": the environment of the page, on its containers."""
    names = recipes.run("Hidden tests, and a verifier with pytest")
    script = [[Reply("", (Call("bash", {"command": command}),)), Reply("done")] for command in recipes.PLAYERS]
    async with ScriptedPolicy({"add": script}) as policy:
        config = names["SealedConfig"](
            tokenizer_name=str(build_tokenizer(tmp_path / "tokenizer")),
            group_size=len(script),
            use_wandb=False,
            send_trajectory_id=True,
            sandbox_binds=[f"{fetch_runner()}:/opt/packages"],
            sandbox_env={"PYTHONPATH": "/opt/packages"},
            slots_per_container=4,
            max_containers=1,
            **on_the_cluster(cluster, job_id),
        )
        async with names["RepairAdd"](config, server_of(policy)) as env:
            group, _ = await env.collect_trajectories(await env.get_next_item())
    assert group is not None
    assert group["scores"] == list(recipes.PLAYERS.values())
