"""A farm service over containers that are not its own: its process does what a farm does, and nothing else.

``python -m benchmarks.attached containers COUNT SLOTS`` runs fake containers and prints their handles;
``python -m benchmarks.attached farm`` reads handles and serves a farm of them. Both end with their input.
"""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Any

from agentenv.api import serving
from agentenv.api.farm_server.access import Access as Rights
from agentenv.api.farm_server.app import farm_app
from agentenv.api.farm_server.farm import Farm
from agentenv.api.farm_server.settings import AskLimits
from agentenv.api.farm_server.tokens import TokenKeys
from agentenv.config import ContainerSettings, PoolSettings
from agentenv.containers.handle import ContainerHandle
from agentenv.slots.backends.attached import AttachedBackend
from agentenv.slots.backends.base import ContainerStarted
from agentenv.slots.backends.fake import FakeBackend
from benchmarks.service import Access

_AT_ONCE = 250
"""Containers per process: each slot has three descriptors there."""
_LINE_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True)
class AttachedFarm(Access):
    """The service, and its process."""

    pid: int


@asynccontextmanager
async def fake_containers(containers: int, slots: int) -> AsyncIterator[list[ContainerHandle]]:
    """So many fake containers of so many slots, in processes of their own."""
    async with AsyncExitStack() as stack:
        handles: list[ContainerHandle] = []
        while len(handles) < containers:
            count = min(_AT_ONCE, containers - len(handles))
            process = await stack.enter_async_context(_process("containers", str(count), str(slots)))
            for one in await _line(process):
                handles.append(ContainerHandle(**{**one, "index": len(handles)}))
        yield handles


@asynccontextmanager
async def attached_farm(containers: int, slots: int) -> AsyncIterator[AttachedFarm]:
    """A farm service, in a process of its own, over so many fake containers, in others; all their slots are free."""
    async with fake_containers(containers, slots) as handles, _process("farm") as process:
        assert process.stdin is not None
        process.stdin.write(json.dumps([asdict(handle) for handle in handles]).encode() + b"\n")
        await process.stdin.drain()
        told = await _line(process)
        farm = AttachedFarm(told["url"], told["token"], containers * slots, process.pid)
        await farm.settled()
        yield farm


@asynccontextmanager
async def _process(*arguments: str) -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.attached", *arguments, stdin=PIPE, stdout=PIPE, limit=_LINE_BYTES
    )
    try:
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()


async def _line(process: Process) -> Any:
    assert process.stdout is not None
    return json.loads(await process.stdout.readline())


async def _run_containers(count: int, slots: int) -> None:
    async with FakeBackend(ContainerSettings(slots_per_container=slots)) as backend:
        await backend.scale(count)
        handles: list[ContainerHandle] = []
        async for event in backend.events():
            if isinstance(event, ContainerStarted):
                handles.append(event.handle)
                if len(handles) == count:
                    break
        print(json.dumps([asdict(handle) for handle in handles]), flush=True)
        await asyncio.to_thread(sys.stdin.read)


async def _run_farm(handles: Sequence[ContainerHandle]) -> None:
    keys = TokenKeys(["a key of the benchmarks, and of nothing else"])
    pool = PoolSettings(min_containers=len(handles), max_containers=len(handles))
    shape = ContainerSettings(slots_per_container=handles[0].slots)
    rights = Rights(keys, limits=AskLimits(asks_per_s=1e6, burst=1_000_000))
    async with Farm(AttachedBackend(handles), pool, shape) as farm:
        app = farm_app(farm, rights)
        async with serving.served(app, "farm", host="127.0.0.1", port=0, ending=farm.leave) as url:
            print(json.dumps({"url": url, "token": keys.mint("*", "admin", expires_s=86_400)}), flush=True)
            await asyncio.to_thread(sys.stdin.read)


def main(arguments: Sequence[str]) -> None:
    """See the module."""
    match arguments:
        case ["containers", count, slots]:
            asyncio.run(_run_containers(int(count), int(slots)))
        case ["farm"]:
            asyncio.run(_run_farm([ContainerHandle(**one) for one in json.loads(sys.stdin.readline())]))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
