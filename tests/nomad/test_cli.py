"""The operators' verbs on the real cluster. Those that stay, or that the test ends, are processes of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from agentenv.config import PoolSettings
from agentenv.farm.orphans import UNATTENDED_AFTER_S
from agentenv.metrics.scrape import Samples, parse
from tests import cli
from tests.integration.repair_tasks import PACKAGE, made
from tests.nomad.cluster import Cluster
from tests.waiting import START_S, wait_for

SMALL = ("--slots", "2", "--slot-memory", "512", "--workspace", "64", "--memory", "1536")


class Command(cli.Command):
    """``agentenv --backend nomad`` against the test's cluster."""

    def __init__(self, cluster: Cluster, state: Path) -> None:
        inherited = {name: None for name in os.environ if name.startswith("NOMAD_")}
        own = {"AGENTENV_BACKEND": "nomad", "AGENTENV_STATE_DIR": str(state), "NOMAD_ADDR": cluster.address}
        super().__init__({**inherited, **own, "COLUMNS": "200"})


def orphans(cluster: Cluster, command: Command, *arguments: str) -> list[dict[str, Any]]:
    """What `gc` finds, but for containers of this machine's other clusters, whose clients tests kill and stop."""
    ours = {one.name for one in cluster.containers()}
    found: list[dict[str, Any]] = command.told("gc", *arguments)["orphans"]
    return [one for one in found if one["kind"] != "docker container" or one["name"] in ours]


def well(command: Command, *job: str, containers: int) -> dict[str, Any]:
    """The farm's status once so many containers answer: on a busy machine one may be too slow for one look."""

    def answering() -> dict[str, Any] | None:
        status: dict[str, Any] = command.told("status", *job)
        return status if status["well"] and status["answering_containers"] == containers else None

    return wait_for(answering, START_S, lambda: str(command.run("status", *job)))


@pytest.fixture
def command(cluster: Cluster, tmp_path: Path) -> Command:
    return Command(cluster, tmp_path / "state")


def test_a_farm_is_started_looked_at_used_scaled_and_ended(cluster: Cluster, command: Command, job_id: str) -> None:
    job = ("--job", job_id)
    assert command.told("status", *job)["exists"] is False

    up = command.told("up", *job, *SMALL, "--containers", "1")
    assert well(command, *job, containers=1)["slots"] == {"free": 2}
    first = up["containers"][0]["id"]

    with command.started("exec", *job, "id -u; exit 4") as running:
        stdout, stderr = running.communicate(timeout=START_S)
    assert (running.returncode, int(stdout) > 0) == (4, True), stderr
    wait_for(lambda: [slot["state"] for slot in command.told("slots", *job)] == ["free", "free"])

    # Another up scales the farm that is there: its first container is the same.
    command.told("up", *job, *SMALL, "--containers", "2")
    status = well(command, *job, containers=2)
    assert first in [container["id"] for container in status["containers"]]
    assert all(container["node"] for container in status["containers"])
    assert {container["isolation"] for container in status["containers"]} == {"full"}
    wait_for(lambda: (said := command.run("status", *job))[0] == 0 and "healthy" in said[1])

    assert all(container["age_s"] > 0 for container in status["containers"])
    with command.started("metrics", *job, "--port", "0", "--json") as serving:
        assert serving.stdout is not None
        url = json.loads(serving.stdout.readline())["url"]

        def of_both() -> Samples | None:
            with urllib.request.urlopen(url, timeout=60) as reply:
                samples = parse(reply.read().decode())
            return samples if samples.one("agentenv_pool_containers", state="ready") == 2 else None

        samples = wait_for(of_both)
        serving.send_signal(signal.SIGINT)
        assert serving.wait(timeout=START_S) == 0
    assert sum(samples.by("agentenv_sandbox_calls_total", "container").values()) == 1

    code, log, _ = command.run("logs", *job, first[:8], "--tail", "5000")
    assert "serving" in log

    # Left running on purpose: however long nobody is heard from, gc does not take it.
    assert orphans(cluster, command, *job, "--unattended-after", "10", "--observe", "0") == []

    code, _, stderr = command.run("down", *job)
    assert code == 0, stderr
    assert command.told("status", *job)["exists"] is False
    assert not [one for one in cluster.allocations(job_id) if one["ClientStatus"] in ("running", "pending")]
    assert command.run("down", *job)[0] == 0  # nothing to end is no error


def test_logs_are_followed(cluster: Cluster, command: Command, job_id: str) -> None:
    cluster.run(job_id, {"slots": 1})
    (allocation,) = cluster.serving(job_id)
    with command.started("logs", "--job", job_id, "0", "--follow") as following:
        assert following.stdout is not None
        assert any("serving" in line for line in following.stdout)  # a loaded machine's stalls are told before it
        following.send_signal(signal.SIGINT)
        _, stderr = following.communicate(timeout=START_S)
    assert following.returncode == 0, stderr
    code, _, stderr = command.run("logs", "--job", job_id, "nothing-like-it")
    assert code == 2
    assert "no container 'nothing-like-it'" in stderr
    assert command.run("logs", "--job", job_id, allocation[:8])[0] == 0
    assert command.run("down", "--job", job_id)[0] == 0


def test_what_nomad_waits_for_is_said_in_its_terms(command: Command, job_id: str) -> None:
    job = ("--job", job_id)
    code, _, stderr = command.run("up", *job, "--slots", "1", "--memory", "9000000", "--timeout", "15")
    assert code == 125
    assert "memory exhausted on 1 node" in stderr.replace("\n", " ")
    status = command.told("status", *job)
    assert status["well"] is False
    assert any("memory exhausted on 1 node" in reason for reason in status["waiting_for"])
    assert command.run("down", *job)[0] == 0


