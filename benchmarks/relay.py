"""A container reached directly and through a relay, which is a process of its own.

``python -m benchmarks.relay ID=URL`` is that process; it ends with its input.
"""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from agentenv.api.farm_server.relay import serve_relay
from agentenv.config import ContainerSettings, PoolSettings
from agentenv.containers.handle import ContainerHandle
from agentenv.executor.tool_executor import ToolExecutor
from agentenv.slots.backends.attached import AttachedBackend
from agentenv.slots.backends.base import ContainerStarted
from agentenv.slots.backends.local import LocalBackend
from agentenv.slots.pool import SlotPool
from agentenv.tools.catalog import ToolCatalog
from benchmarks.processes import cpu_s


@dataclass(frozen=True)
class Relayed:
    """A container, directly and through a relay."""

    direct: ContainerHandle
    relayed: ContainerHandle
    relay_pid: int

    def relay_cpu_s(self) -> float:
        """CPU time that the relay has used."""
        return cpu_s(self.relay_pid)


@asynccontextmanager
async def relayed_container(slots: int) -> AsyncIterator[Relayed]:
    """A container of so many slots of the local backend, and a relay in front of it."""
    async with LocalBackend(ContainerSettings(slots_per_container=slots)) as backend:
        await backend.scale(1)
        handle = await _started(backend)
        arguments = ("-m", "benchmarks.relay", f"{handle.id}={handle.base_url}")
        relay = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdin=PIPE, stdout=PIPE)
        assert relay.stdin is not None
        assert relay.stdout is not None
        try:
            url = (await relay.stdout.readline()).decode().strip()
            yield Relayed(handle, replace(handle, base_url=f"{url}/c/{handle.id}"), relay.pid)
        finally:
            relay.stdin.close()
            await relay.wait()


async def _started(backend: LocalBackend) -> ContainerHandle:
    async for event in backend.events():
        if isinstance(event, ContainerStarted):
            return event.handle
    raise RuntimeError("the container did not start")


@asynccontextmanager
async def executor_of(handle: ContainerHandle) -> AsyncIterator[ToolExecutor]:
    """Calls to this container."""
    settings = PoolSettings(min_containers=1, max_containers=1, acquire_timeout_s=600)
    async with (
        SlotPool(AttachedBackend([handle]), settings) as pool,
        ToolExecutor(pool, ToolCatalog.builtin()) as opened,
    ):
        yield opened


async def _main(container: str, base_url: str) -> None:
    async def lookup(asked: str) -> str | None:
        return base_url if asked == container else None

    async with serve_relay(lookup) as url:
        print(url, flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1].split("=", 1)))
