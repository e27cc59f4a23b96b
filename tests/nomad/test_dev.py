"""``make nomad-dev`` for real: up, again, after a crash, down; and nothing left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentenv import shipped
from agentenv.dev import agent, docker_engine, processes
from agentenv.dev import cluster as dev_cluster
from agentenv.dev.agent import AgentPlace
from agentenv.errors import SandboxUnavailableError
from agentenv.image import BuildStep, connect
from agentenv.slots.backends.nomad.job import hcl
from tests.nomad.cluster import Cluster
from tests.nomad.containers import healthy, url_of
from tests.nomad.nomad_http import NomadHttp
from tests.waiting import START_S, wait_for


@pytest.fixture
def place(tmp_path: Path, cluster: Cluster) -> Iterator[AgentPlace]:
    """A place of its own. The session's cluster has made sure of engine, image and program, and keeps the
    engine in use."""
    found = AgentPlace(tmp_path / "dev")
    with agent.owned(tmp_path):
        yield found
        down(found)


def up(place: AgentPlace, steps: list[str] | None = None, *, check: bool = False) -> dev_cluster.Cluster:
    def report(step: BuildStep) -> None:
        if steps is not None and step.name not in steps:
            steps.append(step.name)

    return dev_cluster.up(place, report=report, http_port=0, name=f"dev-{os.getpid()}", check=check)


def down(place: AgentPlace) -> str:
    return dev_cluster.down(place)


def left_of(place: AgentPlace) -> list[object]:
    """Whatever still is there of a cluster: processes, mounts, files, containers."""
    with contextlib.closing(connect()) as client:
        containers: list[object] = [one.name for one in dev_cluster.containers_of(client, place)]
    mounts = agent.mounts_below(Path("/proc/self/mountinfo").read_text(), place.root)
    files = [place.root] if place.root.exists() else []
    return [*containers, *mounts, *files, *processes.find(place.mark)]


def test_up_again_status_and_down(place: AgentPlace) -> None:
    steps: list[str] = []
    first = up(place, steps, check=True)

    assert first.started
    assert first.check is not None
    assert (first.check.isolation, first.check.weaker) == ("full", ())
    assert [name for name in steps if name in ("nomad", "docker", "image", "agent", "slot")] == steps

    again = up(place)
    assert (again.started, again.address) == (False, first.address)

    found = dev_cluster.status(place)
    assert (found.up, found.address) == (True, first.address)
    assert found.engine.startswith("running")
    assert found.image.endswith("current")
    assert (found.jobs, found.containers) == ((), ())

    assert down(place).startswith("left ")
    assert left_of(place) == []
    assert not dev_cluster.status(place).up
    down(place)


def test_slot_that_does_not_answer_is_explained_and_nothing_of_it_stays(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dev_cluster, "IMAGE", "registry.invalid/agentenv-sandbox:1")

    with pytest.raises(SandboxUnavailableError, match=r"no slot answered: .*cannot pull image 'registry") as no:
        dev_cluster.check_slot(cluster.address)

    assert "agentenv image build" in no.value.next_step
    assert cluster.nomad.get("/v1/jobs", prefix="agentenv-check") == []
    assert cluster.nomad.get("/v1/vars", prefix="nomad/jobs/agentenv-check") == []


def test_killed_agent_is_started_again_and_its_leavings_removed(place: AgentPlace) -> None:
    first = up(place)
    nomad = NomadHttp(first.address)
    run_one_slot(nomad, "left-behind")

    def agents() -> list[processes.Found] | None:
        found = [one for one in processes.find(place.mark) if one.runs("nomad", "agent")]
        return found if len(found) == 1 else None  # one that it starts looks like it until it executes

    [process] = wait_for(agents)
    os.kill(process.pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(process.pid, 0)

    assert not dev_cluster.status(place).up
    second = up(place)

    assert second.started
    assert NomadHttp(second.address).get("/v1/jobs") == []
    with contextlib.closing(connect()) as client:
        assert dev_cluster.containers_of(client, place) == []


def test_down_takes_running_containers_along(place: AgentPlace) -> None:
    found = up(place)
    run_one_slot(NomadHttp(found.address), "running")
    assert len(dev_cluster.status(place).containers) == 1

    down(place)

    assert left_of(place) == []


def test_down_after_a_kill_leaves_nothing(place: AgentPlace) -> None:
    found = up(place)
    run_one_slot(NomadHttp(found.address), "orphan")
    for process in processes.find(place.mark):
        with contextlib.suppress(ProcessLookupError):  # its parent was killed before it
            os.kill(process.pid, signal.SIGKILL)

    down(place)

    assert left_of(place) == []


def run_one_slot(nomad: NomadHttp, job_id: str) -> None:
    """Start one container and wait until it answers."""
    source = shipped.path("nomad/sandbox.nomad.hcl").read_text()
    nomad.put_token(job_id, "t" * 32)
    given = {"job_id": hcl(job_id), "spec": hcl(json.dumps({"slots": 1}))}
    nomad.put("/v1/jobs", {"Job": nomad.parse_job(source, given)})

    def serving() -> bool | None:
        stubs = nomad.get(f"/v1/job/{job_id}/allocations")
        urls = [url_of(nomad.get(f"/v1/allocation/{stub['ID']}")) for stub in stubs]
        return any(url is not None and healthy(url) for url in urls) or None

    wait_for(serving, START_S, lambda: str(nomad.get(f"/v1/job/{job_id}/allocations")))


def test_taken_port_is_said_plainly(place: AgentPlace) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SandboxUnavailableError, match="address already in use"):
            dev_cluster.up(place, http_port=port, check=False)


def test_engine_in_use_is_not_stopped(cluster: Cluster) -> None:
    assert docker_engine.answers()

    assert docker_engine.stop().startswith("left ")
    assert docker_engine.answers()
