"""The image keeper as a Nomad job, and the store as a volume of the containers: what Nomad makes of the files."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentenv import shipped
from agentenv.slots.backends.nomad.job import hcl
from tests.nomad.cluster import Cluster


def _parse(cluster: Cluster, file: str, **variables: object) -> dict[str, Any]:
    text = shipped.path(f"nomad/{file}").read_text()
    job: dict[str, Any] = cluster.nomad.parse_job(text, {name: hcl(value) for name, value in variables.items()})
    reply = cluster.nomad.put("/v1/validate/job", {"Job": job})
    assert (reply["ValidationErrors"], reply["Warnings"]) == (None, "")
    return job


@pytest.mark.parametrize("driver", ["docker", "raw_exec"])
def test_a_keeper_runs_on_every_node_and_knows_the_others(cluster: Cluster, driver: str) -> None:
    job = _parse(cluster, "images.nomad.hcl", driver=driver, args=["--registry", "docker.io"])
    [group] = job["TaskGroups"]
    [task] = group["Tasks"]
    assert job["Type"] == "system"
    assert [port["Value"] for port in group["Networks"][0]["ReservedPorts"]] == [8643]
    args = task["Config"]["args"]
    assert args[:2] == ["images", "serve"]
    assert args[-2:] == ["--registry", "docker.io"]
    assert "range nomadService `agentenv-images`" in next(
        one["EmbeddedTmpl"] for one in task["Templates"] if one["DestPath"] == "local/peers"
    )
    if driver == "docker":
        assert group["Volumes"]["store"]["ReadOnly"] is False
        assert task["Config"]["cap_drop"] == ["all"]
        assert task["User"] not in ("", "root", "0")


def test_containers_see_the_store_read_only_where_there_is_one(cluster: Cluster) -> None:
    [group] = _parse(cluster, "sandbox.nomad.hcl", image_volume="agentenv-images")["TaskGroups"]
    assert group["Volumes"]["images"]["ReadOnly"] is True
    [mount] = group["Tasks"][0]["VolumeMounts"]
    assert (mount["Destination"], mount["ReadOnly"]) == ("/store", True)
    assert _store_of(group) == "/store"
    [without] = _parse(cluster, "sandbox.nomad.hcl")["TaskGroups"]
    assert not without["Volumes"]
    assert _store_of(without) == ""
    [plain] = _parse(cluster, "sandbox.nomad.hcl", driver="raw_exec", image_store="/var/store")["TaskGroups"]
    assert _store_of(plain) == "/var/store"


def _store_of(group: dict[str, Any]) -> str:
    spec = next(one["EmbeddedTmpl"] for one in group["Tasks"][0]["Templates"] if one["DestPath"] == "local/spec.json")
    found: str = json.loads(spec.replace("%[[ env `NOMAD_HOST_PORT_http` ]]%", "1"))["store_dir"]
    return found
