"""The session's one cluster (``cluster``), for tests/nomad and for the suites that run over every backend.

What is slow and kept between runs is made before any test's clock runs: the nomad program, the image.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentenv.dev import docker_engine, program
from agentenv.image import Step, ensure_image
from tests.nomad.cluster import Cluster, running_cluster


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What one process runs when several share the work (``make test``): a module, for its fixtures' sake; all of
    tests/nomad, and what the other suites do over Nomad, for the cluster's. These last longest and come first."""
    whole_cluster, over_nomad = "tests/nomad", "suites over nomad"

    def group(item: pytest.Item) -> str:
        path = item.path.relative_to(item.config.rootpath)
        if path.is_relative_to(whole_cluster):
            return whole_cluster
        return over_nomad if _wants_cluster(item) else str(path)

    first = (whole_cluster, over_nomad)
    items.sort(key=lambda item: first.index(name) if (name := group(item)) in first else len(first))
    for item in items:
        item.add_marker(pytest.mark.xdist_group(group(item)))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Minutes on a bare machine; nothing where it was done before."""
    if session.config.option.collectonly or not any(_wants_cluster(item) for item in session.items):
        return
    capture = session.config.pluginmanager.getplugin("capturemanager")
    assert capture is not None
    told = ""

    def report(step: Step) -> None:
        nonlocal told
        if step.name != told:
            with capture.global_and_fixture_disabled():  # one of several processes has no other way to say it
                print(f"nomad tests: {step.name} {step.detail}", file=sys.stderr, flush=True)
        told = step.name

    with docker_engine.using():
        program.nomad_program(report)
        docker_engine.ensure()
        ensure_image(report=report)


def _wants_cluster(item: pytest.Item) -> bool:
    """It asks for the cluster, or is the nomad variant of a test for every backend."""
    variant = getattr(item, "callspec", None)
    return "cluster" in getattr(item, "fixturenames", ()) or (
        variant is not None and "nomad" in variant.params.values()
    )


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A Nomad server and client of this session's own. See :class:`tests.nomad.cluster.Cluster`."""
    root: Path = tmp_path_factory.mktemp("nomad")
    with running_cluster(root, program.nomad_program(lambda _: None)) as found:
        yield found


@pytest.fixture(scope="module")
def kept_job(cluster: Cluster) -> Iterator[str]:
    """A job id whose containers outlive a test: the module's next one adopts them, which is quicker than a start."""
    name = cluster.job_id("kept")
    yield name
    cluster.purge(name)


@pytest.fixture
def job_id(cluster: Cluster) -> Iterator[str]:
    """A job id of the test's own; whatever runs under it is purged afterwards."""
    name = cluster.job_id()
    yield name
    cluster.purge(name)
