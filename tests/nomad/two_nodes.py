"""One Nomad server and two clients, each client in a network namespace of its own with its own Docker engine; or in a
machine of its own (:mod:`hosts.nodes`).

What crosses between the environment and a container crosses a veth pair, which a test can cut::

    this machine                         client 1 (namespace)          client 2 (namespace)
    pytest, Nomad server  ── 10.213.1 ── dockerd, Nomad client
                          ── 10.213.2 ───────────────────────────────  dockerd, Nomad client

`ip netns exec` would hide the cgroup mounts from dockerd; nsenter does not.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker

from agentenv import shipped
from agentenv.config import NomadSettings
from agentenv.deadlines import scaled
from agentenv.dev import agent, processes
from agentenv.dev.agent import Ports
from agentenv.errors import SandboxUnavailableError
from agentenv.image import IMAGE
from tests.nomad.farm import allocation_of
from tests.nomad.nomad_http import NomadHttp
from tests.waiting import START_S, wait_for

_MARK = "AGENTENV_TWO_NODES"
_PATHS = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
_CLIENT_HTTP = 4646
_CLIENT_RPC = 4647


@dataclass(frozen=True)
class Node:
    """One client machine: ``number`` 1 or 2 names its network."""

    root: Path
    number: int

    @property
    def name(self) -> str:
        return f"aenode{self.number}"

    @property
    def outside(self) -> str:
        """The end of its wire on this machine."""
        return f"aewire{self.number}"

    @property
    def host(self) -> str:
        """This machine, as the node sees it."""
        return f"10.213.{self.number}.1"

    @property
    def address(self) -> str:
        """The node, as this machine sees it."""
        return f"10.213.{self.number}.2"

    @property
    def socket(self) -> str:
        return f"unix://{self.root}/d.sock"

    @property
    def agentenv(self) -> str:
        """The command, on it."""
        return str(Path(sys.executable).with_name("agentenv"))

    def plug_in(self) -> None:
        """Make the namespace and its wire."""
        inside = f"aein{self.number}"
        ip("netns", "add", self.name)
        ip("link", "add", self.outside, "type", "veth", "peer", "name", inside, "netns", self.name)
        ip("address", "add", f"{self.host}/24", "dev", self.outside)
        ip("link", "set", self.outside, "up")
        ip("-n", self.name, "address", "add", f"{self.address}/24", "dev", inside)
        ip("-n", self.name, "link", "set", inside, "name", "eth0")
        for device in ("lo", "eth0"):
            ip("-n", self.name, "link", "set", device, "up")
        ip("-n", self.name, "route", "add", "default", "via", self.host)

    def unplug(self) -> None:
        """Remove them. The wire goes with the namespace."""
        for line in (("link", "delete", self.outside), ("netns", "delete", self.name)):
            with contextlib.suppress(subprocess.CalledProcessError):
                ip(*line)

    @contextmanager
    def cut_off(self) -> Iterator[None]:
        """No packet gets through, either way; nobody is told."""
        ip("link", "set", self.outside, "down")
        try:
            yield
        finally:
            ip("link", "set", self.outside, "up")

    def die(self) -> None:
        """End everything that runs on it at once, as when its power fails; its disk stays."""
        with self.cut_off():  # what the engine and the client would still send does not get through
            self._kill("nomad")  # first: it would start the containers again
            _remove_containers(self)
            self._kill("")

    def start_again(self) -> None:
        """After :meth:`die`: what there is before :meth:`start_engine`."""

    def _kill(self, part: str) -> None:
        """Kill what runs in its namespace and whose program's path ends with this."""
        pids = ip("netns", "pids", self.name).split()
        for pid in pids:
            with contextlib.suppress(OSError):  # it has ended, or is no child of ours
                if part in Path(f"/proc/{pid}/exe").readlink().name:
                    os.kill(int(pid), signal.SIGKILL)
                    os.waitpid(int(pid), 0)  # the engine would take what is not reaped for one that runs

    def containers(self) -> list[str]:
        """What its engine has, running or not."""
        with contextlib.closing(docker.DockerClient(base_url=self.socket, timeout=scaled(30))) as client:
            return [str(container.name) for container in client.containers.list(all=True, ignore_removed=True)]

    def start_engine(self, mark: str) -> None:
        """Start its Docker engine, and load the image into that."""
        dockerd = shutil.which("dockerd", path=_PATHS)
        assert dockerd is not None, "dockerd is not installed"
        argv = [dockerd, "--host", self.socket, "--data-root", f"{self.root}/docker", "--exec-root", f"{self.root}/x"]
        argv += ["--pidfile", f"{self.root}/d.pid", "--bip", f"10.213.{100 + self.number}.1/24", "--iptables=true"]
        self._start(argv, mark, "dockerd.log")
        wait_for(self._engine_answers, START_S, lambda: processes.last_words(self.root / "dockerd.log"))
        saved = subprocess.Popen(["docker", "save", IMAGE], stdout=subprocess.PIPE)
        assert saved.stdout is not None
        with saved.stdout:
            load = ["docker", "--host", self.socket, "load", "--quiet"]
            subprocess.run(load, stdin=saved.stdout, check=True)
        assert saved.wait() == 0

    def start_client(self, program: Path, server_rpc: int, mark: str) -> None:
        """Start its Nomad client, of the server that has this port."""
        (self.root / "store").mkdir(exist_ok=True)
        (self.root / "client.hcl").write_text(self.client_config(server_rpc, str(self.root)))
        argv = [str(program), "agent", "-config", str(shipped.path("nomad/dev.hcl"))]
        self._start([*argv, "-config", f"{self.root}/client.hcl"], mark, "client.log", DOCKER_HOST=self.socket)

    def client_config(self, server_rpc: int, root: str, interface: str = "eth0") -> str:
        """What its Nomad client is configured with, whose data is in ``root``."""
        return f"""name = "{self.name}"
data_dir = "{root}/n"
bind_addr = "0.0.0.0"
advertise {{
  http = "{self.address}"
  rpc  = "{self.address}"
  serf = "{self.address}"
}}
ports {{
  http = {_CLIENT_HTTP}
  rpc  = {_CLIENT_RPC}
}}
server {{ enabled = false }}
client {{
  enabled           = true
  servers           = ["{self.host}:{server_rpc}"]
  network_interface = "{interface}"
  host_volume "agentenv-images" {{ path = "{root}/store" }}
  meta {{ agentenv_data_dir = "{root}/n" }}
}}
"""

    def _start(self, argv: list[str], mark: str, log: str, **environment: str) -> int:
        """Start a program in the namespace."""
        nsenter = shutil.which("nsenter") or "nsenter"
        wanted = {"PATH": _PATHS, "HOME": str(self.root), **environment}
        return processes.start([nsenter, f"--net=/run/netns/{self.name}", *argv], mark, wanted, self.root / log, {})

    def _engine_answers(self) -> bool:
        return subprocess.run(["docker", "--host", self.socket, "version"], capture_output=True).returncode == 0


