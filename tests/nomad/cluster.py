"""A Nomad cluster for tests: a server and a client as processes of their own, on free ports, in a directory
of their own, over this machine's Docker engine (started where none runs).

Server and client are apart so that a test can kill or restart either, as it happens on a real cluster.
Nothing here touches another agent on the machine; job ids carry a prefix no other session has.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import secrets
import shutil
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import docker
from docker.errors import NotFound

from agentenv import shipped
from agentenv.config import NomadSettings
from agentenv.dev import agent, docker_engine, processes
from agentenv.dev.agent import AgentPlace, Ports, Role
from agentenv.dev.cluster import containers_of, end_abandoned, remove_container
from agentenv.errors import SandboxUnavailableError
from agentenv.image import IMAGE, connect
from agentenv.slots.backends.nomad.job import hcl
from tests.nomad.containers import healthy, url_of
from tests.nomad.nomad_http import NomadHttp
from tests.waiting import START_S, wait_for

T = TypeVar("T")
ATTEMPTS = 3
CPU_GROUPS = Path("/sys/fs/cgroup/cpu")
"""Of cgroup v1."""
WEIGHT = 8 * 1024
"""Of all containers together, and of all other tasks of Nomad."""


@dataclass
class Agent:
    """One nomad process of the cluster."""

    place: AgentPlace
    program: Path
    ports: Ports
    role: Role
    server_rpc: int
    engine_fd: int
    pid: int = 0

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.ports.http}"

    def start(self) -> None:
        """Start the process; does not wait until it is of use."""
        self.pid = agent.launch(
            self.place,
            self.program,
            self.ports,
            name=f"test-{self.role.value}",
            role=self.role,
            server_rpc=self.server_rpc,
            engine_fd=self.engine_fd,
        )

    def kill(self) -> None:
        """SIGKILL to the agent alone: its loggers, its executors and the containers live on."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)

    def restart(self) -> None:
        """Kill it and start it."""
        self.kill()
        self.start()

    def stop(self) -> None:
        """End the agent in order, then everything it left running."""
        agent.stop(self.place)


@dataclass
class Cluster:
    """What tests use. ``address`` is the server's; ``data_dir`` the client's."""

    server: Agent
    client: Agent
    docker: docker.DockerClient
    image: str = IMAGE
    prefix: str = field(default_factory=lambda: f"t{secrets.token_hex(3)}")
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    @property
    def address(self) -> str:
        return self.server.address

    @property
    def data_dir(self) -> Path:
        return self.client.place.data_dir

    @property
    def nomad(self) -> NomadHttp:
        return NomadHttp(self.address)

    def job_id(self, name: str = "job") -> str:
        """A job id that nobody else has, now or before."""
        return f"{self.prefix}-{next(self._numbers)}-{name}"

    def settings(self, **given: Any) -> NomadSettings:
        """Settings of a farm on this cluster, under a job id of its own unless one is given."""
        return NomadSettings(**{"address": self.address, "job_id": self.job_id("farm"), "image": self.image, **given})

    def run(self, job_id: str, spec: Mapping[str, object], *, token: str | None = None, **variables: object) -> str:
        """Register the shipped job; ``spec`` is its containers'. With the token given, else put there: the token."""
        if token is None:
            token = secrets.token_hex(32)
            self.nomad.put_token(job_id, token)
        self.nomad.put("/v1/jobs", {"Job": self.parse(job_id, spec, **variables)})
        return token

    def parse(self, job_id: str, spec: Mapping[str, object], **variables: object) -> dict[str, Any]:
        """The shipped job, as Nomad understands it."""
        text = shipped.path("nomad/sandbox.nomad.hcl").read_text()
        values = {"job_id": job_id, "image": self.image, "spec": json.dumps(spec), **variables}
        job: dict[str, Any] = self.nomad.parse_job(text, {name: hcl(value) for name, value in values.items()})
        return job

    def allocations(self, job_id: str) -> list[dict[str, Any]]:
        """Every allocation of the job, with all there is to know of each."""
        stubs = self.nomad.get(f"/v1/job/{job_id}/allocations", all="true") or []
        return [self.nomad.get(f"/v1/allocation/{stub['ID']}") for stub in stubs]

    def serving(self, job_id: str, count: int = 1, *, deadline_s: float = START_S) -> dict[str, str]:
        """Wait until ``count`` containers of the job answer: allocation id → base URL."""

        def urls() -> dict[str, str]:
            running = [one for one in self.allocations(job_id) if one["ClientStatus"] == "running"]
            found = {one["ID"]: url for one in running if (url := url_of(one)) is not None}
            return {one: url for one, url in found.items() if healthy(url)}

        return wait_for(lambda: found if len(found := urls()) >= count else None, deadline_s, lambda: self.tell(job_id))

    def containers(self) -> list[docker.models.containers.Container]:
        """The Docker containers of this cluster."""
        return containers_of(self.docker, self.client.place)

    def container(self, allocation_id: str) -> docker.models.containers.Container:
        """The Docker container of one allocation."""
        return self.docker.containers.get(f"sandbox-{allocation_id}")

    def logs(self, allocation_id: str, kind: str = "stdout", task: str = "sandbox") -> str:
        """What a task wrote."""
        place = self.data_dir / "alloc" / allocation_id / "alloc" / "logs"
        return "".join(path.read_text(errors="replace") for path in sorted(place.glob(f"{task}.{kind}.*")))

    def purge(self, job_id: str) -> None:
        """Stop and forget the job; returns when its allocations are over and their containers gone."""
        ids = [one["ID"] for one in self.allocations(job_id)]
        self.nomad.purge(job_id)
        for one in ids:
            wait_for(lambda one=one: self._has_no_container(one), START_S, lambda: self.tell(job_id))  # type: ignore[misc]

    def _has_no_container(self, allocation_id: str) -> bool:
        try:
            self.container(allocation_id)
        except NotFound:
            return True
        return False

    def tell(self, job_id: str) -> str:
        """What Nomad has to say of the job, for a failing test's message."""
        lines = []
        for one in self.allocations(job_id):
            lines.append(f"{one['ID']} {one['ClientStatus']} {one.get('ClientDescription')}")
            for task, state in (one.get("TaskStates") or {}).items():
                lines += [
                    f"  {task}: {event['Type']}: {event['DisplayMessage']}" for event in state.get("Events") or []
                ]
                lines += [
                    f"  {task}: {kind} {self.logs(one['ID'], kind, task)[-500:]}" for kind in ("stdout", "stderr")
                ]
        return "\n".join(lines) or json.dumps(self.nomad.get(f"/v1/job/{job_id}/evaluations"))[:1000]

    def wait_ready(self) -> None:
        """Return when the client is ready and its Docker driver healthy."""
        with agent.client(self.address) as nomad:
            agent.wait_ready(nomad)


