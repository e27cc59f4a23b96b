"""``nomad-dev``: start, stop and inspect a whole cluster on this machine.

No state is stored: processes are found by a mark in their environment, and containers by the location of their files.
So after a crash at any step, the next ``up`` or ``down`` finds everything that is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
from docker.errors import APIError, DockerException

from agentenv.config import ContainerSettings, NomadSettings, PoolSettings, cache_dir
from agentenv.containers.control import ContainerControl
from agentenv.deadlines import scaled
from agentenv.dev import agent, docker_engine, program
from agentenv.dev.agent import AgentPlace, Ports
from agentenv.errors import AgentEnvError, SandboxUnavailableError
from agentenv.executor.tool_executor import ToolExecutor
from agentenv.image import IMAGE, BuildStep, Report, connect, ensure_image, image_status, silent
from agentenv.locks import locked
from agentenv.slots.backends.nomad.api import NomadApi
from agentenv.slots.backends.nomad.backend import NomadBackend
from agentenv.slots.backends.nomad.ending import end_job
from agentenv.slots.backends.nomad.explain import NomadError, opening_error
from agentenv.slots.pool import SlotPool
from agentenv.tools.catalog import ToolCatalog
from agentenv.wire.server import ServerInfo

_CHECK_WITHIN_S = scaled(90.0)
_CHECK_NAME = "agentenv-check"
_ALLOCATION_LABEL = "com.hashicorp.nomad.alloc_id"


@dataclass(frozen=True)
class Cluster:
    """A running cluster. ``started``: the agent was started by this ``up``."""

    place: AgentPlace
    address: str
    started: bool
    check: ServerInfo | None = None


@dataclass(frozen=True)
class ClusterStatus:
    """State of a cluster as seen from outside."""

    agent: str
    address: str | None
    engine: str
    image: str
    jobs: tuple[str, ...] = ()
    containers: tuple[str, ...] = ()
    abandoned: tuple[str, ...] = ()
    """Directories of other clusters whose owner died without ending them; ``down`` removes them too."""

    @property
    def up(self) -> bool:
        """Whether the agent answers."""
        return self.agent == "ready"


def default_place() -> AgentPlace:
    """Directory of the agent of ``make nomad-dev``."""
    return AgentPlace(cache_dir() / "nomad-dev")


def up(
    place: AgentPlace | None = None,
    *,
    http_port: int,
    report: Report = silent,
    name: str = "agentenv-dev",
    check: bool = True,
) -> Cluster:
    """Provide whatever is missing (program, engine, image, agent), then check that a slot answers.

    ``http_port`` 0 takes a free one. Idempotent, also after a crash at any step. Raises SandboxUnavailableError,
    which names the missing part and how to get it.
    """
    if os.geteuid() != 0:  # said before anything is fetched or built
        raise SandboxUnavailableError("a Nomad client needs root", next_step="run it with sudo")
    place = place or default_place()
    with _alone(place), docker_engine.using() as hold:
        found = program.nomad_program(report)
        report(BuildStep("docker", "looking for an engine"))
        docker_engine.ensure()
        report(BuildStep("image", IMAGE))
        ensure_image(IMAGE, report=report)
        report(BuildStep("agent", "starting Nomad"))
        address = _running_address(place)
        started = address is None
        if address is None:
            _clear(place)
            address = agent.start(place, found, Ports.free(http=http_port), name=name, engine_fd=hold)
        described = None
        if check:
            report(BuildStep("slot", "waiting for one to answer"))
            described = check_slot(address)
    return Cluster(place, address, started, described)


def down(place: AgentPlace | None = None, *, report: Report = silent) -> str:
    """Remove the whole cluster: jobs, containers, agent, mounts, files, and the engine if agentenv started it and no
    other process uses it. Clusters whose owner has died are removed too. Returns what was done with the engine.

    Idempotent. Raises SandboxUnavailableError when a part cannot be removed.
    """
    place = place or default_place()
    with _alone(place):
        address = _running_address(place)
        if address is not None:
            report(BuildStep("jobs", "stopping them"))
            with contextlib.suppress(AgentEnvError):  # jobs it cannot stop are removed below
                asyncio.run(_end_jobs(address))
        report(BuildStep("agent", "stopping Nomad"))
        agent.stop(place)
        report(BuildStep("files", str(place.root)))
        _clear(place)
    end_abandoned(report)
    report(BuildStep("docker", "the engine"))
    return docker_engine.stop()


def end_abandoned(report: Report = silent) -> None:
    """Remove clusters whose owner died without ending them.

    Raises SandboxUnavailableError when a part cannot be removed.
    """
    places = agent.abandoned()
    for place in places:
        report(BuildStep("abandoned", str(place.root)))
        agent.kill(place)  # all servers first: one that runs would place the removed containers again
    for place in places:
        _clear(place)


def status(place: AgentPlace | None = None) -> ClusterStatus:
    """The current state. Changes nothing."""
    place = place or default_place()
    address = _running_address(place)
    state = "ready" if address else "starting or broken" if agent.is_running(place) else "not running"
    engine, image, containers = _engine_facts(place)
    jobs: tuple[str, ...] = ()
    if address is not None:
        jobs = tuple(f"{job['ID']}: {job['Status']}" for job in _jobs(address))
    abandoned = tuple(str(other.root) for other in agent.abandoned())
    return ClusterStatus(state, address or agent.address(place), engine, image, jobs, containers, abandoned)


def _engine_facts(place: AgentPlace) -> tuple[str, str, tuple[str, ...]]:
    try:
        client = connect(timeout_s=10)
    except SandboxUnavailableError:
        return "not running", "", ()
    with contextlib.closing(client):
        found = image_status(client)
        image = f"{IMAGE} {'stale' if found.stale else 'current'}" if found.present else f"{IMAGE} missing"
        names = tuple(sorted(container.name for container in containers_of(client, place)))
    return ("running, started by agentenv" if docker_engine.is_ours() else "running"), image, names


def _running_address(place: AgentPlace) -> str | None:
    """Address of this place's agent if it is ready to run containers; None if it must be started or restarted."""
    address = agent.address(place)
    if address is None or not agent.is_running(place):
        return None
    try:
        with agent.client(address) as nomad:
            agent.wait_ready(nomad, lambda: None if agent.is_running(place) else -1)
    except SandboxUnavailableError:
        return None
    return address


