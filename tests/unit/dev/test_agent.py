"""The parts of a development cluster that decide: configuration, readiness, mounts, marked processes, engine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentenv.dev import cluster, docker_engine, processes
from agentenv.dev.agent import (
    AgentPlace,
    Ports,
    Role,
    abandoned,
    address,
    is_running,
    kill,
    local_config,
    mounts_below,
    node_lacks,
    owned,
)
from agentenv.dev.agent import (
    start as start_agent,
)
from agentenv.errors import SandboxUnavailableError
from tests.waiting import START_S, wait_for

FAKE_ENGINE = '''#!{python}
"""As much of dockerd as a client's greeting needs."""
import http.server, json, os, signal, socket, socketserver, sys
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = b"OK" if self.path.endswith("_ping") else json.dumps({{"ApiVersion": "1.41"}}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def address_string(self): return "unix"
class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
if os.environ.get("FAKE_FAILS"):
    sys.exit("failed to start daemon: no disk")
Server(os.environ["DOCKER_HOST"].removeprefix("unix://"), Handler).serve_forever()
'''

FAKE_NOMAD = '''#!{python}
"""An agent whose client misses its server the first time it is started: a leader, and no node."""
import http.server, json, pathlib, sys
place = pathlib.Path(sys.argv[-1]).parent
port = int(next(line.split("=")[1] for line in open(sys.argv[-1]) if line.strip().startswith("http")))
starts = place / "starts"
starts.write_text((starts.read_text() if starts.exists() else "") + ".")
node = {{"Name": "n", "Status": "ready", "Drivers": {{"docker": {{"Healthy": True}}}}}}
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        nodes = [node] if len(starts.read_text()) > 1 else []
        body = json.dumps("127.0.0.1:1" if self.path.endswith("leader") else nodes).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
'''


@pytest.mark.skipif(os.geteuid() != 0, reason="a Nomad client must run as root")
def test_an_agent_whose_client_missed_its_server_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nomad's client asks a second time after 15 to 30 s only."""
    program = tmp_path / "nomad"
    program.write_text(FAKE_NOMAD.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setattr("agentenv.dev.agent._REGISTERED_S", 0.3)
    place, hold = AgentPlace(tmp_path / "agent"), os.open(os.devnull, os.O_RDONLY)
    try:
        where = start_agent(place, program, Ports.free(), name="n", engine_fd=hold)
        assert where == address(place)
        assert (place.root / "starts").read_text() == ".."
        assert is_running(place)
    finally:
        os.close(hold)
        kill(place)


def test_ports_are_free_and_different() -> None:
    found = Ports.free(http=1234)

    assert found.http == 1234
    assert len({found.http, found.rpc, found.serf}) == 3


def test_configuration_says_role_ports_and_where_the_data_is(tmp_path: Path) -> None:
    place = AgentPlace(tmp_path)
    text = local_config(place, Ports(1, 2, 3), "n", Role.client, 7)
    place.config.write_text(text)

    assert 'servers = ["127.0.0.1:7"]' in text
    assert f'agentenv_data_dir = "{tmp_path}/data"' in text
    assert "server {\n  enabled          = false" in text
    assert address(place) == "http://127.0.0.1:1"
    assert address(AgentPlace(tmp_path / "none")) is None


def node(status: str, *, healthy: bool | None) -> dict[str, object]:
    driver = {} if healthy is None else {"docker": {"Healthy": healthy, "HealthDescription": "no socket"}}
    return {"Name": "n", "Status": status, "Drivers": driver}


def test_cluster_lacks_something_until_one_node_can_run_containers() -> None:
    assert node_lacks([]) == "no node"
    assert node_lacks([node("initializing", healthy=True)]) == "node n is initializing"
    assert node_lacks([node("ready", healthy=None)]) == "the Docker driver: not detected"
    assert node_lacks([node("ready", healthy=False)]) == "the Docker driver: no socket"
    assert node_lacks([node("ready", healthy=False), node("ready", healthy=True)]) is None


def test_mounts_below_a_place_come_innermost_first() -> None:
    lines = [
        "1 0 8:1 / / rw - ext4 /dev/sda rw",
        "2 1 0:5 / /c/data/alloc/a/secrets rw - tmpfs tmpfs rw",
        "3 1 0:5 / /c/data rw - tmpfs tmpfs rw",
        r"4 1 0:5 / /c/with\040space rw - tmpfs tmpfs rw",
        "5 1 0:5 / /c2/data rw - tmpfs tmpfs rw",
    ]

    assert mounts_below("\n".join(lines), Path("/c")) == ["/c/data/alloc/a/secrets", "/c/with space", "/c/data"]


# -- processes found by their mark --------------------------------------------------------------------


@pytest.fixture
def mark(tmp_path: Path) -> Iterator[str]:
    found = f"AGENTENV_TEST_MARK={tmp_path}"
    yield found
    processes.end_all(found, grace_s=0)


def start(mark: str, tmp_path: Path, script: str) -> int:
    argv = ["/bin/sh", "-c", script]
    return processes.start(argv, mark, {"PATH": "/usr/bin:/bin"}, tmp_path / "log", {})


def test_process_and_what_it_started_are_found_and_ended(mark: str, tmp_path: Path) -> None:
    start(mark, tmp_path, "sleep 1000 & exec sleep 1001")
    wait_for(lambda: len([one for one in processes.find(mark) if one.argv[0] == "sleep"]) == 2)

    assert processes.end(mark, processes.find(mark), grace_s=30) == []
    assert processes.find(mark) == []


def test_process_that_ignores_the_request_is_killed(mark: str, tmp_path: Path) -> None:
    start(mark, tmp_path, "trap '' TERM; echo up; while :; do sleep 0.05; done")
    wait_for(lambda: (tmp_path / "log").read_text() == "up\n")

    assert processes.end_all(mark, grace_s=0.1) == []
    assert processes.find(mark) == []


def test_a_process_without_an_environment_is_not_waited_for(mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_EXEC_S", 10 * START_S)
    with subprocess.Popen(["/bin/sleep", "1000"], env={}) as bare:
        assert processes.find(mark) == []
        bare.kill()


def test_process_without_the_mark_is_never_signalled(mark: str) -> None:
    """What a pid that was used again would be: somebody else's process under a number we once knew."""
    with subprocess.Popen(["/bin/sleep", "1000"], env={}) as other:
        try:
            assert processes.end(mark, [processes.Found(other.pid, ("sleep",))], grace_s=0) == []
            assert other.poll() is None
        finally:
            other.kill()


def test_kept_descriptor_reaches_the_process(mark: str, tmp_path: Path) -> None:
    read, write = os.pipe()
    try:
        argv = ["/bin/sh", "-c", "echo kept >&9"]
        processes.start(argv, mark, {"PATH": "/usr/bin:/bin"}, tmp_path / "log", {9: write})
        assert os.read(read, 100) == b"kept\n"
    finally:
        os.close(read)
        os.close(write)


def test_log_s_last_words_begin_with_its_last_error(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("[WARN] some error\nstarting\n==> Error starting agent: address already in use\nusage …\n")

    assert processes.last_words(log) == "==> Error starting agent: address already in use usage …"
    assert processes.last_words(tmp_path / "none") == ""


# -- clusters whose owner died ------------------------------------------------------------------------

OWNER = """import sys, time; from pathlib import Path
from agentenv.dev.agent import owned
with owned(Path(sys.argv[1])):
    print("owned", flush=True); time.sleep(1000)
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AgentPlace]:
    """Of an agent that runs, as far as its mark goes; others' scans for abandoned agents do not see it."""
    monkeypatch.setattr("agentenv.dev.agent._MARK", "AGENTENV_TEST_CLUSTER")
    found = AgentPlace(tmp_path / "s1")
    found.root.mkdir()
    start(found.mark, tmp_path, "exec sleep 1000")
    wait_for(lambda: [one for one in processes.find(found.mark) if one.argv[0] == "sleep"])
    yield found
    processes.end_all(found.mark, grace_s=0)


def test_cluster_of_a_living_owner_or_of_none_is_left_alone(place: AgentPlace) -> None:
    assert place not in abandoned(), "nobody ever owned it"
    with owned(place.root.parent):
        assert place not in abandoned()

    assert place in abandoned()


def test_cluster_of_a_killed_owner_is_ended_with_everything_of_it(
    place: AgentPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    monkeypatch.setattr("agentenv.dev.agent.processes.values", lambda name: {str(place.root)})  # no other's
    with subprocess.Popen([sys.executable, "-c", OWNER, tmp_path], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"owned\n"
        cluster.end_abandoned()
        assert processes.find(place.mark)
        owner.kill()
    assert cluster.status(AgentPlace(tmp_path / "dev")).abandoned == (str(place.root),)

    cluster.end_abandoned()

    assert (processes.find(place.mark), place.root.exists()) == ([], False)


# -- the engine, with a stand-in for dockerd ----------------------------------------------------------


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A machine of its own, as far as Docker goes; the socket's path must be short."""
    dockerd = tmp_path / "bin" / "dockerd"
    dockerd.parent.mkdir()
    dockerd.write_text(FAKE_ENGINE.format(python=sys.executable))
    dockerd.chmod(0o755)
    monkeypatch.setenv("PATH", f"{dockerd.parent}:/usr/bin:/bin")
    monkeypatch.setenv("AGENTENV_CACHE_DIR", str(tmp_path / "c"))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/d.sock")
    monkeypatch.setattr(docker_engine, "_BRIDGE", "agentenvtest0")
    monkeypatch.setattr("agentenv.dev.docker_engine.os.geteuid", lambda: 0)
    yield tmp_path
    docker_engine.stop()


@pytest.mark.usefixtures("engine")
def test_engine_is_started_where_none_runs_and_stopped_when_nobody_uses_it() -> None:
    assert docker_engine.stop() == "not running"
    with docker_engine.using():
        assert docker_engine.ensure() is True
        assert docker_engine.ensure() is False
        assert docker_engine.is_ours()
        with docker_engine.using():
            pass

        assert docker_engine.stop() == "left running: another process uses it"
        assert docker_engine.answers()

    assert docker_engine.stop() == "stopped"
    assert not docker_engine.answers()


def test_engine_started_by_somebody_else_is_left_alone(engine: Path) -> None:
    with subprocess.Popen([str(engine / "bin" / "dockerd")]) as theirs:
        try:
            wait_for(docker_engine.answers)
            with docker_engine.using():
                assert docker_engine.ensure() is False
            assert not docker_engine.is_ours()
            assert docker_engine.stop() == "left running: it was not started by agentenv"
            assert docker_engine.answers()
        finally:
            theirs.send_signal(signal.SIGTERM)


@pytest.mark.usefixtures("engine")
def test_engine_that_does_not_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_FAILS", "1")

    with docker_engine.using(), pytest.raises(SandboxUnavailableError, match=r"dockerd ended with 1: .*no disk"):
        docker_engine.ensure()


@pytest.mark.usefixtures("engine")
def test_engine_needs_root_and_dockerd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentenv.dev.docker_engine.os.geteuid", lambda: 1000)
    with docker_engine.using(), pytest.raises(SandboxUnavailableError, match="only root"):
        docker_engine.ensure()
    monkeypatch.setattr("agentenv.dev.docker_engine.shutil.which", lambda name, path: None)
    with docker_engine.using(), pytest.raises(SandboxUnavailableError, match=r"apt-get install docker\.io"):
        docker_engine.ensure()


# -- does a slot answer? ------------------------------------------------------------------------------


def test_check_says_what_a_farm_would_be_told() -> None:
    with pytest.raises(SandboxUnavailableError, match="no slot answered: no Nomad server responds at http://127") as no:
        cluster.check_slot("http://127.0.0.1:1")
    assert "make nomad-dev" in no.value.next_step
