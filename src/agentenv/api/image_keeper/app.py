"""HTTP interface of an image keeper (aiohttp). Types are in :mod:`agentenv.wire.images`.

====================================  ==========================================================
``POST /v1/images``                   have images fetched, and follow them
``POST /v1/commits``                  make an image of a container's checkpoint
``GET /v1/images``                    what the store has; with ``version`` and ``wait_s``, changes
``GET /v1/manifests/{digest}``        for peers: an image's manifest
``GET /v1/layers/{diff_id}``          for peers: a layer's tar
``GET /v1/names``                     for peers: what a name of ``commit`` means here
``GET /metrics``                      for Prometheus
``GET /health``                       the only one without a token
====================================  ==========================================================
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from typing import Final, TypeVar

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.typedefs import Handler, Middleware
from pydantic import BaseModel, ValidationError

from agentenv._version import __version__
from agentenv.api.door import behind_door
from agentenv.api.image_keeper.keeper import Keeper
from agentenv.api.tool_server.auth import authorized
from agentenv.deadlines import scaled
from agentenv.errors import AgentEnvError, ProtocolError, UnauthorizedError
from agentenv.listening import listen, url_of
from agentenv.locks import hold
from agentenv.metrics.catalog import Metric
from agentenv.store.layers import CHUNK_BYTES
from agentenv.store.reference import is_digest, parse
from agentenv.wire import images as wire
from agentenv.wire.server import ErrorReply, Health

_KEEPER: Final = web.AppKey("keeper", Keeper)
_MAX_BODY_BYTES: Final = 1024 * 1024
_END_S: Final = scaled(2.0)

IMAGES = Metric("agentenv_keeper_images", "gauge", "Images in the store.")
FETCHING = Metric("agentenv_keeper_fetching", "gauge", "Running fetches of images.")
PULLED = Metric("agentenv_keeper_pulled_total", "counter", "Images fetched, or found in the store.")
FAILED = Metric("agentenv_keeper_failed_total", "counter", "Images that could not be fetched.")
FROM_PEERS = Metric("agentenv_keeper_from_peers_total", "counter", "Images received from another node's keeper.")
LIES = Metric("agentenv_keeper_peer_lies_total", "counter", "Transfers from peers with a wrong digest.")
THROTTLED = Metric("agentenv_keeper_throttled_total", "counter", "Times a registry limited the request rate.")
REMOVED = Metric("agentenv_keeper_removed_images_total", "counter", "Images removed to make room.")
REMOVED_BYTES = Metric("agentenv_keeper_removed_bytes_total", "counter", "Bytes freed by that.")

READINGS: Final[dict[Metric, Callable[[Keeper], int]]] = {
    IMAGES: lambda keeper: len(keeper.stored),
    FETCHING: lambda keeper: keeper.fetching,
    PULLED: lambda keeper: keeper.counts["pulled"],
    FAILED: lambda keeper: keeper.counts["failed"],
    FROM_PEERS: lambda keeper: keeper.counts["from_peers"],
    LIES: lambda keeper: keeper.peers.lies if keeper.peers is not None else 0,
    THROTTLED: lambda keeper: sum(registry.throttled for registry in keeper.registries.values()),
    REMOVED: lambda keeper: keeper.counts["removed_images"],
    REMOVED_BYTES: lambda keeper: keeper.counts["removed_bytes"],
}

KEEPER_METRICS: Final[tuple[Metric, ...]] = tuple(READINGS)

Asked = TypeVar("Asked", bound=BaseModel)


def keeper_app(keeper: Keeper, token: str) -> web.Application:
    """The application over an open keeper."""
    app = web.Application(middlewares=[_guard(token)], client_max_size=_MAX_BODY_BYTES)
    app[_KEEPER] = keeper
    app.add_routes(
        [
            web.get("/health", _health),
            web.post("/v1/images", _ensure),
            web.post("/v1/commits", _commit),
            web.get("/v1/images", _list, allow_head=False),
            web.get("/v1/manifests/{digest}", _manifest),
            web.get("/v1/layers/{digest}", _layer),
            web.get("/v1/names", _named),
            web.get("/metrics", _metrics),
        ]
    )
    return app


@contextlib.asynccontextmanager
async def served(keeper: Keeper, token: str, *, host: str, port: int) -> AsyncIterator[str]:
    """Serve an open keeper; yields its URL. Port 0: any free one. Raises ConfigError when it cannot listen there."""
    listening = listen(host, port)
    async with behind_door(keeper_app(keeper, token), listening, drain_s=_END_S):
        yield url_of(listening, host)


def _guard(token: str) -> Middleware:
    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path != "/health" and not authorized(request.headers.get("Authorization"), token):
            return _json(ErrorReply.of(UnauthorizedError("token", "is missing or wrong")), 401)
        try:
            return await handler(request)
        except ProtocolError as error:
            return _json(ErrorReply.of(error), 400)
        except AgentEnvError as error:
            return _json(ErrorReply.of(error), 503)

    return guard


async def _health(request: web.Request) -> web.Response:  # noqa: ARG001
    return _json(Health(status="ok", version=__version__))


async def _ensure(request: web.Request) -> web.Response:
    asked = await _read(request, wire.ImagesRequest)
    wanted: tuple[str | wire.ImageRef, ...] = (*asked.references, *asked.images)
    return _json(wire.ImagesReply(images=tuple(await request.app[_KEEPER].ensured(wanted, asked.wait_s))))


async def _commit(request: web.Request) -> web.Response:
    asked, keeper = await _read(request, wire.LayersRequest), request.app[_KEEPER]
    (state,) = await keeper.states([keeper.commit(asked)], asked.wait_s)
    return _json(state)


async def _read(request: web.Request, model: type[Asked]) -> Asked:
    try:
        return model.model_validate_json(await request.read())
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the body"
        raise ProtocolError(f"{where}: {first['msg']}", next_step="see agentenv.wire.images") from None


async def _list(request: web.Request) -> web.Response:
    keeper = request.app[_KEEPER]
    version = request.query.get("version", "")
    try:
        wait_s = min(float(request.query.get("wait_s", 0)), wire.MAX_WAIT_S)
    except ValueError:
        raise ProtocolError("wait_s must be a number") from None
    await keeper.changed(version, wait_s)
    listed = keeper.listed[: wire.MAX_LISTED]
    return _json(wire.StoredList(version=keeper.version, digests=listed))


async def _manifest(request: web.Request) -> web.Response:
    try:
        manifest = request.app[_KEEPER].store.layout.manifest(_digest(request)).read_bytes()
    except FileNotFoundError:
        return web.Response(status=404)
    return web.Response(body=manifest, content_type="application/json")


async def _named(request: web.Request) -> web.Response:
    store, wanted = request.app[_KEEPER].store, parse(request.query.get("reference", ""))
    name = await asyncio.to_thread(store.named, wanted) if wanted.kind == "committed" else None
    if name is None:
        return web.Response(status=404)
    return _json(wire.NamedImage(reference=name.reference, digest=name.digest, named_s=name.named_s))


async def _layer(request: web.Request) -> web.StreamResponse:
    return _LayerResponse(request.app[_KEEPER].store.layout.layer(_digest(request)), chunk_size=CHUNK_BYTES)


class _LayerResponse(web.FileResponse):
    """A layer, which is not removed while it is sent; 404 if there is none."""

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        with contextlib.ExitStack() as held:
            with contextlib.suppress(FileNotFoundError):
                held.callback(os.close, hold(self._path, shared=True))
            return await super().prepare(request)


def _digest(request: web.Request) -> str:
    digest = request.match_info["digest"]
    if not is_digest(digest):
        raise ProtocolError("a digest is sha256: and 64 hexadecimal digits")
    return digest


async def _metrics(request: web.Request) -> web.Response:
    return web.Response(text=exposition(request.app[_KEEPER]), content_type="text/plain")


def _json(model: BaseModel, status: int = 200) -> web.Response:
    return web.Response(body=model.model_dump_json().encode(), status=status, content_type="application/json")


def exposition(keeper: Keeper) -> str:
    """All of them, in Prometheus' text format."""
    lines = []
    for metric, read in READINGS.items():
        lines += [f"# HELP {metric.name} {metric.help}", f"# TYPE {metric.name} {metric.kind}"]
        lines.append(f"{metric.name} {read(keeper)}")
    return "\n".join(lines) + "\n"
