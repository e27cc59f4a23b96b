"""What the executor's contract tests share."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
from dataclasses import replace
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from agentenv.containers.handle import ContainerHandle
from agentenv.errors import AgentEnvError
from agentenv.executor.session import ToolSession
from agentenv.slots.backends.fake import FakeBackend
from agentenv.slots.backends.local import LocalBackend
from agentenv.slots.lease import SlotLease
from agentenv.slots.pool import SlotPool
from agentenv.wire.leases import ActionReply, LeaseAction, LeaseKey, SlotRequest
from agentenv.wire.roots import RootSpec
from tests.faults.proxy import Proxy
from tests.nomad.farm import KillableNomad, first_pid, paused
from tests.waiting import eventually


async def sh(session: ToolSession, command: str) -> str:
    """stdout of a command, whatever its exit code; a fault fails the test."""
    result = await session.call("bash", {"command": command}, timeout_s=60)
    assert result.fault == "none", result
    return result.stdout


async def until_bash(session: ToolSession, condition: str) -> None:
    """Wait until a shell condition holds in the slot."""

    async def holds() -> bool:
        return (await session.call("bash", {"command": condition})).exit_code == 0

    await eventually(holds)


UNTIL_GO = "until [ -e go ]; do sleep 0.05; done"
"""Runs until :func:`go`."""


async def go(session: ToolSession) -> None:
    """Let ``UNTIL_GO`` end. Not for a bash call: this one would wait for it."""
    await sh(session, "touch go")


OWN = f".{secrets.randbelow(10**6):06d}"
"""Behind the seconds of a test's ``sleep``, by which it is found among those of other tests on the machine: a fake
slot sees them all."""


class Breaker(Protocol):
    """Breaks a container of the backend under test."""

    async def crash_server(self) -> None:
        """The server process of the only container dies; its supervisor starts another."""

    async def kill_container(self, container: ContainerHandle) -> None:
        """The whole container dies at once."""

    async def pause_server(self, seconds: float) -> None:
        """The server answers nothing for so long, then goes on; returns when it goes on."""


class ProxiedLease:
    """A lease whose container is reached through the proxy (the pool itself goes straight)."""

    def __init__(self, lease: SlotLease, port: int) -> None:
        self._lease = lease
        self.direct = lease.container
        """The container itself, not through the proxy."""
        path = urlsplit(lease.container.base_url).path
        self.container = replace(lease.container, base_url=f"http://127.0.0.1:{port}{path}")

    @property
    def key(self) -> LeaseKey:
        return self._lease.key

    @property
    def lost(self) -> AgentEnvError | None:
        return self._lease.lost

    @property
    def root(self) -> RootSpec | None:
        return self._lease.root

    def leave(self) -> None:
        self._lease.leave()

    async def wait_lost(self) -> AgentEnvError:
        return await self._lease.wait_lost()

    async def act(self, action: LeaseAction) -> ActionReply:
        return await self._lease.act(action)

    async def release(self) -> None:
        await self._lease.release()


class ProxiedPool:
    """A pool of one container at a time, whose calls go through the proxy."""

    def __init__(self, pool: SlotPool, proxy: Proxy) -> None:
        self._pool = pool
        self._proxy = proxy

    async def lease_slots(self, request: SlotRequest, *, timeout_s: float | None = None) -> list[ProxiedLease]:
        (lease,) = await self._pool.lease_slots(request, timeout_s=timeout_s)
        port = urlsplit(lease.container.base_url).port
        assert port is not None
        self._proxy.upstream_port = port
        return [ProxiedLease(lease, self._proxy.port)]


class FakeBreaker:
    """Switches of the fake."""

    def __init__(self, backend: FakeBackend) -> None:
        self._backend = backend

    async def crash_server(self) -> None:
        (container,) = self._backend.containers
        self._backend.crash_and_restart(container.id)

    async def kill_container(self, container: ContainerHandle) -> None:
        self._backend.kill(container.id)

    async def pause_server(self, seconds: float) -> None:
        (container,) = self._backend.containers
        self._backend.stall(container.id, seconds)
        await asyncio.sleep(seconds)


class LocalBreaker:
    """Real processes of the local backend, killed by their ids."""

    def __init__(self, backend: LocalBackend) -> None:
        self._backend = backend

    async def crash_server(self) -> None:
        os.kill(self._server(), signal.SIGKILL)

    async def kill_container(self, container: ContainerHandle) -> None:
        os.killpg(self._backend.pids[container.id], signal.SIGKILL)

    async def pause_server(self, seconds: float) -> None:
        await paused(self._server(), seconds)

    def _server(self) -> int:
        (supervisor,) = self._backend.pids.values()
        (server,) = [pid for pid in descendants(supervisor) if b"agentenv.sandbox.serve" in command_line(pid)]
        return server


class NomadBreaker:
    """Docker containers of a Nomad job on this machine: killed as docker does it, their processes by id."""

    def __init__(self, backend: KillableNomad) -> None:
        self._backend = backend

    async def crash_server(self) -> None:
        os.kill(self._server(), signal.SIGKILL)

    async def kill_container(self, container: ContainerHandle) -> None:
        self._backend.kill_container(container.id)

    async def pause_server(self, seconds: float) -> None:
        await paused(self._server(), seconds)

    def _server(self) -> int:
        (container,) = self._backend.status().containers
        (server,) = [pid for pid in descendants(first_pid(container)) if b"agentenv.sandbox.serve" in command_line(pid)]
        return server


def descendants(root: int) -> set[int]:
    """Every process below ``root``."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            pid = int(entry.name)
            parents[pid] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found = {root}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {root}


def command_line(pid: int) -> bytes:
    """Its arguments; empty when it has just ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
