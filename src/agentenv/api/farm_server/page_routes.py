"""Routes for looking at a farm: its page, what the page shows, the tail of a slot, and metrics.

The page itself holds no data, so it needs no token; what it shows comes by requests with one.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator
from contextlib import aclosing
from itertools import chain
from pathlib import Path
from typing import Final, Self

from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentenv import shipped
from agentenv.api.farm_server.access import MyRight
from agentenv.api.farm_server.activity import COUNTERS, GAUGES
from agentenv.api.farm_server.farm import Farm
from agentenv.api.farm_server.run_labels import OTHER
from agentenv.api.farm_server.sight import Sights
from agentenv.api.farm_server.tokens import Right
from agentenv.errors import LeaseReclaimedError, TooManyRequestsError
from agentenv.metrics import catalog, readings
from agentenv.metrics.exporter import renderer
from agentenv.metrics.readings import Reading
from agentenv.slots.histogram import Buckets
from agentenv.slots.watched_link import WatchedLink
from agentenv.wire import sight as wire
from agentenv.wire.leases import RunKind
from agentenv.wire.server import ErrorReply

logger = logging.getLogger(__name__)

MAX_TAILS: Final = 50
"""Tails that are followed at once; each is a connection to a container."""
UNREAD_S: Final = 10.0
"""How long a viewer may leave unread what was sent."""
NDJSON: Final = "application/x-ndjson"
_HERE: Final = Path(__file__).parent
_SHARED: Final = ("base.css", "base.js")
_FILES: Final = {
    "/": ("text/html", "page.html"),
    "/page.css": ("text/css", "base.css", "page.css"),
    "/page.js": ("text/javascript", "base.js", "page_map.js", "page.js"),
}
"""What is served where: its type, and the files it is made of."""
_SAFE: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


class UnreadError(Exception):
    """A viewer does not read."""


class _Disconnecting:
    """Around the application: an answer that is not read is given up, and the server closes its connection."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        except UnreadError:
            logger.warning("disconnected a viewer of %s that stopped reading", scope["path"])


class LineStream(StreamingResponse):
    """Lines as they come. A viewer that does not read is disconnected. At the end, however it comes, the lines are
    closed."""

    def __init__(self, first: bytes, lines: AsyncGenerator[bytes, None]) -> None:
        super().__init__(self._all(first, lines), media_type=NDJSON, headers={"Cache-Control": "no-store"})
        self._lines = lines

    @classmethod
    async def of(cls, lines: AsyncGenerator[bytes, None]) -> Self:
        """The answer, once the first line has come: what is refused is refused before the answer begins."""
        return cls(await anext(lines, b""), lines)

    @staticmethod
    async def _all(first: bytes, lines: AsyncGenerator[bytes, None]) -> AsyncIterator[bytes]:
        yield first
        async for line in lines:
            yield line

    async def stream_response(self, send: Send) -> None:
        """As in Starlette, within UNREAD_S for each piece."""

        async def in_time(message: Message) -> None:
            async with asyncio.timeout(UNREAD_S):
                await send(message)

        try:
            await super().stream_response(in_time)
        except TimeoutError as error:
            raise UnreadError from error
        finally:
            await self._lines.aclose()


def page_routes(app: FastAPI, farm: Farm) -> None:
    """Add them."""
    app.add_middleware(_Disconnecting)
    _file_routes(app)
    _sight_routes(app, Sights(farm))
    _tail_route(app, farm)
    render: Callable[[Iterable[Reading]], tuple[bytes, str]] = renderer()

    @app.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics(request: Request) -> Response:
        """For Prometheus (docs/metrics.md); of runs, those that the token covers."""
        body, kind = render(of_farm(farm, getattr(request.state, "right", None)))
        return Response(body, headers={"Content-Type": kind})


def _file_routes(app: FastAPI) -> None:
    for path, (kind, *names) in _FILES.items():
        body = b"".join(
            (shipped.path(f"page/{name}") if name in _SHARED else _HERE / name).read_bytes() for name in names
        )

        async def file(body: bytes = body, kind: str = kind) -> Response:
            return Response(body, media_type=kind, headers=_SAFE)

        app.add_api_route(path, file, include_in_schema=False)


def _sight_routes(app: FastAPI, sights: Sights) -> None:
    @app.get("/v1/sight", response_model=wire.Sight)
    async def sight(right: MyRight) -> Response:
        """The whole farm at one moment, as far as the token covers it."""
        return Response(await sights.whole(right), media_type="application/json")

    @app.get(
        "/v1/sight/changes",
        response_class=StreamingResponse,
        responses={200: {"content": {NDJSON: {}}}, 429: {"model": ErrorReply}},
    )
    async def changes(right: MyRight) -> StreamingResponse:
        """The same, and then what changes: one JSON object per line."""
        return await LineStream.of(sights.changes(right))


