"""Starts what is measured: the real local farm, and the one-bwrap-per-call comparison behind the same client."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from agentenv.config import ContainerSettings, ExecutorSettings, PoolSettings
from agentenv.executor.tool_executor import ToolExecutor
from agentenv.slots.backends.base import ContainerBackend, ContainerEvent, ContainerHandle, ContainerStarted
from agentenv.slots.backends.local import LocalBackend
from agentenv.slots.pool import SlotPool
from agentenv.tools.catalog import ToolCatalog
from benchmarks.measure import process_tree


@dataclass
class Farm:
    """A running farm of one container; ``pid`` is the container's outermost process."""

    pool: SlotPool
    executor: ToolExecutor
    pid: int


def _children() -> set[int]:
    return {process.pid for process in process_tree(os.getpid()) if process.parent == os.getpid()}


@asynccontextmanager
async def local_farm(slots: int, containers: int = 1) -> AsyncIterator[Farm]:
    """The real thing: sandbox server, supervisor and slots as a child process."""
    before = _children()
    settings = PoolSettings(min_containers=containers, max_containers=containers, acquire_timeout_s=600)
    backend = LocalBackend(ContainerSettings(slots_per_container=slots))
    async with _opened(backend, settings) as (pool, executor):
        yield Farm(pool, executor, min(_children() - before))


@asynccontextmanager
async def bwrap_per_call_farm(slots: int) -> AsyncIterator[Farm]:
    """The comparison, in a process of its own as the real server is."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.bwrap_per_call", str(slots)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdin is not None
    port = int(await process.stdout.readline())
    try:
        backend = _FixedBackend(ContainerHandle("bwrap-per-call", 0, f"http://127.0.0.1:{port}", "none", slots))
        settings = PoolSettings(min_containers=1, max_containers=1, acquire_timeout_s=600)
        async with _opened(backend, settings) as (pool, executor):
            yield Farm(pool, executor, process.pid)
    finally:
        process.stdin.close()
        await process.wait()


@asynccontextmanager
async def _opened(backend: ContainerBackend, settings: PoolSettings) -> AsyncIterator[tuple[SlotPool, ToolExecutor]]:
    pool = SlotPool(backend, settings)
    async with pool, ToolExecutor(pool, ToolCatalog.builtin(), ExecutorSettings()) as executor:
        async with executor.open("warm-up") as session:
            result = await session.call("bash", {"command": "true"})
            assert result.exit_code == 0, result
        yield pool, executor


class _FixedBackend:
    """One container that is already running."""

    name = "fixed"

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
