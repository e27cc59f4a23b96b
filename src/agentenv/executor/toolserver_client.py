"""Client of a tool server: each call is requested until its result arrives, and never run twice.

The server stores calls by id, so a request is repeated whenever a connection is cut.
"""

from __future__ import annotations

import asyncio
import io
import logging
import secrets
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import aiohttp
from pydantic import BaseModel, ValidationError

from agentenv.background import TaskSet
from agentenv.backoff import Backoff
from agentenv.deadlines import scaled
from agentenv.errors import (
    AgentEnvError,
    CallLostError,
    ConfigError,
    ConnectionLostError,
    InfraError,
    PoolClosedError,
    ProtocolError,
    from_wire,
)
from agentenv.tools.remote import remote_spec
from agentenv.tools.spec import ToolSpec
from agentenv.wire.base import PROTOCOL_VERSION
from agentenv.wire.calls import CallResult
from agentenv.wire.server import ErrorReply
from agentenv.wire.toolserver import (
    MAX_REQUEST_BYTES,
    CallScope,
    CancelCalls,
    Done,
    EndTrajectory,
    ToolCallReply,
    ToolCallRequest,
    ToolDescription,
    ToolList,
)

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=BaseModel)

_WAIT_S: Final = 20.0
_SLACK_S: Final = scaled(15.0)
"""How much later than the server has announced a response may arrive."""
_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 2.0
_LAST_REQUEST_S: Final = scaled(5.0)
_MOST_CONNECTIONS: Final = 1_000
_UNREACHABLE: Final = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError)


