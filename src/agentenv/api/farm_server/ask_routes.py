"""The routes of asks. Those that every lease takes are answered ahead of FastAPI, which declares and describes them as
all others: its layers cost more than the lease."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final
from urllib.parse import parse_qs

from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import TypeAdapter, ValidationError
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from agentenv.api.farm_server.access import Access, MyRight
from agentenv.api.farm_server.bodies import malformed
from agentenv.api.farm_server.farm import Farm
from agentenv.api.farm_server.page_routes import NDJSON
from agentenv.api.farm_server.replies import not_here, reply, status_of
from agentenv.errors import AgentEnvError
from agentenv.wire import farm as wire
from agentenv.wire.base import WireModel
from agentenv.wire.server import ErrorReply

_ASKS: Final = "/v1/asks"
_CANCEL: Final = "/v1/asks/{request_id}"
_EACH_LINE: Final = {"schema": {"$ref": "#/components/schemas/NewsLine"}}
_asks_request: Final[TypeAdapter[wire.AsksRequest]] = TypeAdapter(wire.AsksRequest)
_request_id: Final[TypeAdapter[str]] = TypeAdapter(wire.RequestId)
_run_name: Final[TypeAdapter[str]] = TypeAdapter(wire.RunName)


class AskRoutes:
    """An ASGI application for the requests that it :meth:`serves`; FastAPI has the others, and all in its document."""

    def __init__(self, farm: Farm, access: Access) -> None:
        self._farm = farm
        self._access = access

    def declare(self, app: FastAPI) -> None:
        """Add the routes."""
        app.post(_ASKS, responses={409: {"model": ErrorReply}})(self.asks)
        app.get(_CANCEL)(self.ask_state)
        app.delete(_CANCEL)(self.cancel)
        news = {200: {"content": {NDJSON: _EACH_LINE}}}
        app.get("/v1/news", response_class=StreamingResponse, responses=news)(self.news)  # type: ignore[arg-type]

    async def asks(self, request: wire.AsksRequest, right: MyRight) -> wire.AsksReply:
        """Ask for slots."""
        run = self._access.run_of(right, request.run)
        self._access.limit(right, len(request.asks))
        self._farm.queue.check_ttl(max(ask.ttl_s for ask in request.asks))
        return await self._farm.queue.ask(request, run, right.tokens, right.ends_unix_s)

    async def ask_state(self, request_id: wire.RequestId, right: MyRight, run: wire.RunName = "") -> wire.AskState:
        """What has become of an ask; reading it keeps it alive."""
        opened = self._farm.queue.find(request_id, self._access.run_of(right, run))
        if opened is None:
            raise HTTPException(404, f"this run has no request {request_id!r} (any more)")
        return self._farm.queue.state_of(opened)

    async def cancel(self, request_id: wire.RequestId, right: MyRight, run: wire.RunName = "") -> wire.Cancelled:
        """Withdraw an ask, or end the leases that were granted for it. May be repeated."""
        run = self._access.run_of(right, run)
        if not self._farm.queue.knows(request_id, run):  # it is remembered all the same
            self._access.limit(right, 1)
        return wire.Cancelled(cancelled=self._farm.queue.cancel(request_id, run))

    async def news(self, right: MyRight, client: wire.ClientId, run: wire.RunName = "") -> StreamingResponse:
        """What becomes of the client's asks, one JSON object per line."""
        self._farm.news.check_room(right.jti)
        lines: AsyncIterator[bytes] = self._farm.news.follow(self._access.run_of(right, run), client, right.jti)
        return StreamingResponse(lines, media_type=NDJSON)

    # -- ahead of FastAPI ------------------------------------------------------------------------

    def serves(self, scope: Scope) -> bool:
        """Whether the request is one of those that every lease takes."""
        if scope["method"] == "POST":
            return bool(scope["path"] == _ASKS)
        below, _, name = scope["path"].rpartition("/")
        return scope["method"] == "DELETE" and below == _ASKS and bool(name)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer it."""
        try:
            response = await self._answer(Request(scope, receive))
        except AgentEnvError as error:
            response = reply(status_of(error), error)
        except HTTPException as error:
            response = not_here(error)
        await response(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        if request.method == "POST":
            right = self._access.right(request, f"POST {_ASKS}")
            asked = await self._access.parsed(right, _asks_request, request)
            try:
                return _json(await self.asks(asked, right))
            finally:
                self._access.check_again(right)  # it may have taken long
        right = self._access.right(request, f"DELETE {_CANCEL}")
        (run, *_) = parse_qs(request.scope["query_string"].decode("latin-1")).get("run", [""])
        try:
            name = _request_id.validate_python(request.scope["path"].rpartition("/")[2])
            run = _run_name.validate_python(run)
        except ValidationError as error:
            raise malformed(error, "request_id or run") from None
        return _json(await self.cancel(name, right, run))


def _json(model: WireModel) -> Response:
    return Response(model.model_dump_json(), media_type="application/json")
