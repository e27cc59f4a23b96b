"""Opens what is measured: the farm on each backend, and the one-bwrap-per-call comparison behind the same client."""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from agentenv.config import ContainerSettings, ExecutorSettings, NomadSettings, PoolSettings
from agentenv.containers.handle import ContainerHandle
from agentenv.executor.tool_executor import ToolExecutor
from agentenv.farm_client.pool import FarmPool
from agentenv.slots.backends.base import ContainerBackend, ContainerEvent, ContainerStarted
from agentenv.slots.backends.local import LocalBackend
from agentenv.slots.pool import SlotPool
from agentenv.tools.catalog import ToolCatalog
from benchmarks.processes import container_roots, process_tree, server_of
from benchmarks.service import farm_service

BACKENDS = ("local", "nomad", "farm")
"""``farm``: a farm service, a process of its own, over local containers."""
BWRAP, BWRAP_LIMITED = "bwrap per call", "bwrap per call, limited"
NOMAD_MEMORY_MIB = 8192
"""Of a container whose slots fill their disks and their memory, one after the other."""


@dataclass
class Farm:
    """A running farm. ``container``: the id of its (first) container. ``roots``: the outermost processes of its
    containers, none when they run elsewhere."""

    pool: SlotPool | FarmPool
    executor: ToolExecutor
    container: str
    roots: frozenset[int] = frozenset()

    @property
    def root(self) -> int | None:
        """The one container's outermost process."""
        return min(self.roots, default=None)

    @property
    def server(self) -> int | None:
        """The one container's sandbox server."""
        return None if self.root is None else server_of(self.root)


def make_backend(name: str, slots: int, *, memory_mib: int = NOMAD_MEMORY_MIB) -> ContainerBackend:
    """A backend of its own for one farm. The Nomad job is new, and purged when the farm closes."""
    settings = ContainerSettings(slots_per_container=slots)
    if name == "local":
        return LocalBackend(settings)
    if name == "nomad":
        from agentenv.slots.backends.nomad.backend import NomadBackend  # late: needs python-nomad

        job = f"agentenv-bench-{secrets.token_hex(4)}"
        nomad = NomadSettings.from_environment(job_id=job, memory_mib=memory_mib, memory_oversubscription=True)
        return NomadBackend(settings, nomad)
    raise ValueError(f"no backend {name!r} of containers")


@asynccontextmanager
async def open_farm(backend: str, slots: int, containers: int = 1) -> AsyncIterator[Farm]:
    """A farm of so many containers of so many slots on one of BACKENDS, or one of the comparisons."""
    if backend in (BWRAP, BWRAP_LIMITED):
        async with _bwrap_per_call(slots, limited=backend == BWRAP_LIMITED) as farm:
            yield farm
        return
    if backend == "farm":
        async with farm_service("local", containers, slots) as service, _used(service.pool()) as farm:
            farm.roots = frozenset(await service.roots())
            yield farm
        return
    before = container_roots()
    async with _opened(make_backend(backend, slots), containers) as farm:
        begun = container_roots() - before
        if backend == "local":  # its containers are our children; others' may begin at the same time
            begun &= {process.pid for process in process_tree(os.getpid())}
        farm.roots = frozenset(begun)
        yield farm


@asynccontextmanager
async def farms(backends: Iterable[str], slots: int) -> AsyncIterator[dict[str, Farm]]:
    """Several at once, by backend: each is measured in turn, in the same run."""
    async with AsyncExitStack() as stack:
        yield {name: await stack.enter_async_context(open_farm(name, slots)) for name in backends}


@asynccontextmanager
async def _bwrap_per_call(slots: int, *, limited: bool) -> AsyncIterator[Farm]:
    """The comparison, in a process of its own as the real server is."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.bwrap_per_call", str(slots), *(["limited"] if limited else [])),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        port = int(await process.stdout.readline())
        handle = ContainerHandle("bwrap-per-call", 0, f"http://127.0.0.1:{port}", "none", slots)
        async with _opened(_FixedBackend(handle), 1) as farm:
            yield farm
    finally:
        process.stdin.close()
        await process.wait()


@asynccontextmanager
async def _opened(backend: ContainerBackend, containers: int) -> AsyncIterator[Farm]:
    settings = PoolSettings(min_containers=containers, max_containers=containers, acquire_timeout_s=600)
    async with _used(SlotPool(backend, settings)) as farm:
        yield farm


@asynccontextmanager
async def _used(pool: SlotPool | FarmPool) -> AsyncIterator[Farm]:
    async with pool, ToolExecutor(pool, ToolCatalog.builtin(), ExecutorSettings()) as executor:
        async with executor.open("warm-up") as session:
            result = await session.call("bash", {"command": "true"})
            assert result.exit_code == 0, result
            container = session.lease.container.id
        yield Farm(pool, executor, container)


class _FixedBackend:
    """One container that is already running."""

    name = "fixed"
    found = 1
    generation = 0

    def __init__(self, handle: ContainerHandle) -> None:
        self._handle = handle
        self._closed = asyncio.Event()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()

    async def scale(self, count: int) -> None:
        """Nothing to do: the container is there."""

    async def events(self) -> AsyncIterator[ContainerEvent]:
        yield ContainerStarted(self._handle)
        await self._closed.wait()

    async def replace(self, container_id: str, reason: str) -> None:
        raise RuntimeError(f"{container_id} broke: {reason}")
