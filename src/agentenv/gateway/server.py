"""The HTTP application of the gateway: reads requests in each dialect, and answers them by one function of the
environment.

The model's answer is complete before the first byte of a stream, so the stream is made from it at once. Until then
nothing is sent for some seconds, so that a failure still has its HTTP status; after that, bytes that keep the
connection open.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Protocol

from aiohttp import web

from agentenv.agent.protocols import ContextOverflow
from agentenv.errors import InfraError
from agentenv.gateway.canonical import TOO_LONG, Counting, Dialect, ModelRequest, RefusalError, Shown, Stamp
from agentenv.gateway.dialects import chat, google, messages, responses
from agentenv.gateway.history import Histories
from agentenv.tools.json_text import read_json

logger = logging.getLogger(__name__)


class Turns(Protocol):
    """What generates the turns of one rollout."""

    async def generate(self, request: ModelRequest, number: int) -> Shown:
        """The next turn, the ``number``-th that was begun (0 first). Raises: RefusalError, ContextOverflow, InfraError;
        anything else is a defect, and logged."""

    def count(self, request: ModelRequest) -> int:
        """The number of a prompt's tokens, or an estimate."""

    def refuse(self, refusal: RefusalError) -> None:
        """A request was refused before it became a turn."""


DIALECTS: Final = (chat.DIALECT, responses.DIALECT, messages.DIALECT, google.DIALECT)
MODEL: Final = "policy"
"""The name under which the model is listed; requests may use any."""
MAX_REQUEST_BYTES: Final = 64 * 1024 * 1024
LARGE_REQUEST_BYTES: Final = 128 * 1024
"""A request with more is read in a thread, one at a time of each rollout: 64 MiB take seconds, in which the other
rollouts of this process go on."""
QUIET_S: Final = 5.0
"""Seconds without a byte of a stream before its answer, and between two bytes that keep it open after that."""
RETRIED: Final = "x-stainless-retry-count"
"""Header in which the SDKs of OpenAI and Anthropic count how often they have sent a request again."""


class Gateway:
    """The turns that one rollout's programs ask for, over HTTP.

    ``quiet_s``: see QUIET_S. A request that its SDK marks as
    sent again, or whose former connection went before it had its answer, gets that answer; equal requests otherwise get
    an answer each.
    """

    def __init__(
        self,
        turns: Turns,
        *,
        quiet_s: float = QUIET_S,
        max_request_bytes: int = MAX_REQUEST_BYTES,
    ) -> None:
        self._source = turns
        self._quiet_s = quiet_s
        self._max_request_bytes = max_request_bytes
        self._turns: dict[tuple[str, bytes], list[_Turn]] = {}
        self._histories = {dialect.name: Histories() for dialect in DIALECTS}
        self._begun = 0
        self._large = asyncio.Lock()

    def application(self) -> web.Application:
        """What answers; turns that are under way are cancelled when it is cleaned up."""
        app = web.Application(client_max_size=self._max_request_bytes)
        for dialect in DIALECTS:
            app.router.add_post(dialect.path, partial(self._answer, dialect))
            if dialect.counting is not None:
                app.router.add_post(dialect.counting.path, partial(self._answer_count, dialect, dialect.counting))
        app.router.add_get("/{version:v1[a-z0-9]*}/models", _models)
        app.router.add_get("/{version:v1[a-z0-9]*}/models/{name:.+}", _model)
        app.router.add_route("*", "/{rest:.*}", _unknown)
        app.cleanup_ctx.append(self._cancelled_at_the_end)
        return app

    async def _cancelled_at_the_end(self, _: web.Application) -> AsyncIterator[None]:
        yield
        tasks = [turn.task for turns in self._turns.values() for turn in turns]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _answer(self, dialect: Dialect, request: web.Request) -> web.StreamResponse:
        try:
            raw = await self._bytes_of(request)
            asked = await self._read(raw, lambda given: dialect.parse(given, self._histories[dialect.name]))
            asked = dialect.with_url(asked, {**request.query, **request.match_info})
            asked = replace(asked, dialect=dialect.name)
        except RefusalError as refusal:
            self._source.refuse(refusal)
            return web.json_response(dialect.error(refusal), status=refusal.status)
        turn = self._turn_of(dialect, raw, asked, request)
        stream: web.StreamResponse | None = None
        with suppress(ConnectionResetError):  # whoever asked is gone; the same request may come again
            if asked.stream:
                stream = await self._alive_until(turn, dialect, request)
            try:
                answer = await asyncio.shield(turn.task)
            except Exception as error:  # whatever it is, the program is answered
                failure = _refusal_of(error)
                if stream is None:
                    return web.json_response(dialect.error(failure), status=failure.status)
                await stream.write(b"".join(dialect.failed(asked, failure, turn.stamp)))
                await stream.write_eof()
                return stream
            stream = await _send(dialect, asked, answer, turn.stamp, request, stream)
            turn.delivered = turn.delivered or request.transport is not None
        return stream or web.Response()

    async def _alive_until(self, turn: _Turn, dialect: Dialect, request: web.Request) -> web.StreamResponse | None:
        """Wait for a turn; the stream that was begun meanwhile, if one was."""
        stream = None
        while not (await asyncio.wait({turn.task}, timeout=self._quiet_s))[0]:
            stream = stream or await _begun(request)
            await stream.write(dialect.alive)
        return stream

    def _turn_of(self, dialect: Dialect, raw: bytes, asked: ModelRequest, request: web.Request) -> _Turn:
        """The turn that a request asks for: a new one, or one whose answer did not arrive."""
        key = dialect.path, hashlib.blake2b(raw, digest_size=16).digest()
        equal = [turn for turn in self._turns.get(key, ()) if not turn.failed]
        again = next((turn for turn in equal if turn.lost), None)
        if again is None and equal and request.headers.get(RETRIED, "0") not in ("", "0"):
            again = next((turn for turn in equal if not turn.delivered), equal[-1])
        if again is not None:
            again.connection = request.protocol
            return again
        number, self._begun = self._begun, self._begun + 1
        task = asyncio.ensure_future(self._source.generate(asked, number))
        turn = _Turn(task, request.protocol, Stamp(str(number), int(time.time())))
        self._turns[key] = [*equal, turn]
        return turn

    async def _bytes_of(self, request: web.Request) -> bytes:
        try:
            return await request.read()
        except web.HTTPRequestEntityTooLarge:
            raise RefusalError(f"the request has more than {self._max_request_bytes} bytes", status=413) from None
        except web.RequestPayloadError as error:  # it is not encoded as its header says
            raise RefusalError(f"the body cannot be read: {error}") from None

    async def _read(self, raw: bytes, parse: Callable[[Any], ModelRequest]) -> ModelRequest:
        """Raises: RefusalError."""
        if len(raw) <= LARGE_REQUEST_BYTES:
            return parse(_json(raw))
        async with self._large:
            return await asyncio.to_thread(lambda: parse(_json(raw)))

    async def _answer_count(self, dialect: Dialect, counting: Counting, request: web.Request) -> web.Response:
        try:
            asked = await self._read(await self._bytes_of(request), counting.parse)
        except RefusalError as refusal:
            return web.json_response(dialect.error(refusal), status=refusal.status)
        return web.json_response(counting.whole(self._source.count(asked)))


