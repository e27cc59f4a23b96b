"""The way to the Docker engine of this machine (or of ``DOCKER_HOST``)."""

from __future__ import annotations

import docker
from docker.errors import DockerException

from agentenv.errors import SandboxUnavailableError

_TIMEOUT_S = 60


def connect(*, timeout_s: int = _TIMEOUT_S) -> docker.DockerClient:
    """A client of the engine, which answered. Close it. Raises SandboxUnavailableError when none answers."""
    client = None
    try:
        client = docker.from_env(timeout=timeout_s)
        client.ping()
    except (DockerException, OSError) as error:
        if client is not None:
            client.close()
        raise SandboxUnavailableError(
            f"no Docker engine answers: {error}",
            next_step="start it (systemctl start docker), or let `make nomad-dev` start one",
        ) from error
    return client
