"""The image and the job on a real cluster: what the container proves, what it may not do."""

from __future__ import annotations

import json
import urllib.request

from tests.nomad.cluster import Cluster


def info(url: str, token: str) -> dict[str, object]:
    request = urllib.request.Request(f"{url}/v1/info", headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        found: dict[str, object] = json.load(answer)
    return found


def test_container_proves_full_isolation(cluster: Cluster, job_id: str) -> None:
    token = cluster.run(job_id, slots="2")
    [(allocation, url)] = cluster.serving(job_id).items()

    said = info(url, token)

    assert said["container"] == allocation
    assert (said["isolation"], said["weaker"]) == ("full", [])
    proofs = said["proofs"]
    assert isinstance(proofs, list)
    assert len(proofs) >= 15
    assert [proof for proof in proofs if not proof["holds"]] == []