@dataclass
class _Turn:
    """A turn, and the connection of the last request that asked for it. The request itself has its whole body."""

    task: asyncio.Future[Shown]
    connection: web.RequestHandler
    stamp: Stamp
    delivered: bool = False

    @property
    def failed(self) -> bool:
        return self.task.done() and (self.task.cancelled() or self.task.exception() is not None)

    @property
    def lost(self) -> bool:
        """Whether the connection went before it had the answer."""
        return not self.delivered and self.connection.transport is None


def _json(raw: bytes) -> Any:
    try:
        return read_json(raw.decode())
    except ValueError as error:
        raise RefusalError(f"the body cannot be read: {error}") from None


def _refusal_of(error: Exception) -> RefusalError:
    """The refusal with which a failed turn is answered."""
    if isinstance(error, RefusalError):
        return error
    if isinstance(error, ContextOverflow):
        return RefusalError(f"prompt is too long: {error}", code=TOO_LONG)
    if isinstance(error, InfraError):
        return RefusalError(f"the model's server failed: {error}", status=503)
    logger.error("a turn failed", exc_info=error)
    return RefusalError(f"the turn failed: {type(error).__name__}: {error}", status=500)


async def _begun(request: web.Request) -> web.StreamResponse:
    stream = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await stream.prepare(request)
    return stream


async def _send(
    dialect: Dialect,
    asked: ModelRequest,
    answer: Shown,
    stamp: Stamp,
    request: web.Request,
    stream: web.StreamResponse | None,
) -> web.StreamResponse:
    """Send the answer to its end: a handler that returns a response does not learn whether it arrived."""
    if not asked.stream:
        stream = web.json_response(dialect.whole(asked, answer, stamp))
        await stream.prepare(request)
    else:
        stream = stream or await _begun(request)
        await stream.write(b"".join(dialect.events(asked, answer, stamp)))
    await stream.write_eof()
    return stream


_CARD: Final[Mapping[str, Any]] = {
    "object": "model",
    "type": "model",
    "created": 0,
    "created_at": "1970-01-01T00:00:00Z",
    "owned_by": "agentenv",
}
"""A model as OpenAI, Anthropic and Google list it."""


def _card(name: str) -> dict[str, Any]:
    return {"id": name, "display_name": name, "name": f"models/{name}", "displayName": name, **_CARD}


async def _models(_: web.Request) -> web.Response:
    cards = [_card(MODEL)]
    pages = {"has_more": False, "first_id": MODEL, "last_id": MODEL}
    return web.json_response({"object": "list", "data": cards, "models": cards, **pages})


async def _model(request: web.Request) -> web.Response:
    return web.json_response(_card(request.match_info["name"]))


async def _unknown(request: web.Request) -> web.Response:
    """In a form that the SDKs of all read."""
    problem = {"type": "not_found_error", "message": f"{request.method} {request.path} is not served here"}
    return web.json_response({"type": "error", "error": {**problem, "param": None, "code": None}}, status=404)
