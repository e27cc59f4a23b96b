"""Connection to the Docker engine of this machine (or of ``DOCKER_HOST``)."""

from __future__ import annotations

import socket

import docker
from docker.errors import DockerException

from agentenv.config import docker_host
from agentenv.deadlines import scaled
from agentenv.errors import SandboxUnavailableError

_TIMEOUT_S = int(scaled(60))


def connect(*, timeout_s: int = _TIMEOUT_S) -> docker.DockerClient:
    """A client of an engine that answered; close it after use. Raises SandboxUnavailableError when no engine
    answers."""
    client = None
    try:
        _knock(docker_host())
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


def _knock(host: str) -> None:
    """Raise OSError when no engine listens on a local socket, where the SDK would leak its own."""
    scheme, _, path = host.partition("://")
    if scheme == "unix":
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(path)
