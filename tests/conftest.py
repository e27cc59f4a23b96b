"""The session's one cluster (``cluster``), for tests/nomad and for the suites that run over every backend.

What is slow and kept between runs is made before any test's clock runs: the nomad program, the image.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from xdist.remote import Producer

from agentenv.deadlines import scaled
from agentenv.dev import docker_engine, program
from agentenv.image import BuildStep, ensure_image
from agentenv.sandbox.supervisor.disk_layers import not_on_disk
from tests.by_module import ByModule
from tests.nomad.cluster import Cluster, running_cluster
from tests.ports import promised_port

pytest_plugins = ["tests.outcomes", "tests.sweeps"]

settings.register_profile("loaded machine", settings(), deadline=None)
settings.load_profile("loaded machine")

WAITING_FIRST = (
    *("tests/contract/executor/test_executor_terminal_input", "tests/contract/test_pool", "tests/faults/test_training"),
    *("tests/integration/test_harbor", "tests/integration/test_swe", "tests/nomad", "tests/faults", "tests/contract"),
    *("tests/integration/test_repair", "tests/integration/test_image_services", "tests/integration/test_ordinary_user"),
    *("tests/integration/test_tool_server_browser", "tests/integration", "tests/security"),
)
"""Tests that mostly wait, by how their ids begin; the longest modules first. The others compute."""
MOUNTS = Path("/proc/self/mountinfo")
_UNIT = Path(__file__).parent / "unit"


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """A test's time limit, on a machine that is told to be slow; and temporary directories on a disk, because image
    stores need one and /tmp is a tmpfs since Debian 13."""
    if config.option.timeout is None:
        config.option.timeout = scaled(float(config.getini("timeout")))
    if "TMPDIR" not in os.environ and not_on_disk(MOUNTS.read_text(), tempfile.gettempdir()):
        os.environ["TMPDIR"] = tempfile.tempdir = "/var/tmp"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByModule:
    return ByModule(config, log)


@pytest.fixture(scope="session", autouse=True)
def signals_of_the_foreground() -> Iterator[None]:
    """Tests send signals to what they start, which inherits the ignored ones: a script's background job ignores
    SIGINT and SIGQUIT, and what nohup started SIGHUP."""
    ignored = [
        number
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)
        if signal.getsignal(number) is signal.SIG_IGN
    ]
    for number in ignored:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """In the order of WAITING_FIRST, else as they were."""

    def place(item: pytest.Item) -> int:
        waiting = (at for at, begins in enumerate(WAITING_FIRST) if item.nodeid.startswith(begins))
        return next(waiting, len(WAITING_FIRST))

    items.sort(key=place)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Without the garbage collector: of what is made here all lives to the end, and each process makes all of it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.fixture(autouse=True)
def level_of_the_log() -> Iterator[None]:
    """Commands with ``AGENTENV_DEBUG`` set it for their process, which is that of later tests as well."""
    ours = logging.getLogger("agentenv")
    before = ours.level
    yield
    ours.setLevel(before)


@pytest.fixture
def unused_tcp_port() -> Iterator[int]:
    """In place of pytest-asyncio's, which another process may get meanwhile."""
    with promised_port() as port:
        yield port


NO_CLUSTER = pytest.StashKey[Exception]()
"""Why there can be no cluster here."""


def pytest_collection_finish(session: pytest.Session) -> None:
    """Minutes on a bare machine; nothing where it was done before. Where it cannot be done, the tests of the cluster
    fail, and no others."""
    gc.collect()
    gc.freeze()  # the tests themselves live to the end: no collection needs to look at them
    if session.config.option.collectonly or not any(_wants_cluster(item) for item in session.items):
        return
    capture = session.config.pluginmanager.getplugin("capturemanager")
    assert capture is not None
    told = ""

    def report(step: BuildStep) -> None:
        nonlocal told
        if step.name != told:
            with capture.global_and_fixture_disabled():  # one of several processes has no other way to say it
                print(f"nomad tests: {step.name} {step.detail}", file=sys.stderr, flush=True)
        told = step.name

    try:
        with docker_engine.using():
            program.nomad_program(report)
            docker_engine.ensure()
            ensure_image(report=report)
    except Exception as error:  # whatever it is, it is for the tests that need it to say
        session.config.stash[NO_CLUSTER] = error


def _wants_cluster(item: pytest.Item) -> bool:
    """It asks for the cluster, or is the nomad variant of a test for every backend."""
    if _UNIT in item.path.parents:  # whatever its parameters are
        return False
    variant = getattr(item, "callspec", None)
    return "cluster" in getattr(item, "fixturenames", ()) or (
        variant is not None and any(str(value).endswith("nomad") for value in variant.params.values())
    )


@pytest.fixture(scope="session")
def cluster(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A Nomad server and client of this session's own. See :class:`tests.nomad.cluster.Cluster`."""
    if (error := pytestconfig.stash.get(NO_CLUSTER, None)) is not None:
        raise error
    root: Path = tmp_path_factory.mktemp("nomad")
    with running_cluster(root, program.nomad_program(lambda _: None)) as found:
        yield found


@pytest.fixture
def job_id(cluster: Cluster) -> Iterator[str]:
    """A job id of the test's own; whatever runs under it is purged afterwards."""
    name = cluster.job_id()
    yield name
    cluster.purge(name)