@dataclass(frozen=True)
class TwoNodes:
    """What tests use; ``nodes`` by their place in the list."""

    address: str
    nodes: tuple[Node, Node]
    start: Callable[[Node], None]
    """Start what runs on a node."""

    @property
    def nomad(self) -> NomadHttp:
        return NomadHttp(self.address)

    def settings(self, job_id: str, **given: Any) -> NomadSettings:
        wanted = {"address": self.address, "job_id": job_id, "image": IMAGE, "build_image": False, "cpu_mhz": 20}
        return NomadSettings.model_validate({**wanted, "memory_mib": 1024, "memory_oversubscription": True, **given})

    def id_of(self, node: Node) -> str:
        """Nomad's id of a node."""
        ready = [one for one in self.nomad.get("/v1/nodes") if one["Status"] == "ready"]
        return next(str(one["ID"]) for one in ready if one["Name"] == node.name)

    def node_of(self, container_id: str) -> Node:
        """Where a container runs."""
        name = self.nomad.get(f"/v1/allocation/{allocation_of(container_id)}")["NodeName"]
        return next(node for node in self.nodes if node.name == name)


def ip(*words: str) -> str:
    return _run("ip", *words)


def _run(*argv: str) -> str:
    return subprocess.run(argv, check=True, capture_output=True, text=True, env={"PATH": _PATHS}).stdout


