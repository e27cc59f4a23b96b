"""A farm on the test cluster, as the contract and security suites use it: quick to start, and breakable."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from uuid import uuid4

from agentenv.config import ContainerSettings, NomadSettings
from agentenv.slots.backends.nomad.backend import NomadBackend


class KillableNomad(NomadBackend):
    """A backend of which a test may kill containers, on a cluster whose Docker engine is this machine's."""

    def kill_container(self, container_id: str) -> None:
        """What ``docker kill`` does; Nomad is not told."""
        subprocess.run(["docker", "kill", docker_name(container_id)], check=True, capture_output=True)


def allocation_of(container_id: str) -> str:
    """The allocation a container is of: what follows the dot counts its task's restarts."""
    return container_id.partition(".")[0]


def docker_name(container_id: str) -> str:
    """The container of an allocation, as Nomad's docker driver names it."""
    return f"sandbox-{allocation_of(container_id)}"


def first_pid(container_id: str) -> int:
    """The container's first process, as this machine sees it."""
    format_ = ["--format", "{{.State.Pid}}"]
    found = subprocess.run(["docker", "inspect", *format_, docker_name(container_id)], check=True, capture_output=True)
    return int(found.stdout)


def nomad_farm(address: str, containers: ContainerSettings, **settings: object) -> KillableNomad:
    """A backend over a job of its own, gone when it is closed."""
    wanted: dict[str, object] = {
        "address": address,
        "job_id": f"test-{uuid4().hex[:8]}",
        "build_image": False,
        "cpu_mhz": 20,
        "memory_mib": 1024,
        "memory_oversubscription": True,
        **settings,
    }
    return KillableNomad(containers, NomadSettings.model_validate(wanted))


async def paused(pid: int, seconds: float) -> None:
    """Stop a process for so long."""
    os.kill(pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(seconds)
    finally:
        os.kill(pid, signal.SIGCONT)
