"""One Nomad agent, server and client at once, in a directory of its own."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from agentenv import shipped
from agentenv.config import NomadSettings
from agentenv.deadlines import scaled
from agentenv.dev import processes
from agentenv.errors import SandboxUnavailableError
from agentenv.locks import is_locked, locked
from agentenv.sandbox.supervisor import syscalls
from agentenv.slots.backends.nomad.client import NomadClient
from agentenv.slots.backends.nomad.explain import NomadError

_MARK = "AGENTENV_CLUSTER"
_OWNER = "owner.lock"
_ENGINE_FD = 9
"""Descriptor on which the agent holds the engine's lock: any number above standard error."""
_START_DEADLINE_S = scaled(120.0)
_STOP_GRACE_S = scaled(20.0)
_ANSWER_S = scaled(5.0)
_REGISTERED_S = scaled(4.0)
"""Time from a leader's election to its first node. A client that registers before its new server has a keyring is
refused, and retries only after 15 to 30 s (``registerRetryIntv``, client/client.go of Nomad 1.11.3)."""
_NO_NODE = "no node"
_OVERSUBSCRIPTION = 4
_OURS = range(10_000, 20_000)
"""Ports that no program gets by default: below those the kernel gives out, and those that Nomad gives its tasks."""
_KEEPER = 65_534
"""Whose process an image keeper is (variable ``user`` of nomad/images.nomad.hcl)."""
_KEPT = ("PATH", "HOME", "TMPDIR", "DOCKER_HOST", "LANG")


@dataclass(frozen=True)
class Ports:
    """Ports of one agent, on loopback."""

    http: int
    rpc: int
    serf: int

    @classmethod
    def free(cls, *, http: int = 0) -> Ports:
        """Currently unused ports. ``http``: use this one; 0 picks one."""
        first, second, third = itertools.islice(_unused_ports(), 3)
        return cls(http or first, second, third)


@dataclass(frozen=True)
class AgentPlace:
    """Directory of one agent's files. Its path must be short, because sockets are created below it."""

    root: Path

    @property
    def data_dir(self) -> Path:
        """Nomad's ``data_dir``."""
        return self.root / "data"

    @property
    def store(self) -> Path:
        """The store of images that slots have as their root: the client's host volume ``agentenv-images``."""
        return self.root / "store"

    @property
    def trees(self) -> Path:
        """Where containers unpack images, in the store: the client's host volume ``agentenv-images-trees``."""
        return self.store / "trees"

    @property
    def log(self) -> Path:
        """The agent's output."""
        return self.root / "nomad.log"

    @property
    def config(self) -> Path:
        """Ports and directories; merged with the shipped ``nomad/dev.hcl``."""
        return self.root / "agent.hcl"

    @property
    def mark(self) -> str:
        """Environment variable that marks all processes of this agent."""
        return f"{_MARK}={self.root}"


class Role(StrEnum):
    """An agent's role. ``both`` is a cluster in one process; a separate client survives its server."""

    both = "both"
    server = "server"
    client = "client"


def local_config(place: AgentPlace, ports: Ports, name: str, role: Role, server_rpc: int) -> str:
    """Agent configuration that depends on this place and this machine."""
    serves, runs = str(role is not Role.client).lower(), str(role is not Role.server).lower()
    return f'''name     = "{name}"
data_dir = "{place.data_dir}"
ports {{
  http = {ports.http}
  rpc  = {ports.rpc}
  serf = {ports.serf}
}}
server {{
  enabled          = {serves}
  bootstrap_expect = {1 if role is not Role.client else 0}
}}
client {{
  enabled = {runs}
  # Containers reserve what all their slots may use at once. So that several fit on a developer's machine, it
  # offers {_OVERSUBSCRIPTION} times the memory it has; as with local containers, only its real memory limits them.
  memory_total_mb = {_OVERSUBSCRIPTION * _memory_mib()}
  servers = ["127.0.0.1:{server_rpc}"]
  host_volume "agentenv-images" {{
    path = "{place.store}"
  }}
  host_volume "agentenv-images-trees" {{
    path = "{place.trees}"
  }}
  meta {{
    agentenv_data_dir = "{place.data_dir}"
  }}
}}
'''


def _unused_ports() -> Iterator[int]:
    for port in random.sample(_OURS, len(_OURS)):
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            yield port


def _memory_mib() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // (1024 * 1024)


@contextmanager
def owned(directory: Path) -> Iterator[None]:
    """Own all agents whose places are in ``directory``, until this ends; see :func:`abandoned`."""
    with locked(directory / _OWNER):
        yield


def abandoned() -> list[AgentPlace]:
    """Places with running processes whose owner has died, for example a test run that was killed.

    Agents without an owner are meant to outlive the process that started them, and are not included.
    """
    places = [AgentPlace(Path(root)) for root in sorted(processes.values(_MARK))]
    owners = ((place, place.root.parent / _OWNER) for place in places)
    return [place for place, owner in owners if owner.exists() and not is_locked(owner)]


def is_running(place: AgentPlace) -> bool:
    """Whether the agent's process runs, ready or not."""
    return any(process.runs("nomad", "agent") for process in processes.find(place.mark))


def address(place: AgentPlace) -> str | None:
    """The agent's HTTP address, from its configuration; None without one."""
    try:
        lines = place.config.read_text().splitlines()
    except OSError:
        return None
    port = next((line.split("=")[1].strip() for line in lines if line.strip().startswith("http")), None)
    return f"http://127.0.0.1:{port}" if port else None


