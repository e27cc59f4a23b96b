"""A farm service as a process of its own (``agentenv farm serve``), and pools that are its clients."""

from __future__ import annotations

import asyncio
import secrets
import shutil
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from agentenv.config import PoolSettings
from agentenv.farm_client.access import FarmAccess
from agentenv.farm_client.client import FarmClient, reachable
from agentenv.farm_client.pool import FarmPool
from benchmarks.processes import root_of
from tests.farm_process import FarmProcess

PATIENCE_S = 600.0
STANDS_BY_S = 5.0
"""After which a standby that listens has looked at the lock."""
_ELSEWHERE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
"""In a pid namespace of its own, so that the standby cannot see that it has died, as if it were on another machine."""
_NOMAD = """
[nomad]
job_id = "{job_id}"
memory_mib = 512
memory_oversubscription = true
purge_job_on_shutdown = true
"""
_SETTINGS = """
backend = "{backend}"
relay_url = "{relay_url}"
[pool]
min_containers = {containers}
max_containers = {containers}
[containers]
slots_per_container = {slots}
[limits]
asks_per_s = 1e6
burst = 1_000_000
"""


@dataclass(frozen=True)
class Access:
    """How the service is used. ``token`` is for every run."""

    url: str
    token: str
    slots: int
    """Of the whole farm."""

    def pool(self, run: str = "bench", *, lease_ttl_s: float = 30.0) -> FarmPool:
        """A client, not opened yet, that waits long for the service."""
        settings = PoolSettings(acquire_timeout_s=PATIENCE_S, lease_ttl_s=lease_ttl_s)
        return FarmPool(FarmAccess((self.url,), self.token, run), settings=settings)

    def client(self, run: str = "bench") -> FarmClient:
        """The same for single requests."""
        return FarmClient(self.url, self.token, run=run)

    async def settled(self, within_s: float = PATIENCE_S) -> None:
        """Until every slot is free. Raises TimeoutError."""
        async with self.client() as client, asyncio.timeout(within_s):
            while (await client.info()).load.slots.get("free", 0) < self.slots:
                await asyncio.sleep(0.05)

    async def waiting(self, asks: int) -> None:
        """Until so many asks wait. Raises TimeoutError."""
        async with self.client() as client, asyncio.timeout(PATIENCE_S):
            while (await client.info()).load.waiting < asks:
                await asyncio.sleep(0.002)

    async def held(self) -> int:
        """Leases of all runs, as the service counts them."""
        async with self.client() as client:
            return sum(sum(run.held.values()) for run in (await client.runs()).runs)


@dataclass(frozen=True)
class FarmService(Access):
    """A service of this machine that may be killed, and started again at the same address."""

    process: FarmProcess

    async def roots(self) -> set[int]:
        """The outermost process of each of its containers."""
        async with self.client() as client:
            listed = await client.containers()
        return {root for one in listed.containers if (root := root_of(one.id)) is not None}

    async def restart(self) -> None:
        """SIGKILL, and at once the next."""
        await self.process.kill()
        await self.process.start()

    async def granting_again(self, pool: FarmPool) -> float:
        """:meth:`restart`; seconds from the SIGKILL until ``pool``, which waits since then, has a slot. One is free."""
        began = time.perf_counter()
        restart = asyncio.create_task(self.restart())
        lease = await pool.lease("after the kill")
        took_s = time.perf_counter() - began
        await restart
        await lease.release()
        return took_s


@asynccontextmanager
async def with_standby(slots: int) -> AsyncIterator[tuple[FarmProcess, FarmPool]]:
    """A service over a container of a new Nomad job, with another that stands by, and a client that knows both.
    Yields the one that leads, and the client. The cluster is that of the environment; the job is purged."""
    directory = Path(mkdtemp(prefix="agentenv-bench-"))
    nomad = _NOMAD.format(job_id=f"agentenv-bench-{secrets.token_hex(4)}")
    settings = _SETTINGS.format(backend="nomad", containers=1, slots=slots, relay_url="") + nomad
    ports = [free_port(), free_port()]
    leader = FarmProcess(directory, settings=settings, port=ports[0], beneath=_ELSEWHERE)
    standby = FarmProcess(directory, settings=settings, port=ports[1])
    following: asyncio.Task[Any] | None = None
    try:
        await leader.start()
        access = FarmAccess(tuple(f"http://127.0.0.1:{port}" for port in ports), await leader.token("*"), "bench")
        await Access(leader.url, access.token, slots).settled()
        following = asyncio.create_task(standby.start(within_s=PATIENCE_S))
        async with FarmPool(access, settings=PoolSettings(acquire_timeout_s=PATIENCE_S)) as pool:
            while not await reachable(access.urls[1], 1.0):
                await asyncio.sleep(0.1)
            await asyncio.sleep(STANDS_BY_S)
            yield leader, pool
            await following
    finally:
        if following is not None:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        for process in (leader, standby):  # the last one purges the job
            await process.end(kept=False)
        shutil.rmtree(directory, ignore_errors=True)


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port


@asynccontextmanager
async def farm_service(
    backend: str, containers: int, slots: int, more: str = "", *, relay_url: str = ""
) -> AsyncIterator[FarmService]:
    """A service with so many containers of so many slots, all of them free. ``more``: of its settings file."""
    directory = Path(mkdtemp(prefix="agentenv-bench-"))
    settings = _SETTINGS.format(backend=backend, containers=containers, slots=slots, relay_url=relay_url)
    process = FarmProcess(directory, more, settings=settings)
    try:
        await process.start()
        service = FarmService(process.url, await process.token("*"), containers * slots, process)
        await service.settled()
        yield service
    finally:
        await process.end(kept=backend == "local")
        shutil.rmtree(directory, ignore_errors=True)
