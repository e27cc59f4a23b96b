"""``GET /v1/slots/{slot}/metrics``: what a leased slot uses. Concurrent with its calls.

Memory, CPU time and processes are the kernel's counters of the slot's cgroup. What is stored only a program in the slot
can see: slotfiles, whose answer is the slot's own word.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from typing import Final

from aiohttp import web

from agentenv.deadlines import scaled
from agentenv.errors import ProtocolError
from agentenv.sandbox.server.agent_link import TooManyRunsError
from agentenv.sandbox.server.bodies import slot_key
from agentenv.sandbox.server.container import Container, requester_of
from agentenv.sandbox.server.process import SlotIo
from agentenv.sandbox.server.tools.file_records import RecordReader
from agentenv.sandbox.server.transfer_run import TransferRun
from agentenv.sandbox.slot_paths import WORKSPACE
from agentenv.wire.slot_metrics import SlotMetrics

_WAIT_S: Final = scaled(5.0)
"""For the program in the slot, which may have no CPU time or memory left to answer."""
_MAX_REPLY_BYTES: Final = 4096


class SlotMetricsRoute:
    """The route, over one container."""

    def __init__(self, container: Container) -> None:
        self._container = container

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Register it."""
        router.add_get("/v1/slots/{slot}/metrics", self._get, allow_head=False)

    async def _get(self, request: web.Request) -> web.StreamResponse:
        io, env = requester_of(request, self._container).io_and_env(slot_key(request))
        used = io.limits.usage()
        stored_bytes, limit_bytes = await _stored(io, env)
        metrics = SlotMetrics(
            memory_bytes=used.memory_bytes,
            memory_peak_bytes=io.limits.peak_bytes(),
            memory_limit_bytes=used.memory_limit_bytes,
            cpu_s=used.cpu_s,
            processes=used.processes,
            processes_limit=used.processes_limit,
            storage_bytes=stored_bytes,
            storage_limit_bytes=limit_bytes,
        )
        return web.json_response(text=metrics.model_dump_json())


async def _stored(io: SlotIo, env: Mapping[str, str]) -> tuple[int | None, int | None]:
    """Bytes that are used and that there are in the file system of the slot's files; None where it has none of its
    own, or does not answer."""
    if io.paths.beneath_workspace:
        return None, None
    paths = replace(io.paths, user="")
    printed = bytearray()
    try:
        with closing(TransferRun(io)) as run:
            run.start(paths.slotfiles("room", "/" if paths.own_root else WORKSPACE), env, feeds=False)
            async with asyncio.timeout(_WAIT_S):
                while len(printed) < _MAX_REPLY_BYTES and (piece := await run.read()):
                    printed += piece
        record = RecordReader(bytes(printed)).record()
    except (TimeoutError, TooManyRunsError, ProtocolError):
        return None, None
    return (record.modified_ns, record.size_bytes) if 0 <= record.modified_ns <= record.size_bytes else (None, None)