class ToolServerClient:
    """Runs external tools on a tool server; an async context manager, and an ``ExternalTools``.

    ``reconnect_deadline_s``: how long the server may be unreachable before its calls end with ConnectionLostError.
    ``wait_s``: how long one request is kept open for a running call.

    Raises (on entering): ConnectionLostError: there is no answer. ConfigError: the token is wrong. ProtocolError:
    it is not a tool server of this version.
    """

    def __init__(self, url: str, token: str, *, reconnect_deadline_s: float = 30.0, wait_s: float = _WAIT_S) -> None:
        self._url = url.rstrip("/")
        self._token = token
        self._deadline_s = reconnect_deadline_s
        self._wait_s = wait_s
        self._session: aiohttp.ClientSession | None = None
        self._boot = ""
        self._prefix = secrets.token_hex(8)
        self._number = 0
        self._state_boots: dict[str, str] = {}
        self._arrived: dict[str, list[str]] = {}
        self._last_requests = TaskSet()
        self.tools: tuple[ToolDescription, ...] = ()
        """The server's tools when the client was entered."""

    def __repr__(self) -> str:
        return f"<ToolServerClient {self._url}, {len(self.tools)} tools>"

    @property
    def specs(self) -> tuple[ToolSpec, ...]:
        """The server's tools for a catalog, including those that are not available."""
        return tuple(remote_spec(tool) for tool in self.tools)

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=_MOST_CONNECTIONS),
            headers={"Authorization": f"Bearer {self._token}"},
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10.0),
            trust_env=False,
        )
        try:
            await self._handshake()
        except BaseException:
            await self._session.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._last_requests.wait()
        if self._session is not None:
            await self._session.close()

    async def call(self, scope: CallScope, tool: str, arguments: Mapping[str, Any], timeout_s: float) -> CallResult:
        """Run one call; cancelling this cancels it on the server.

        Raises: ConnectionLostError: the server was unreachable for too long; the call may have run. CallLostError:
        the server was restarted while it ran the call or held the trajectory's state. InfraError: the tool itself
        failed on our side (a provider, the browser).
        """
        self._number += 1
        call_id = f"{self._prefix}-{self._number}"
        forget = tuple(self._arrived.pop(scope.trajectory, ()))
        request = ToolCallRequest(
            id=call_id,
            scope=scope,
            tool=tool,
            arguments=dict(arguments),
            timeout_s=timeout_s,
            boot=self._boot,
            state_boot=self._state_boots.get(scope.trajectory),
            forget=forget[:1_000],
            wait_s=self._wait_s,
        )
        if (refused := too_large(request)) is not None:
            return refused
        try:
            reply = await self._run_until_done(request)
        except asyncio.CancelledError:
            self._send_later("/v1/cancel", CancelCalls(trajectory=scope.trajectory, ids=(call_id,)))
            raise
        self._arrived.setdefault(scope.trajectory, []).append(call_id)
        if reply.stateful:
            self._state_boots[scope.trajectory] = reply.boot
        assert reply.result is not None  # _run_until_done waits for it
        return settled(reply.result)

    async def ended(self, trajectory: str) -> None:
        """Notify the server, in the background: a server that cannot be notified forgets by itself later."""
        self._state_boots.pop(trajectory, None)
        self._arrived.pop(trajectory, None)
        self._send_later("/v1/trajectories/end", EndTrajectory(trajectory=trajectory))

    # -- asking ------------------------------------------------------------------------------------

    async def _handshake(self) -> None:
        listed = await self._request_with_retries("GET", "/v1/tools", None, ToolList, 10.0)
        if listed.protocol != PROTOCOL_VERSION:
            raise ProtocolError(
                f"the tool server at {self._url} speaks protocol {listed.protocol}, this side {PROTOCOL_VERSION}",
                next_step="run the same version of agentenv on both sides",
            )
        self._boot, self.tools = listed.boot, listed.tools

    async def _run_until_done(self, request: ToolCallRequest) -> ToolCallReply:
        limit_s = request.wait_s + _SLACK_S
        attempts = 0
        cut: list[Exception] = []
        while True:
            try:
                reply = await self._request_with_retries("POST", "/v1/calls", request, ToolCallReply, limit_s, cut)
            except ConfigError as error:  # the token was accepted when this client was entered
                raise InfraError(error.message, next_step=error.next_step) from error
            except CallLostError:
                # Sent once, and refused by a server started since: it ran nowhere, so the new server may run it.
                if attempts or cut:
                    raise
                await self._handshake()
                if request.boot == self._boot:
                    raise
                request = request.model_copy(update={"boot": self._boot})
            else:
                self._boot = reply.boot
                if reply.result is not None:
                    return reply
            attempts += 1

    async def _request_with_retries(
        self,
        method: str,
        path: str,
        body: BaseModel | None,
        kind: type[T],
        limit_s: float,
        cut: list[Exception] | None = None,
    ) -> T:
        """Repeat the request until there is a response, or the server was unreachable for ``reconnect_deadline_s``.
        ``cut`` collects the failures after which the request may have arrived."""
        loop = asyncio.get_running_loop()
        deadline_at = loop.time() + self._deadline_s
        backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        while True:
            try:
                return await self._request(method, path, body, kind, limit_s)
            except _UNREACHABLE as error:
                pause_s = backoff.next_s()
                if loop.time() + pause_s > deadline_at:
                    raise ConnectionLostError(
                        f"the tool server at {self._url} was unreachable for {self._deadline_s:g} s: {_text_of(error)}",
                        next_step="check that it is running (`agentenv tool-server`) and tool_server_url",
                    ) from error
                if cut is not None and not isinstance(error, aiohttp.ClientConnectorError):
                    cut.append(error)
                logger.warning("tool server at %s: %s; retrying", self._url, _text_of(error))
            await asyncio.sleep(pause_s)

    async def _request(self, method: str, path: str, body: BaseModel | None, kind: type[T], limit_s: float) -> T:
        if self._session is None or self._session.closed:
            raise PoolClosedError("the tool server's client is closed")
        raw = b"" if body is None else body.model_dump_json().encode()
        # A file is read in a thread: worth it only where reading would block the event loop.
        content = io.BytesIO(raw) if raw else None
        headers = {"Content-Type": "application/json"} if raw else {}
        async with (
            asyncio.timeout(limit_s),
            self._session.request(method, self._url + path, data=content, headers=headers) as response,
        ):
            reply = await response.read()
            if response.status >= 500:  # a proxy without its server, a server about to end: repeating is safe
                raise aiohttp.ClientConnectionError(f"HTTP {response.status}")
            if response.status >= 400:
                raise _refusal(response.status, reply, self._url)
        try:
            return kind.model_validate_json(reply)
        except ValidationError as error:
            raise ProtocolError(
                f"the service at {self._url} is not a tool server: {error.errors()[0]['msg']}"
            ) from error

    def _send_later(self, path: str, body: BaseModel) -> None:
        async def send() -> None:
            try:
                async with asyncio.timeout(_LAST_REQUEST_S):
                    await self._request("POST", path, body, Done, _LAST_REQUEST_S)
            except (*_UNREACHABLE, AgentEnvError) as error:
                logger.warning("tool server at %s: %s failed: %s", self._url, path, _text_of(error))

        self._last_requests.start(path, send(), "POST")


def too_large(request: ToolCallRequest) -> CallResult | None:
    """A model fault for arguments larger than a tool server reads."""
    if len(request.model_dump_json().encode()) <= MAX_REQUEST_BYTES:
        return None
    problem = f"the arguments of {request.tool} are larger than {MAX_REQUEST_BYTES} bytes"
    return CallResult(id=request.id, fault="model", error="invalid_arguments", message=problem)


def settled(result: CallResult) -> CallResult:
    """``result``, unless it reports an infrastructure failure. Raises: InfraError, of the class it names."""
    if result.cancelled:
        raise CallLostError(f"call {result.id} was ended on the tool server")
    if result.fault == "infra":
        raise _error_of(result.error, result.message)
    return result


def _refusal(status: int, raw: bytes, url: str) -> AgentEnvError:
    try:
        reply = ErrorReply.model_validate_json(raw)
    except ValidationError:
        return ProtocolError(f"the tool server at {url} returned HTTP {status}: {raw[:200]!r}")
    if status in (401, 403):
        return ConfigError("tool_server_token", reply.message, next_step=reply.next_step)
    return _error_of(reply.error, reply.message)


def _error_of(code: str | None, message: str) -> AgentEnvError:
    return from_wire(code, message or f"the tool server named {code}", "", InfraError)


def _text_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