@contextmanager
def two_nodes(root: Path, program: Path, kind: Callable[[Path, int], Node] = Node) -> Iterator[TwoNodes]:
    """Two clients with the image in each engine, and their server. Nothing is left of them afterwards."""
    for left in processes.values(_MARK):  # a killed run's: there is one such network on a machine
        _end(Path(left), f"{_MARK}={left}", _nodes(Path(left), Node))
    mark, nodes = f"{_MARK}={root}", _nodes(root, kind)
    between_nodes = ["FORWARD", "-i", "aewire+", "-o", "aewire+", "-j", "ACCEPT"]  # a Docker engine forbids it
    _run("iptables", "-I", *between_nodes)
    try:
        for node in nodes:
            node.unplug()  # of a run that was killed before it started anything in it
            node.root.mkdir()
            node.plug_in()
        address = _start_server(root, program, mark)

        def start(node: Node) -> None:
            node.start_engine(mark)
            node.start_client(program, int(address.rpartition(":")[2]) + 1, mark)

        found = TwoNodes(address, nodes, start)
        with ThreadPoolExecutor() as pool:
            list(pool.map(start, nodes))
        wait_for(lambda: _ready(found), START_S, lambda: _words(root))
        yield found
    finally:
        _run("iptables", "-D", *between_nodes)
        _end(root, mark, nodes)


def _nodes(root: Path, kind: Callable[[Path, int], Node]) -> tuple[Node, Node]:
    return kind(root / "1", 1), kind(root / "2", 2)


def _start_server(root: Path, program: Path, mark: str) -> str:
    """The server's address; its RPC port is the next one."""
    ports = wait_for(_two_in_a_row, 30.0)
    (root / "server.hcl").write_text(f"""name = "server"
data_dir = "{root}/s"
bind_addr = "0.0.0.0"
advertise {{
  http = "127.0.0.1"
  rpc  = "10.213.1.1"
  serf = "127.0.0.1"
}}
ports {{
  http = {ports.http}
  rpc  = {ports.rpc}
  serf = {ports.serf}
}}
server {{
  enabled           = true
  bootstrap_expect  = 1
  heartbeat_grace   = "{scaled(8):g}s"
  min_heartbeat_ttl = "{scaled(4):g}s"
}}
client {{ enabled = false }}
""")
    argv = [str(program), "agent", "-config", str(shipped.path("nomad/dev.hcl")), "-config", f"{root}/server.hcl"]
    processes.start(argv, mark, {"PATH": _PATHS, "HOME": str(root)}, root / "server.log", {})
    return f"http://127.0.0.1:{ports.http}"


def _two_in_a_row() -> Ports | None:
    """Free ports of which RPC is HTTP's next: the clients' configuration says it so."""
    found = Ports.free()
    with contextlib.suppress(OSError), socket.socket() as probe:
        probe.bind(("127.0.0.1", found.http + 1))
        return Ports(found.http, found.http + 1, found.serf)
    return None


def _ready(found: TwoNodes) -> bool:
    try:
        nodes = found.nomad.get("/v1/nodes")
    except SandboxUnavailableError:
        return False
    return len([node for node in nodes if agent.node_lacks([node]) is None]) == len(found.nodes)


def _words(root: Path) -> str:
    logs = [root / "server.log", *(root / number / "client.log" for number in ("1", "2"))]
    return "\n".join(processes.last_words(log) for log in logs)


def _end(root: Path, mark: str, nodes: tuple[Node, Node]) -> None:
    for node in nodes:
        _remove_containers(node)
    for name in ("nomad", "dockerd"):
        some = [process for process in processes.find(mark) if any(name in word for word in process.argv[:4])]
        processes.end(mark, some, grace_s=20.0)
    processes.end(mark, processes.find(mark), grace_s=5.0)
    for node in nodes:
        node.unplug()
    agent.remove(agent.AgentPlace(root))


def _remove_containers(node: Node) -> None:
    with contextlib.suppress(docker.errors.DockerException):
        client = docker.DockerClient(base_url=node.socket, timeout=scaled(30))
        try:
            for container in client.containers.list(all=True, ignore_removed=True):
                container.remove(force=True)
        finally:
            client.close()