def _jobs(address: str) -> list[dict[str, Any]]:
    """All jobs of all namespaces, as listed by Nomad. Raises SandboxUnavailableError."""
    try:
        with agent.client(address) as nomad:
            found: list[dict[str, Any]] = nomad.ask(lambda c: c.jobs.get_jobs(namespace="*"))
            return found
    except NomadError as error:
        raise opening_error(error, address, "*", False) from error


async def _end_jobs(address: str) -> None:
    """End all jobs concurrently, ignoring failures. Raises SandboxUnavailableError when they cannot be listed."""

    async def end(job: dict[str, Any]) -> None:
        named = {"namespace": job["Namespace"], "job_id": job["ID"]}
        api = NomadApi(NomadSettings(address=address).model_copy(update=named), address)
        try:
            await end_job(api)
        finally:
            await api.aclose()

    await asyncio.gather(*map(end, _jobs(address)), return_exceptions=True)


def _clear(place: AgentPlace) -> None:
    """Remove processes, containers, mounts and files that an ended agent left."""
    agent.kill(place)
    try:
        client = connect(timeout_s=30)
    except SandboxUnavailableError:
        pass  # no engine, no containers
    else:
        with contextlib.closing(client):
            for container in containers_of(client, place):
                remove_container(container)
    agent.remove(place)


def containers_of(client: docker.DockerClient, place: AgentPlace) -> list[docker.models.containers.Container]:
    """Nomad's containers whose task directory is in this place."""
    try:
        found = client.containers.list(all=True, filters={"label": _ALLOCATION_LABEL}, ignore_removed=True)
    except (DockerException, OSError) as error:
        raise SandboxUnavailableError(f"the Docker engine failed: {error}", next_step="see the engine's log") from error
    return [one for one in found if _mounted_from(one.attrs.get("Mounts") or [], place.data_dir)]


def remove_container(container: docker.models.containers.Container) -> None:
    """Kill and remove it; one that is gone, or already being removed, is no error."""
    try:
        container.remove(force=True)
    except APIError as error:
        if error.status_code not in (404, 409):
            raise


def _mounted_from(mounts: list[dict[str, str]], directory: Path) -> bool:
    return any(Path(mount.get("Source") or "/").is_relative_to(directory) for mount in mounts)


@contextmanager
def _alone(place: AgentPlace) -> Iterator[None]:
    """Allow one ``up`` or ``down`` of a place at a time. The lock is next to it, because ``down`` removes the place."""
    with locked(place.root.with_name(f"{place.root.name}.lock")):
        yield


def check_slot(address: str) -> ServerInfo:
    """Run a command in a slot of a new container, and return what the container reports (``isolation``, ``proofs``, …).

    Raises SandboxUnavailableError with the reason given by Nomad or the container.
    """
    try:
        return asyncio.run(_slot_answer(address))
    except AgentEnvError as error:
        raise SandboxUnavailableError(
            f"no slot answered: {error.message}",
            next_step=error.next_step or "see docs/nomad.md, 'When it does not start'",
        ) from error


async def _slot_answer(address: str) -> ServerInfo:
    nomad = NomadSettings(
        address=address, job_id=f"{_CHECK_NAME}-{secrets.token_hex(4)}", image=IMAGE, run_name=_CHECK_NAME
    )
    container = ContainerSettings(slots_per_container=1, isolation="full")
    one = PoolSettings(max_containers=1, acquire_timeout_s=_CHECK_WITHIN_S, start_timeout_s=_CHECK_WITHIN_S)
    async with (
        SlotPool(NomadBackend(container, nomad, start_timeout_s=_CHECK_WITHIN_S), one) as pool,
        ToolExecutor(pool, ToolCatalog.builtin()) as executor,
        executor.open(_CHECK_NAME) as session,
    ):
        result = await session.call("bash", {"command": "echo $((6 * 7))"})
        if result.stdout != "42\n":
            raise SandboxUnavailableError(
                f"`echo` gave {result!r}", next_step="`agentenv doctor` says what this machine lacks"
            )
        async with ContainerControl(session.lease.container) as control:
            return await control.info()