def _tail_route(app: FastAPI, farm: Farm) -> None:
    tails: set[object] = set()

    async def followed(link: WatchedLink, slot: int, epoch: int) -> AsyncGenerator[bytes, None]:
        if len(tails) >= MAX_TAILS:
            raise TooManyRequestsError(f"{MAX_TAILS} tails are followed already", retry_after_s=10.0)
        tails.add(mine := object())
        try:
            async with aclosing(link.tail(slot, epoch)) as lines:
                async for line in lines:
                    yield line
        finally:
            tails.discard(mine)

    @app.get(
        "/v1/leases/{container}/{slot}/{epoch}/tail",
        response_class=StreamingResponse,
        responses={200: {"content": {NDJSON: {}}}, 404: {"model": ErrorReply}, 429: {"model": ErrorReply}},
    )
    async def tail(container: str, slot: int, epoch: int, right: MyRight) -> StreamingResponse:
        """What the calls under a lease print: one JSON object per line, see agentenv.wire.tails."""
        return await LineStream.of(followed(_link_of(farm, right, container, slot, epoch), slot, epoch))


def _link_of(farm: Farm, right: Right, container: str, slot: int, epoch: int) -> WatchedLink:
    lease, link = farm.manager.ledger.lease_on(container, slot), farm.manager.links.get(container)
    found = lease is not None and lease.epoch == epoch and right.covers(lease.tags.run)
    if not found or not isinstance(link, WatchedLink):
        raise HTTPException(404, f"there is no lease {container}/{slot}/{epoch} of the token's runs (any more)")
    return link


_KINDS: tuple[RunKind, ...] = ("train", "eval", "interactive")
_ENDED = {name: name.removeprefix("calls_") for name in COUNTERS if name.startswith("calls_")}
"""Counters of calls that ended badly, and their label."""


def of_farm(farm: Farm, right: Right | None = None) -> Iterator[Reading]:
    """Every metric of a farm service; those of runs as far as the token covers them (None: of all)."""
    pool = farm.manager.statistics()
    return chain(
        readings.build(farm.backend_name),
        readings.of_pool(pool),
        _of_service(farm, pool.acquire_waits),
        _of_runs(farm, right),
        _of_calls(farm),
    )


def _of_service(farm: Farm, waits: Buckets) -> Iterator[Reading]:
    reclaims = farm.manager.tally.faults[LeaseReclaimedError.code]
    yield Reading(catalog.FARM_LEADER, {(): int(farm.leads)})
    yield Reading(catalog.FARM_GENERATION, {(): farm.generation if farm.leads else 0})
    yield Reading(catalog.FARM_CLIENTS, {(): len(farm.news)})
    yield Reading(catalog.FARM_WAIT, {(): waits})
    yield Reading(catalog.FARM_RECLAIMS, {(): reclaims})
    yield Reading(catalog.FARM_ADOPTED, {(): farm.manager.ledger.adopted_total})


def _of_runs(farm: Farm, right: Right | None) -> Iterator[Reading]:
    def covered(name: str) -> bool:
        return right is None or right.run == "*" or (right.covers(name) and name != OTHER)

    label = farm.queue.grants.label
    held: Counter[tuple[str, ...]] = Counter()
    waiting: Counter[tuple[str, ...]] = Counter()
    fair: dict[str, float] = {}
    fair_shares = farm.queue_policy.fair_shares(sum(farm.manager.ledger.slot_counts().values()))
    for run, view in sorted(farm.queue_policy.runs().items()):
        if not covered(run):
            continue
        name = label(run)
        fair[name] = fair.get(name, 0.0) + fair_shares.get(run, 0.0)
        for kind in _KINDS:
            held[name, kind] += view.held.get(kind, 0)
    for opened in filter(lambda one: covered(one.run), farm.queue.waiting()):
        waiting[label(opened.run), opened.ask.tags.kind] += 1
    shares: dict[tuple[str, ...], float] = {
        (name,): sum(held[name, kind] for kind in _KINDS) / most for name, most in fair.items() if most > 0
    }
    yield Reading(catalog.FARM_WAITING, {**dict.fromkeys(held, 0), **waiting})
    yield Reading(catalog.FARM_HELD, dict(held))
    yield Reading(catalog.FARM_SHARE, shares)
    grants = farm.queue.grants.counts.items()
    yield Reading(catalog.FARM_GRANTS, {(name,): count for name, count in grants if covered(name)})


def _of_calls(farm: Farm) -> Iterator[Reading]:
    totals, gauges = farm.activity.totals, farm.activity.gauges
    yield Reading(catalog.FARM_CALLS, {(): totals["calls"]})
    yield Reading(catalog.FARM_CALLS_ENDED, {(label,): totals[name] for name, label in _ENDED.items()})
    yield Reading(catalog.FARM_CALL_TIME, {(): farm.activity.call_times})
    yield Reading(catalog.FARM_EXPIRED, {(): totals["leases_expired"]})
    yield Reading(catalog.FARM_SLOTS_LOST, {(): totals["slots_lost"]})
    for metric, name in zip((catalog.FARM_RUNNING, catalog.FARM_QUEUED, catalog.FARM_HELD_BYTES), GAUGES, strict=True):
        yield Reading(metric, {(): gauges[name]})