@contextmanager
def running_cluster(root: Path, program: Path) -> Iterator[Cluster]:
    """A fresh cluster in ``root``; everything of it is gone afterwards, and the engine too if it was
    started for it. What a run that was killed left is removed first. Call with the image built."""
    end_abandoned()
    try:
        with agent.owned(root), docker_engine.using() as hold:
            if docker_engine.ensure():  # another's engine keeps its weight
                _give_weight()
            with contextlib.closing(connect()) as client:
                found = _start(root, program, hold, client)
                try:
                    yield found
                finally:
                    _end(found)
    finally:
        docker_engine.stop()


def _give_weight() -> None:
    """On cgroup v1 all containers together weigh as much as one process outside: beside 20 others of a loaded machine
    they would have a tenth of a processor, and leases end since nobody renews them in time."""
    if (CPU_GROUPS / "cpu.shares").exists():
        for group in (CPU_GROUPS / "docker", CPU_GROUPS / "nomad"):
            group.mkdir(exist_ok=True)
            (group / "cpu.shares").write_text(str(WEIGHT))


def _start(root: Path, program: Path, hold: int, client: docker.DockerClient) -> Cluster:
    """Free ports may be taken by the time they are used: then again with others."""
    for attempt in range(1, ATTEMPTS + 1):
        ports, others = Ports.free(), Ports.free()
        server = Agent(AgentPlace(root / f"s{attempt}"), program, ports, Role.server, ports.rpc, hold)
        runner = Agent(AgentPlace(root / f"c{attempt}"), program, others, Role.client, ports.rpc, hold)
        cluster = Cluster(server, runner, client)
        server.start()
        runner.start()
        try:
            with agent.client(server.address) as nomad:
                agent.wait_ready(nomad, partial(_dead, server, runner), unregistered=runner.restart)
        except SandboxUnavailableError as error:
            words = f"{processes.last_words(server.place.log)}\n{processes.last_words(runner.place.log)}"
            _end(cluster)
            if attempt == ATTEMPTS or "address already in use" not in words:
                raise SandboxUnavailableError(f"{error.message}\n{words}") from error
        else:
            return cluster
    raise AssertionError("unreachable")


def _dead(*agents: Agent) -> int | None:
    return next((code for one in agents if (code := processes.reap(one.pid)) is not None), None)


def _end(cluster: Cluster) -> None:
    with contextlib.suppress(SandboxUnavailableError):
        jobs = cluster.nomad.get("/v1/jobs", namespace="*")
        for job in jobs:
            cluster.nomad.stop(job["ID"], namespace=job["Namespace"])
        for job in jobs:
            cluster.nomad.purge(job["ID"], namespace=job["Namespace"])
    for one in (cluster.client, cluster.server):
        one.stop()
    for container in cluster.containers():
        remove_container(container)
    for one in (cluster.client, cluster.server):
        agent.remove(one.place)
        shutil.rmtree(one.place.root, ignore_errors=True)
