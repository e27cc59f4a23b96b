"""An environment on the real cluster: containers are killed under its rollouts, and every score is what it would
have been."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from docker.errors import APIError

from agentenv.agent.transcript import GroupRecord
from agentenv.testing import Call, Reply
from tests.integration.test_agent_programs import SOLVE, check_sampled, playing
from tests.nomad.cluster import Cluster
from tests.nomad.farm import docker_name
from tests.unit.env.env_stubs import IDLE, WRITE, AnswerEnv, environment
from tests.unit.env.managed_stubs import managed

KILLS = 3
LONG = [*(Reply("", (Call("bash", {"command": f"echo {n}; sleep 0.2"}),)) for n in range(4)), *WRITE]
HALF = [Reply("", (Call("bash", {"command": "echo 41 > answer"}),)), Reply("done")]


def settings_of(cluster: Cluster, job_id: str) -> dict[str, Any]:
    return {
        "tool_pool_mode": "nomad",
        "nomad_address": cluster.address,
        "sandbox_job_id": job_id,
        "container_memory_mib": 1024,
        "container_memory_oversubscription": True,
        "container_cpu_mhz": 20,
        "slots_per_container": 4,
        "acquire_timeout_s": 120.0,
    }


async def test_an_agent_program_plays_and_every_token_is_exact(cluster: Cluster, tmp_path: Path, job_id: str) -> None:
    changed = {**settings_of(cluster, job_id), "max_containers": 1, "group_size": 2, "agent_max_steps": 20}
    async with managed(playing("forking"), tmp_path, {"*": [SOLVE]}, **changed) as (env, voice):
        group, _ = await env.collect_trajectories({"id": "x"})
        assert group is not None
        assert check_sampled(voice, group) == 2 * 7
    assert group["scores"] == [1.0] * 6, "three sequences of each"


async def test_scores_survive_killed_containers(cluster: Cluster, tmp_path: Path, job_id: str) -> None:
    changed = {**settings_of(cluster, job_id), "min_containers": 2, "max_containers": 2, "infra_retries": 30}
    async with environment(AnswerEnv, tmp_path, {"*": [LONG, HALF, IDLE, WRITE]}, **changed) as env:
        groups = [asyncio.create_task(env.collect_trajectories({"id": f"g{n}"})) for n in range(6)]
        kills = 0
        while kills < KILLS:
            await asyncio.sleep(1.0)
            kills += await asyncio.to_thread(_kill_one, cluster, job_id)
        finished = await asyncio.gather(*groups)
        assert env.counts["infra_retries"] > 0
    for group, again in finished:
        assert again == []
        assert group is not None
        assert group["scores"] == [1.0, 0.0, 0.0, 1.0]
    records = [GroupRecord.model_validate_json(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    assert {record.outcome for record in records} == {"complete"}


def _kill_one(cluster: Cluster, job_id: str) -> bool:
    """Whether one was there to be killed."""
    names = _names(cluster, job_id)
    running = [one for one in cluster.containers() if one.name in names and one.status == "running"]
    try:
        for container in running[:1]:
            container.kill()
    except APIError as error:
        if error.status_code not in (404, 409):  # it has ended meanwhile
            raise
        return False
    return bool(running)


def _names(cluster: Cluster, job_id: str) -> set[str]:
    """Docker names of the job's containers that run now."""
    return {docker_name(one["ID"]) for one in cluster.allocations(job_id) if one["ClientStatus"] == "running"}
