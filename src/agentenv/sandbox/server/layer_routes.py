"""Layers of checkpoints, as tars: ``GET /v1/checkpoints/{checkpoint}/layers/{layer}``.

A checkpoint's name is a secret: a client that has it may read the checkpoint. The lowest layer is 0; the header has the
number of layers.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import deque

from aiohttp import web

from agentenv.deadlines import LAYER_PART_S
from agentenv.errors import CheckpointError
from agentenv.sandbox.control_protocol import Exported
from agentenv.sandbox.server.bodies import in_time, streamed
from agentenv.sandbox.server.supervisor_link import SupervisorLink
from agentenv.wire.base import MAX_PIECE_BYTES
from agentenv.wire.leases import LAYERS_HEADER


class LayerExports:
    """Requests for layers. The supervisor replies in any order."""

    def __init__(self, supervisor: SupervisorLink) -> None:
        self._supervisor = supervisor
        self._waiting: dict[tuple[str, int], deque[asyncio.Future[tuple[int, int]]]] = {}

    async def open(self, checkpoint: str, layer: int) -> tuple[int, int]:
        """A pipe with the layer's tar, the caller's to close, and how many layers there are. Raises CheckpointError."""
        waiter: asyncio.Future[tuple[int, int]] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault((checkpoint, layer), deque()).append(waiter)
        self._supervisor.export(checkpoint, layer)
        try:
            async with asyncio.timeout(LAYER_PART_S):
                return await waiter
        except TimeoutError:
            raise CheckpointError(
                f"checkpoint {checkpoint}: the supervisor did not respond within {LAYER_PART_S:g} s"
            ) from None

    def exported(self, reply: Exported, pipe: int = -1) -> None:
        """The supervisor's reply to a request; owns ``pipe``."""
        waiting = self._waiting.get((reply.checkpoint, reply.layer))
        waiter = waiting.popleft() if waiting else None
        if not waiting:
            self._waiting.pop((reply.checkpoint, reply.layer), None)
        if waiter is None or waiter.done():
            if pipe >= 0:
                os.close(pipe)
        elif pipe < 0:
            waiter.set_exception(CheckpointError(f"checkpoint {reply.checkpoint}: {reply.reason}"))
        else:
            waiter.set_result((pipe, reply.layers))


class LayerRoutes:
    """The route."""

    def __init__(self, exports: LayerExports) -> None:
        self._exports = exports

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Register it."""
        router.add_get("/v1/checkpoints/{checkpoint:[0-9a-f]{32}}/layers/{layer:[0-9]{1,3}}", self._get)

    async def _get(self, request: web.Request) -> web.StreamResponse:
        pipe, layers = await self._exports.open(request.match_info["checkpoint"], int(request.match_info["layer"]))
        reader = asyncio.StreamReader(limit=MAX_PIECE_BYTES)
        with os.fdopen(pipe, "rb", buffering=0) as file:
            transport, _ = await asyncio.get_running_loop().connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(reader), file
            )
            with contextlib.closing(transport):
                async with streamed(request, "application/x-tar", headers={LAYERS_HEADER: str(layers)}) as response:
                    while piece := await reader.read(MAX_PIECE_BYTES):
                        await in_time(response.write(piece))
        return response
