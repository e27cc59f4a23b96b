"""``/v1/calls/{call}/output``: what a running command has printed so far.

It reads the same capture that the result is made of, from the offsets a client has reached. So it holds nothing of its
own, and a slow or absent reader costs the command nothing: it misses what the capture drops, and is told how much.
"""

from __future__ import annotations

import asyncio

from aiohttp import web

from agentenv.errors import ProtocolError
from agentenv.sandbox.server.calls import CallInFlight
from agentenv.sandbox.server.container import Container
from agentenv.sandbox.server.holder import holder_of
from agentenv.sandbox.server.tools.transfer_routes import lease_key
from agentenv.wire.calls import LIVE_WAIT_S, LiveOutput

_MAX_BYTES = 128 * 1024
"""Of each stream in one reply."""
_LOOK_S = 0.05


class OutputRoutes:
    """The route, over one container."""

    def __init__(self, container: Container) -> None:
        self._container = container

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Register it."""
        router.add_get("/v1/calls/{call}/output", self._get, allow_head=False)

    async def _get(self, request: web.Request) -> web.StreamResponse:
        holder = holder_of(request, self._container)
        key, call_id = lease_key(request), request.match_info["call"]
        stdout, stderr = _offset(request, "stdout"), _offset(request, "stderr")
        loop = asyncio.get_running_loop()
        until_s = loop.time() + LIVE_WAIT_S
        while True:
            output = _output_of(holder.in_flight(key, call_id), stdout, stderr)
            if output.stdout or output.stderr or output.ended or loop.time() >= until_s:
                return web.json_response(text=output.model_dump_json())
            await asyncio.sleep(_LOOK_S)


def _output_of(asked: CallInFlight, stdout: int, stderr: int) -> LiveOutput:
    process = asked.process
    if asked.message is not None or process is None or process.stdout is None or process.stderr is None:
        return LiveOutput(stdout_from=stdout, stderr_from=stderr, ended=asked.message is not None)
    stdout, out = process.stdout.kept.read(stdout, _MAX_BYTES)
    stderr, err = process.stderr.kept.read(stderr, _MAX_BYTES)
    return LiveOutput(stdout=out, stdout_from=stdout, stderr=err, stderr_from=stderr)


def _offset(request: web.Request, stream: str) -> int:
    text = request.query.get(stream, "0")
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise ProtocolError(f"{stream}: must be a number of bytes")
    return int(text)
