"""The farm service as a Nomad job: what Nomad makes of its file, and what the service is started with."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from agentenv import shipped
from agentenv.slots.backends.nomad.job import hcl
from tests.nomad.cluster import Cluster
from tests.waiting import START_S, wait_for

STUB = Path(__file__).with_name("farm_stub.py")


def _parse(cluster: Cluster, **variables: object) -> dict[str, Any]:
    text = shipped.path("nomad/farm.nomad.hcl").read_text()
    job: dict[str, Any] = cluster.nomad.parse_job(text, {name: hcl(value) for name, value in variables.items()})
    return job


@pytest.mark.parametrize("driver", ["docker", "raw_exec"])
def test_the_job_is_valid_for_every_driver(cluster: Cluster, driver: str) -> None:
    job = _parse(cluster, driver=driver, count=2)
    reply = cluster.nomad.put("/v1/validate/job", {"Job": job})
    assert (reply["ValidationErrors"], reply["Warnings"]) == (None, "")
    [group] = job["TaskGroups"]
    restart = group["RestartPolicy"]
    assert (restart["Attempts"], restart["Delay"], restart["Mode"]) == (10, 1_000_000_000, "delay")
    assert group["Disconnect"]["LostAfter"] == 30_000_000_000
    assert [port["Value"] for port in group["Networks"][0]["ReservedPorts"]] == [8700]
    assert group["Tasks"][0]["Driver"] == driver


def test_the_program_finds_it_valid(cluster: Cluster) -> None:
    argv = [str(cluster.server.program), "job", "validate", "-address", cluster.address]
    found = subprocess.run(
        [*argv, shipped.path("nomad/farm.nomad.hcl")], capture_output=True, text=True, timeout=60, check=False
    )
    assert found.returncode == 0, found.stdout + found.stderr


def test_the_service_is_started_with_its_settings_and_again_in_place(cluster: Cluster, job_id: str) -> None:
    """In place: the same allocation, by which it knows that its predecessor is gone."""
    path = f"nomad/jobs/{job_id}"
    cluster.nomad.put(f"/v1/var/{path}", {"Path": path, "Items": {"key": "k" * 64, "settings": 'name = "one"\n'}})
    where = {"nomad_address": cluster.address, "port": 0, "cpu_mhz": 20, "memory_mib": 64}
    job = _parse(cluster, job_id=job_id, driver="raw_exec", command=str(STUB), **where)
    cluster.nomad.put("/v1/jobs", {"Job": job})

    def started(times: int) -> list[dict[str, Any]]:
        def look() -> list[dict[str, Any]] | None:
            for one in cluster.allocations(job_id):
                *lines, _ = cluster.logs(one["ID"], task="farm").split("\n")  # the last may not be whole
                if len(lines) >= times:
                    return [json.loads(line) for line in lines]
            return None

        return wait_for(look, START_S, lambda: cluster.tell(job_id))

    [first] = started(1)
    environment = first["environment"]
    place = environment["NOMAD_ADDR_http"]
    options = dict(zip(first["argv"][2::2], first["argv"][3::2], strict=True))
    assert first["argv"][:2] == ["farm", "serve"]
    assert options["--url"] == f"http://{place}"
    assert options["--port"] == place.rpartition(":")[2]
    assert (first["settings"], first["key"], first["key_mode"]) == ('name = "one"\n', "k" * 64, 0o600)
    assert environment["NOMAD_ADDR"] == cluster.address
    assert environment["NOMAD_TOKEN"]

    def checked() -> bool | None:
        checks = [cluster.nomad.get(f"/v1/client/allocation/{environment['NOMAD_ALLOC_ID']}/checks")]
        return any(one["Status"] == "success" for each in checks for one in each.values()) or None

    wait_for(checked, START_S, lambda: cluster.tell(job_id))
    os.kill(first["pid"], signal.SIGKILL)
    again = started(2)[-1]
    assert again["pid"] != first["pid"]
    for name in ("NOMAD_ALLOC_ID", "NOMAD_TASK_NAME"):
        assert again["environment"][name] == environment[name]
