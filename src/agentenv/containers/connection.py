"""The only road to a container: every request and every WebSocket goes through a :class:`ContainerConnection`, which
has the session, the address and the credentials, and makes an error of :mod:`agentenv.errors` of every failure.

One exception: a farm service watches thousands of containers, for which aiohttp takes too much memory
(:mod:`agentenv.containers.watch`).
"""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from types import TracebackType
from typing import Any, Final, Self, TypedDict, TypeVar, Unpack

import aiohttp
from pydantic import ValidationError

from agentenv.backoff import pause_s
from agentenv.containers.handle import ContainerHandle
from agentenv.deadlines import scaled
from agentenv.errors import AgentEnvError, ConnectionLostError, PoolClosedError, ProtocolError, from_wire
from agentenv.wire.base import PROTOCOL_VERSION, WireModel
from agentenv.wire.server import ErrorReply, ServerInfo
from agentenv.wire.transfers import LEASE_HEADER
from agentenv.wire.watch import GENERATION_HEADER, GUEST_HEADER

Reply = TypeVar("Reply", bound=WireModel)
Params = Mapping[str, str | int]

PIECE_BYTES: Final = 1024 * 1024
"""How much of something large is handled at once on this side: read, sent, written."""

_GATEWAY: Final = frozenset({502, 503, 504})
_CONNECT_S: Final = scaled(15.0)
_CLOSE_S: Final = scaled(2.0)
_MAX_REPLY_BYTES: Final = 16 * 1024 * 1024
_LONGEST_PAUSE_S: Final = 1.0


class RequestOptions(TypedDict, total=False):
    """Keyword arguments of :meth:`ContainerConnection.stream`."""

    lease: str
    params: Params | None
    data: Any
    timeout_s: float | None
    silence_s: float | None


def open_session() -> aiohttp.ClientSession:
    """A session for any number of containers; the opener closes it. Each request has its own deadline."""
    # limit=0: a pool of 1,000 containers sends heartbeats in parallel.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=30.0)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None), trust_env=False)


