"""``/v1/slots/{slot}/tar``: tars into an image slot and out of it, with owners, modes and times, beside its calls.

``PUT ?path=/DIRECTORY&uid=0&gid=0&mode=493`` unpacks the body below a directory, which is made with its missing
parents, of that owner and mode. ``GET ?path=/PATH`` is the tar of a directory's content, or of one file. Both are done
by slottar as the slot's root; the server passes bytes on, as for transfers.
"""

from __future__ import annotations

import os
from contextlib import closing
from typing import Final

from aiohttp import web

from agentenv.errors import ProtocolError, SandboxUnavailableError
from agentenv.file_names import readable_name
from agentenv.sandbox.server.container import Container
from agentenv.sandbox.server.holder import holder_of
from agentenv.sandbox.server.process import SlotIo
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
        limits = {"uid": _MOST_ID, "gid": _MOST_ID, "mode": _MOST_MODE}
        numbers = [str(_number(request, name, most)) for name, most in limits.items()]
        io, path = self._slot(request)
        run = TransferRun(io)
        with closing(run):
            run.start([io.paths.tar, "unpack", path, *numbers], {}, feeds=True)
            waited = Waited(run)
            await feed(request, waited)
            printed = await collect(waited)
            code = await waited.ended()
        where = readable_name(printed) if printed else path
        why = "" if not code else f"{os.strerror(code)}\n" if code < 128 else "it was ended\n"
        return web.json_response(text=TransferReply(exit_code=code, stderr=why, path=where).model_dump_json())

    async def _get(self, request: web.Request) -> web.StreamResponse:
        io, path = self._slot(request)
        run = TransferRun(io)
        with closing(run):
            run.start([io.paths.tar, "pack", path], {}, feeds=False)
            waited = Waited(run)
            first = await waited.read()
            if not first:
                raise ProtocolError(f"{path}: cannot be read (slottar ended with {await waited.ended()})")
            response = web.StreamResponse(headers={"Content-Type": "application/x-tar"})
            await response.prepare(request)
            await pass_on(request, response, waited, first)
        return response

    def _slot(self, request: web.Request) -> tuple[SlotIo, str]:
        key, path = key_and_path(request)
        io, _ = holder_of(request, self._container).beside(key)
        if not io.paths.own_root:
            raise SandboxUnavailableError("plain slots take no tars with owners", next_step="lease one with an image")
        if not path.startswith("/"):
            raise ProtocolError("path: must be absolute")
        return io, path


def _number(request: web.Request, name: str, most: int) -> int:
    text = request.query.get(name, "0")
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) <= most):
        raise ProtocolError(f"{name}: must be a number up to {most}")
    return int(text)
