"""One Nomad agent, server and client at once, in a directory of its own."""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from agentenv import shipped
from agentenv.config import NomadSettings
from agentenv.dev import processes
from agentenv.errors import SandboxUnavailableError
from agentenv.locks import is_locked, locked
from agentenv.sandbox.supervisor import syscalls
from agentenv.slots.backends.nomad.client import NomadClient
from agentenv.slots.backends.nomad.explain import NomadError

_MARK = "AGENTENV_CLUSTER"
_OWNER = "owner.lock"
_ENGINE_FD = 9
"""Where the agent holds the Docker engine: any number above standard error."""
_START_DEADLINE_S = 120.0
_STOP_GRACE_S = 20.0
_ANSWER_S = 5.0
_REGISTERED_S = 4.0
"""Between a leader and its first node. A client that asked a moment before its new server had its keyring asks
again after 15 to 30 s only (``registerRetryIntv``, client/client.go of Nomad 1.11.3)."""
_NO_NODE = "no node"
_OVERSUBSCRIPTION = 4
_KEPT = ("PATH", "HOME", "TMPDIR", "DOCKER_HOST", "LANG")


@dataclass(frozen=True)
class Ports:
    """Where one agent listens, on loopback."""

    http: int
    rpc: int
    serf: int

    @classmethod
    def free(cls, *, http: int = 0) -> Ports:
        """Ports nobody uses now; ``http`` may be named."""
        with ExitStack() as stack:
            sockets = [stack.enter_context(socket.socket()) for _ in range(3)]
            for sock in sockets:
                sock.bind(("127.0.0.1", 0))
            first, second, third = (sock.getsockname()[1] for sock in sockets)
        return cls(http or first, second, third)


@dataclass(frozen=True)
class AgentPlace:
    """The directory everything of one agent is in. Short paths, please: sockets live below."""

    root: Path

    @property
    def data_dir(self) -> Path:
        """Nomad's ``data_dir``."""
        return self.root / "data"

    @property
    def log(self) -> Path:
        """What the agent says."""
        return self.root / "nomad.log"

    @property
    def config(self) -> Path:
        """Ports and directories, beside the shipped ``nomad/dev.hcl``."""
        return self.root / "agent.hcl"

    @property
    def mark(self) -> str:
        """What all processes of this agent bear."""
        return f"{_MARK}={self.root}"


class Role(StrEnum):
    """What an agent is. ``both`` is a cluster in one process; a client of its own survives its server."""

    both = "both"
    server = "server"
    client = "client"


def local_config(place: AgentPlace, ports: Ports, name: str, role: Role, server_rpc: int) -> str:
    """The part of the agent's configuration that is this place's, and this machine's, own."""
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
  # Containers reserve what all their slots may use at once; so that several fit on a developer's machine, it
  # promises {_OVERSUBSCRIPTION} times what it has. As with local containers, its own memory is what is left to meet.
  memory_total_mb = {_OVERSUBSCRIPTION * _memory_mib()}
  servers = ["127.0.0.1:{server_rpc}"]
  meta {{
    agentenv_data_dir = "{place.data_dir}"
  }}
}}
'''


def _memory_mib() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // (1024 * 1024)


@contextmanager
def owned(directory: Path) -> Iterator[None]:
    """While this lasts, agents whose places lie in ``directory`` are this process's; see :func:`abandoned`."""
    with locked(directory / _OWNER):
        yield


def abandoned() -> list[AgentPlace]:
    """Places of which something runs though their owner is dead: a test run that was killed, say.

    An agent that never had an owner outlives who started it on purpose, and is not among them.
    """
    places = [AgentPlace(Path(root)) for root in sorted(processes.values(_MARK))]
    owners = ((place, place.root.parent / _OWNER) for place in places)
    return [place for place, owner in owners if owner.exists() and not is_locked(owner)]


def is_running(place: AgentPlace) -> bool:
    """Whether the agent's process lives (whatever it answers)."""
    return any(process.runs("nomad", "agent") for process in processes.find(place.mark))


def address(place: AgentPlace) -> str | None:
    """The HTTP address this place's agent was configured with; None when there is no configuration."""
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
    """Start the agent's process and return its pid at once; ``server_rpc`` is a client's server's port.

    It holds the Docker engine (``engine_fd``) for as long as it lives. Raises SandboxUnavailableError: not
    root.
    """
    if os.geteuid() != 0:
        raise SandboxUnavailableError("a Nomad client must run as root", next_step="sudo make nomad-dev")
    place.root.mkdir(parents=True, exist_ok=True)
    place.config.write_text(local_config(place, ports, name, role, server_rpc or ports.rpc))
    argv = [str(program), "agent", "-config", str(shipped.path("nomad/dev.hcl")), "-config", str(place.config)]
    environment = {key: os.environ[key] for key in _KEPT if key in os.environ}
    return processes.start(argv, place.mark, environment, place.log, {_ENGINE_FD: engine_fd})


def start(place: AgentPlace, program: Path, ports: Ports, *, name: str, engine_fd: int) -> str:
    """Start an agent that is server and client; its address, once it can run containers.

    Raises SandboxUnavailableError with its last words when it does not come up.
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
    """Asks the agent at an address of this machine, whatever the NOMAD_* variables say; impatient."""
    return NomadClient(NomadSettings(address=where), where, timeout_s=_ANSWER_S)


def wait_ready(
    nomad: NomadClient,
    exited: Callable[[], int | None] = lambda: None,
    *,
    unregistered: Callable[[], None] | None = None,
) -> None:
    """Return when there is a leader and a node that is ready with a healthy Docker driver.

    ``exited`` says when waiting is of no use any more; ``unregistered`` is called, once, when there is a leader
    but no node came to it for four seconds. Raises SandboxUnavailableError.
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
    """What the agent still lacks; None: nothing."""
    try:
        if not nomad.ask(lambda c: c.status.leader.get_leader()):
            return "no leader"
        return node_lacks(nomad.ask(lambda c: c.nodes.get_nodes()))
    except NomadError as error:
        return f"{nomad.address}: {error.message}"


def node_lacks(nodes: list[dict[str, Any]]) -> str | None:
    """What keeps the nodes from running containers; None: one can. Pure, on the answer of ``/v1/nodes``."""
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
    """Stop the agent in order, then whatever it left running."""
    agents = [process for process in processes.find(place.mark) if process.runs("nomad", "agent")]
    processes.end(place.mark, agents, grace_s=_STOP_GRACE_S)
    kill(place)


def kill(place: AgentPlace) -> None:
    """End every process that bears the mark: agent, loggers, executors, raw_exec tasks."""
    processes.end_all(place.mark, grace_s=2.0)


def remove(place: AgentPlace) -> None:
    """Unmount what is mounted below the place and remove it. Raises SandboxUnavailableError when it stays."""
    for point in mounts_below(Path("/proc/self/mountinfo").read_text(), place.root):
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