class ContainerConnection:
    """HTTP to one container. An async context manager; it opens a session at the first request unless one is given,
    and closes only its own.

    Every method raises ConnectionLostError when there was no response, or the connection was cut: whether the container
    did what was requested is unknown. A response that is a refusal is the error that it names, if that is one of
    ``expected`` (any, if not given), else ProtocolError. ``lease`` is a LeaseKey as JSON; ``generation`` and ``guest``
    tell the container which farm sends what changes leases (:class:`agentenv.containers.control.ContainerControl`).
    """

    def __init__(
        self,
        handle: ContainerHandle,
        session: aiohttp.ClientSession | None = None,
        *,
        generation: int | None = None,
        guest: bool = False,
    ) -> None:
        self.handle = handle
        self.headers = {"Authorization": f"Bearer {handle.token}"}
        if generation is not None:
            self.headers[GENERATION_HEADER] = str(generation)
        if guest:
            self.headers[GUEST_HEADER] = "1"
        self._session = session
        self._owns_session = session is None
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the session if it was opened here. Repeatable; later requests raise PoolClosedError."""
        self._closed = True
        if self._owns_session and self._session is not None:
            await self._session.close()

    @asynccontextmanager
    async def stream(
        self,
        method: str,
        path: str,
        *expected: type[AgentEnvError],
        lease: str = "",
        params: Params | None = None,
        data: Any = None,
        timeout_s: float | None = None,
        silence_s: float | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The response to a request that was accepted, to be read in the block. ``timeout_s`` is for all of it;
        ``silence_s`` for connecting, and for each wait for more of the response."""
        connect_s = None if silence_s is None else min(silence_s, _CONNECT_S)
        timeout = aiohttp.ClientTimeout(total=None, connect=connect_s, sock_read=silence_s)
        request = self._opened().request(
            method, self.handle.base_url + path, headers=self._headers(lease), params=params, data=data, timeout=timeout
        )
        with self.failures(f"{method} {path}", timeout_s):
            async with asyncio.timeout(timeout_s), request as response:
                if not 200 <= response.status < 300:
                    raise self.refusal(response.status, await self._read(response), *expected)
                yield response

    async def request(
        self, method: str, path: str, *expected: type[AgentEnvError], **options: Unpack[RequestOptions]
    ) -> bytes:
        """The body of the response to a request that was accepted, 16 MiB at most; see :meth:`stream`."""
        async with self.stream(method, path, *expected, **options) as response:
            return await self._read(response)

    async def socket(
        self,
        path: str,
        *expected: type[AgentEnvError],
        max_message_bytes: int,
        lease: str = "",
        params: Params | None = None,
        heartbeat_s: float | None = None,
    ) -> aiohttp.ClientWebSocketResponse:
        """An open WebSocket. With ``heartbeat_s`` it ends when nothing came for one and a half times as long."""
        try:
            with self.failures(f"GET {path}"):
                return await self._opened().ws_connect(
                    self.handle.base_url + path,
                    headers=self._headers(lease),
                    params=params,
                    max_msg_size=max_message_bytes,
                    compress=0,
                    heartbeat=heartbeat_s,
                    timeout=aiohttp.ClientWSTimeout(ws_close=_CLOSE_S),
                )
        except ConnectionLostError as error:
            if not isinstance(error.__cause__, aiohttp.WSServerHandshakeError):
                raise
        # aiohttp drops the body of a failed handshake, which has the reason: an ordinary request gets it.
        await self.request("GET", path, *expected, lease=lease, params=params)
        raise ProtocolError(f"container {self.handle.id}: GET {path} opens no WebSocket")

    @contextmanager
    def failures(self, what: str, timeout_s: float | None = None) -> Iterator[None]:
        """Within it, a failure of the connection is ConnectionLostError; ``what`` names the request."""
        try:
            yield
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            why = str(error) or repr(error)
            if isinstance(error, TimeoutError) and timeout_s is not None:
                why = f"no response within {timeout_s:.1f} s"
            raise self.lost(f"{what}: {why}") from error

    def lost(self, why: str) -> ConnectionLostError:
        """The error for a connection that failed."""
        return ConnectionLostError(f"container {self.handle.id}: {why}")

    def refusal(self, status: int, body: bytes, *expected: type[AgentEnvError]) -> AgentEnvError:
        """The error for a response that is not 2xx. One by a proxy that did not reach the container, or by a relay, is
        ConnectionLostError."""
        reply = error_reply(body)
        if reply is None:
            if status in _GATEWAY:
                return self.lost(f"it cannot be reached: HTTP {status} from a proxy")
            return ProtocolError(f"container {self.handle.id} returned HTTP {status}: {body[:200]!r}")
        return from_wire(reply.error, f"container {self.handle.id}: {reply.message}", reply.next_step, *expected)

    def parsed(self, model: type[Reply], raw: bytes) -> Reply:
        """The reply in a response's body. Raises ProtocolError."""
        try:
            return model.model_validate_json(raw)
        except ValidationError as error:
            raise ProtocolError(f"container {self.handle.id}: {model.__name__}: {error}") from error

    def server_info(self, raw: bytes) -> ServerInfo:
        """The response to ``GET /v1/info``. Raises ProtocolError: another version, or not a sandbox server."""
        try:
            # Checked before the model is built: another version may have other fields.
            info = json.loads(raw)
            version = info.get("protocol") if isinstance(info, dict) else None
        except ValueError as error:
            raise ProtocolError(f"container {self.handle.id} is not a sandbox server: {error}") from error
        if version != PROTOCOL_VERSION:
            raise ProtocolError(
                f"container {self.handle.id} speaks protocol {version!r}, this client {PROTOCOL_VERSION}",
                next_step="use the same agentenv release on both sides",
            )
        return self.parsed(ServerInfo, raw)

    def _opened(self) -> aiohttp.ClientSession:
        if self._closed:
            raise PoolClosedError(f"the connection to container {self.handle.id} is closed")
        if self._session is None:
            self._session = open_session()
        return self._session

    def _headers(self, lease: str) -> dict[str, str]:
        return {**self.headers, LEASE_HEADER: lease} if lease else self.headers

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        raw = bytearray()
        async for piece in response.content.iter_any():
            raw += piece
            if len(raw) > _MAX_REPLY_BYTES:
                raise ProtocolError(f"container {self.handle.id} sent a reply above {_MAX_REPLY_BYTES} bytes")
        return bytes(raw)


class Retries:
    """Decides whether a request whose connection was lost is sent again: ``attempts`` times in all, and for
    ``within_s`` after ``since_s``, by default the first failure since there was progress."""

    def __init__(
        self,
        first_pause_s: float,
        *,
        attempts: float = math.inf,
        within_s: float = math.inf,
        since_s: float | None = None,
    ) -> None:
        self._first_pause_s = first_pause_s
        self._failures = 0
        self._attempts_left = attempts
        self._within_s = within_s
        self._since_s = since_s

    def progressed(self) -> None:
        """The request made progress."""
        self._since_s = None
        self._failures = 0

    async def after(self, lost: AgentEnvError) -> None:
        """Wait before the next attempt. Raises ``lost`` when there is none."""
        now = asyncio.get_running_loop().time()
        self._since_s = now if self._since_s is None else self._since_s
        self._attempts_left -= 1
        self._failures += 1
        if self._attempts_left <= 0 or now - self._since_s >= self._within_s:
            raise lost
        longest_s = pause_s(self._first_pause_s, _LONGEST_PAUSE_S, self._failures)
        wait_s = longest_s * random.uniform(1.0, 1.2)  # noqa: S311 (not all clients at once)
        await asyncio.sleep(min(wait_s, self._since_s + self._within_s - now))


def error_reply(body: bytes) -> ErrorReply | None:
    """The body of a refusal; None when it is from a proxy, or something else, instead of the container."""
    try:
        return ErrorReply.model_validate_json(body)
    except ValidationError:
        return None