def launch(
    place: AgentPlace,
    program: Path,
    ports: Ports,
    *,
    name: str,
    role: Role = Role.both,
    server_rpc: int | None = None,
    engine_fd: int,
) -> int:
    """Start the agent's process and return its pid without waiting. ``server_rpc`` is the server's port, for a client.

    The process keeps the engine's lock (``engine_fd``) until it ends. Raises SandboxUnavailableError when the caller
    is not root.
    """
    if os.geteuid() != 0:
        raise SandboxUnavailableError("a Nomad client must run as root", next_step="sudo make nomad-dev")
    place.trees.mkdir(parents=True, exist_ok=True)
    place.trees.chmod(0o1777)
    for directory in (place.store, place.trees):
        os.chown(directory, _KEEPER, _KEEPER)
    place.config.write_text(local_config(place, ports, name, role, server_rpc or ports.rpc))
    argv = [str(program), "agent", "-config", str(shipped.path("nomad/dev.hcl")), "-config", str(place.config)]
    environment = {key: os.environ[key] for key in _KEPT if key in os.environ}
    return processes.start(argv, place.mark, environment, place.log, {_ENGINE_FD: engine_fd})


def start(place: AgentPlace, program: Path, ports: Ports, *, name: str, engine_fd: int) -> str:
    """Start an agent that is server and client, wait until it can run containers, and return its address.

    Raises SandboxUnavailableError with the end of its log when it does not become ready.
    """
    place.log.unlink(missing_ok=True)
    pid = launch(place, program, ports, name=name, engine_fd=engine_fd)
    where = f"http://127.0.0.1:{ports.http}"

    def start_again() -> None:
        nonlocal pid
        kill(place)
        pid = launch(place, program, ports, name=name, engine_fd=engine_fd)

    try:
        with client(where) as nomad:
            wait_ready(nomad, lambda: processes.reap(pid), unregistered=start_again)
    except SandboxUnavailableError as error:
        kill(place)
        raise SandboxUnavailableError(
            f"{error.message}; its last log lines: {processes.last_words(place.log)}", next_step=f"see {place.log}"
        ) from error
    return where


def client(where: str) -> NomadClient:
    """Client for an agent on this machine; NOMAD_* variables are ignored, and its timeout is short."""
    return NomadClient(NomadSettings(address=where), where, timeout_s=_ANSWER_S)


def wait_ready(
    nomad: NomadClient,
    exited: Callable[[], int | None] = lambda: None,
    *,
    unregistered: Callable[[], None] | None = None,
) -> None:
    """Wait until there is a leader and a ready node with a healthy Docker driver.

    ``exited`` returns the agent's exit code once it has ended; ``unregistered`` is called once if no node has
    registered four seconds after there was a leader. Raises SandboxUnavailableError.
    """
    deadline = time.monotonic() + _START_DEADLINE_S
    alone_since: float | None = None
    while (missing := _missing(nomad)) is not None:
        alone_since = None if missing != _NO_NODE else alone_since or time.monotonic()
        if unregistered is not None and alone_since is not None and time.monotonic() - alone_since > _REGISTERED_S:
            unregistered()
            unregistered = alone_since = None
        code = exited()
        if code is not None:
            raise SandboxUnavailableError(f"the Nomad agent ended with {code}", next_step="see the agent's log")
        if time.monotonic() > deadline:
            raise SandboxUnavailableError(
                f"the Nomad agent is not ready after {_START_DEADLINE_S:.0f} s: {missing}",
                next_step="see the agent's log",
            )
        time.sleep(0.1)


def _missing(nomad: NomadClient) -> str | None:
    """The first requirement the agent does not meet yet; None if it is ready."""
    try:
        if not nomad.ask(lambda c: c.status.leader.get_leader()):
            return "no leader"
        return node_lacks(nomad.ask(lambda c: c.nodes.get_nodes()))
    except NomadError as error:
        return f"{nomad.address}: {error.message}"


def node_lacks(nodes: list[dict[str, Any]]) -> str | None:
    """Reason why no node can run containers; None if one can. Pure; ``nodes`` is the reply of ``/v1/nodes``."""
    lacks = _NO_NODE
    for node in nodes:
        driver = (node.get("Drivers") or {}).get("docker") or {}
        if node["Status"] != "ready":
            lacks = f"node {node['Name']} is {node['Status']}"
        elif not driver.get("Healthy"):
            lacks = f"the Docker driver: {driver.get('HealthDescription') or 'not detected'}"
        else:
            return None
    return lacks


def stop(place: AgentPlace) -> None:
    """Shut the agent down, then kill any process it left running."""
    agents = [process for process in processes.find(place.mark) if process.runs("nomad", "agent")]
    processes.end(place.mark, agents, grace_s=_STOP_GRACE_S)
    kill(place)


def kill(place: AgentPlace) -> None:
    """End every marked process: agent, loggers, executors, raw_exec tasks."""
    processes.end_all(place.mark, grace_s=2.0)


def remove(place: AgentPlace) -> None:
    """Unmount everything below the place and remove it. Raises SandboxUnavailableError when that fails."""
    for point in mounts_below(Path("/proc/self/mountinfo").read_text(), place.root.resolve()):
        _unmount(point)
    shutil.rmtree(place.root, ignore_errors=True)
    if place.root.exists():
        raise SandboxUnavailableError(f"{place.root} cannot be removed", next_step="find what uses it: fuser -vm")


def mounts_below(mountinfo: str, root: Path) -> list[str]:
    """Mount points below ``root``, innermost first. Pure."""
    points = [line.split()[4].encode().decode("unicode_escape") for line in mountinfo.splitlines() if line]
    return sorted((point for point in points if Path(point).is_relative_to(root)), key=len, reverse=True)


def _unmount(point: str) -> None:
    try:
        syscalls.umount(point, syscalls.MNT_DETACH)
    except OSError as error:
        raise SandboxUnavailableError(
            f"cannot unmount {point}: {error}", next_step="sudo make nomad-dev-down"
        ) from error
