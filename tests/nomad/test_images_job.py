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


def test_containers_get_devices_and_writable_directories_by_name_only(cluster: Cluster) -> None:
    given = {"image_volume": "images", "unpack_images": True, "loop_devices": "8-11", "disk_volume": "scratch"}
    [group] = _parse(cluster, "sandbox.nomad.hcl", **given)["TaskGroups"]
    [task] = group["Tasks"]
    volumes = {name: (one["Source"], one["ReadOnly"]) for name, one in group["Volumes"].items()}
    assert volumes == {"images": ("images", True), "trees": ("images-trees", False), "disk": ("scratch", False)}
    mounts = {one["Destination"]: (one["Volume"], one["ReadOnly"]) for one in task["VolumeMounts"]}
    assert mounts == {"/store": ("images", True), "/store/trees": ("trees", False), "/disk": ("disk", False)}
    assert [device["host_path"] for device in task["Config"]["devices"]] == [f"/dev/loop{n}" for n in range(8, 12)]
    [without] = _parse(cluster, "sandbox.nomad.hcl", image_volume="images")["TaskGroups"]
    assert list(without["Volumes"]) == ["images"]
    assert not without["Tasks"][0]["Config"]["devices"]


def _store_of(group: dict[str, Any]) -> str:
    spec = next(one["EmbeddedTmpl"] for one in group["Tasks"][0]["Templates"] if one["DestPath"] == "local/spec.json")
    found: str = json.loads(spec.replace("%[[ env `NOMAD_HOST_PORT_http` ]]%", "1"))["store_dir"]
    return found
