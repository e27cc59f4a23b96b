"""``/v1/slots/{slot}/tar``: tars into an image slot and out of it, with owners, modes and times, concurrently with calls.

``PUT ?path=/DIRECTORY&uid=0&gid=0&mode=493`` unpacks the body below a directory, which is made with its missing parents,
of that owner and mode. ``GET ?path=/PATH`` is the tar of a directory's content, or of one file. Both are done by slottar
as the slot's root; the server passes bytes on, as for transfers.
"""

from __future__ import annotations

import os
from contextlib import closing
from typing import Final

from aiohttp import web

from agentenv.errors import ProtocolError, SandboxUnavailableError
from agentenv.sandbox.server.container import Container
from agentenv.sandbox.server.holder import holder_of
from agentenv.sandbox.server.tools.artifacts import readable_name
from agentenv.sandbox.server.tools.transfer_routes import Waited, collect, feed, key_and_path, pass_on
from agentenv.sandbox.server.tools.transfer_run import TransferRun
from agentenv.wire.transfers import TransferReply

_MOST_ID: Final = 65_535
_MOST_MODE: Final = 0o7777


class TarRoutes:
    """The two routes, over one container."""

    def __init__(self, container: Container) -> None:
        self._container = container

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Register the routes."""
        router.add_put("/v1/slots/{slot}/tar", self._put)
        router.add_get("/v1/slots/{slot}/tar", self._get, allow_head=False)

    async def _put(self, request: web.Request) -> web.StreamResponse:
        numbers = [
            _number(request, "uid", _MOST_ID),
            _number(request, "gid", _MOST_ID),
            _number(request, "mode", _MOST_MODE),
        ]
        run, path = self._run(request)
        run_argv = ["unpack", path, *map(str, numbers)]
        with closing(run):
            self._start(request, run, run_argv, feeds=True)
            waited = Waited(run)
            await feed(request, waited)
            printed = await collect(waited)
            code = await waited.ended()
        where = readable_name(printed.decode("utf-8", "surrogateescape")) if printed else path
        why = "" if not code else f"{os.strerror(code)}\n" if code < 128 else "it was ended\n"
        return web.json_response(text=TransferReply(exit_code=code, stderr=why, path=where).model_dump_json())

    async def _get(self, request: web.Request) -> web.StreamResponse:
        run, path = self._run(request)
        with closing(run):
            self._start(request, run, ["pack", path], feeds=False)
            waited = Waited(run)
            first = await waited.read()
            if not first:
                raise ProtocolError(f"{path}: cannot be read (slottar ended with {await waited.ended()})")
            response = web.StreamResponse(headers={"Content-Type": "application/x-tar"})
            await response.prepare(request)
            await pass_on(request, response, waited, first)
        return response

    def _run(self, request: web.Request) -> tuple[TransferRun, str]:
        key, path = key_and_path(request)
        io, _ = holder_of(request, self._container).beside(key)
        if not io.paths.own_root:
            raise SandboxUnavailableError(
                "plain slots take no tars with owners", next_step="lease a slot with an image"
            )
        if not path.startswith("/"):
            raise ProtocolError("path: must be absolute")
        return TransferRun(io), path

    def _start(self, request: web.Request, run: TransferRun, operation: list[str], *, feeds: bool) -> None:
        key, _ = key_and_path(request)
        io, _ = holder_of(request, self._container).beside(key)
        run.start([io.paths.tar, *operation], {}, feeds=feeds)


def _number(request: web.Request, name: str, most: int) -> int:
    text = request.query.get(name, "0")
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) <= most):
        raise ProtocolError(f"{name}: must be a number up to {most}")
    return int(text)