def test_a_wrong_image_ends_up_with_the_reason(command: Command, job_id: str) -> None:
    job = ("--job", job_id)
    code, _, stderr = command.run("up", *job, *SMALL, "--image", "no-such-image:never", "--timeout", "90")
    assert code == 125
    assert "no-such-image" in stderr
    assert command.run("down", *job)[0] == 0


def test_a_lease_nobody_renews_is_shown_and_ended(cluster: Cluster, command: Command, job_id: str) -> None:
    job = ("--job", job_id)
    command.told("up", *job, *SMALL)
    with command.started("exec", *job, "--", "sleep", "250") as holder:
        leased = wait_for(lambda: command.told("slots", *job, "--state", "leased"), START_S)
        assert leased[0]["trajectory"] == "agentenv-exec"
        assert orphans(cluster, command, *job, "--observe", "20") == []  # its owner lives
        holder.kill()
    killed_s = time.monotonic()
    found = orphans(cluster, command, *job, "--observe", "6")
    if found or time.monotonic() - killed_s < PoolSettings().lease_ttl_s - 5:  # later it may have ended by itself
        assert [(one["kind"], one["removed"]) for one in found] == [("lease", False)]
    found = orphans(cluster, command, *job, "--observe", "4", "--end-leases")
    if found:  # it may have ended by itself meanwhile: leases last 30 s
        assert [(one["kind"], one["removed"]) for one in found] == [("lease", True)]
    wait_for(lambda: command.told("slots", *job, "--state", "leased") == [], START_S)
    assert command.run("down", *job)[0] == 0


RUN_THAT_DIES = """
import asyncio, sys
from agentenv.config import ContainerSettings, NomadSettings, PoolSettings
from agentenv.slots.backends.nomad.backend import NomadBackend
from agentenv.slots.pool import SlotPool

async def main():
    nomad = NomadSettings.from_environment(job_id=sys.argv[1], build_image=False)
    async with SlotPool(NomadBackend(ContainerSettings(slots_per_container=1), nomad), PoolSettings()) as pool:
        async with await pool.lease("t", timeout_s=120):
            print("leased", flush=True)
            await asyncio.Event().wait()

asyncio.run(main())
"""


def test_the_job_of_a_run_that_was_killed_is_an_orphan(cluster: Cluster, command: Command, job_id: str) -> None:
    job = ("--job", job_id)
    with subprocess.Popen(
        [sys.executable, "-c", RUN_THAT_DIES, job_id],
        env=command.environment,
        stdout=subprocess.PIPE,
        text=True,
    ) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "leased\n"
        time.sleep(22)  # longer than what is asked for below: it is not the time since the start that counts
        alive = orphans(cluster, command, *job, "--unattended-after", "20", "--observe", "0")
        assert alive == []
        run.kill()

    def dead(*more: str) -> Any:
        found = command.told("gc", *job, "--unattended-after", "10", "--observe", "0", *more)["orphans"]
        # Not what others leave on this machine, nor a job of which a look found no container that answered.
        return [one for one in found if one["kind"] == "job" and not one["problem"]] or None

    def dead_in_a_while() -> Any:
        time.sleep(0.5)  # the whole cluster is looked through
        return dead("--dry-run")

    (orphan,) = wait_for(dead_in_a_while, UNATTENDED_AFTER_S)
    assert (orphan["kind"], orphan["name"], orphan["removed"]) == ("job", job_id, False)
    assert "its run is dead" in orphan["why"]
    assert command.told("status", *job)["exists"] is True  # --dry-run

    (orphan,) = wait_for(dead)
    assert orphan["removed"] is True, orphan
    assert command.told("status", *job)["exists"] is False


def test_a_docker_container_of_an_allocation_nomad_does_not_know_is_removed(cluster: Cluster, command: Command) -> None:
    allocation = "00000000-0000-4000-8000-" + os.urandom(6).hex()
    stray = cluster.docker.containers.create(
        cluster.image, name=f"stray-{allocation}", labels={"com.hashicorp.nomad.alloc_id": allocation}
    )

    def is_there() -> bool:  # containers of other tests come and go meanwhile
        return stray in cluster.docker.containers.list(all=True, ignore_removed=True)

    try:
        job = ("--job", cluster.job_id("none"))
        dry = command.told("gc", *job, "--observe", "0", "--dry-run")
        assert stray.name in [one["name"] for one in dry["orphans"]]
        assert is_there()
        found = command.told("gc", *job, "--observe", "0")
        assert stray.name in found["removed"]
        assert not is_there()
    finally:
        if is_there():
            stray.remove(force=True)


def test_the_demo_repairs_programs_on_the_cluster(cluster: Cluster, command: Command, tmp_path: Path) -> None:
    made()  # the tasks, which take longest
    code, stdout, stderr = command.run(
        "demo", "--job", cluster.job_id("demo"), "--package", PACKAGE, "--groups", "1", "--group-size", "2",
        "--slots", "2", "--out", str(tmp_path / "out"),
    )  # fmt: skip
    assert code == 0, stdout + stderr
    (group,) = [json.loads(line) for line in (tmp_path / "out" / "rollouts.jsonl").read_text().splitlines()]
    assert [member["fault"] for member in group["trajectories"]] == ["none", "none"]
    assert "nomad, 2 slots" in (tmp_path / "out" / "report.html").read_text()
