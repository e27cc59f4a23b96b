"""The control side of one container: leases, what is done to leased slots, the inventory.

Tool calls use the executor's stream instead.
"""

from __future__ import annotations

import asyncio
import io
import secrets
import time
from types import TracebackType
from typing import Self, TypeVar

import aiohttp
from pydantic import ValidationError
from tenacity import AsyncRetrying, retry_if_exception_type, wait_exponential, wait_random
from tenacity.stop import stop_base

from agentenv.containers.handle import ContainerHandle
from agentenv.containers.http import checked_info, fence_headers, headers_for, open_session, refusal
from agentenv.deadlines import scaled
from agentenv.errors import ConnectionLostError, PoolClosedError, ProtocolError
from agentenv.wire.base import WireModel
from agentenv.wire.leases import (
    ActionReply,
    ActionRequest,
    EndRequest,
    LeaseAction,
    LeaseGrant,
    LeaseKey,
    LeaseRequest,
    ReleaseReply,
    RenewReply,
    RenewRequest,
)
from agentenv.wire.server import ServerInfo, SlotsReply

Reply = TypeVar("Reply", bound=WireModel)

_DEFAULT_TIMEOUT_S = scaled(10.0)
SLOT_REMADE_S = scaled(75.0)
"""For what makes a slot anew, an action or a lease with a root: longer than the sandbox server itself waits (its
``SEAL_S`` and ``REROOT_S``), so that its answer arrives before this side gives up the connection."""
_MAX_REPLY_BYTES = 16 * 1024 * 1024


class ContainerControl:
    """Control client of one container. Every request is safe to repeat, and is repeated until its deadline.

    Every method raises ConnectionLostError when no answer came within ``timeout_s``, ProtocolError when the answer
    violates the wire contract, and otherwise the error the container named: FencedError for what changes leases when
    a farm controls the container and ``generation`` is not its (``guest``: lease beside the farm).
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
        self._fence = fence_headers(generation, guest=guest)
        self._session = session
        self._owns_session = session is None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the session if it was opened here. May be repeated."""
        if self._owns_session and self._session is not None:
            await self._session.close()
            self._session = None

    async def info(self, *, timeout_s: float = _DEFAULT_TIMEOUT_S) -> ServerInfo:
        """The handshake. Raises ProtocolError when the server speaks another version."""
        return checked_info(self.handle, await self._insist("GET", "/v1/info", None, timeout_s))

    async def slots(self, *, timeout_s: float = _DEFAULT_TIMEOUT_S) -> SlotsReply:
        """The inventory."""
        return self._parse(SlotsReply, await self._insist("GET", "/v1/slots", None, timeout_s))

    async def lease(self, request: LeaseRequest, *, timeout_s: float = _DEFAULT_TIMEOUT_S) -> LeaseGrant:
        """Lease a slot. Repeating a ``request_id`` returns the same lease."""
        return self._parse(LeaseGrant, await self._insist("POST", "/v1/leases", request, timeout_s))

    async def renew(self, request: RenewRequest, *, timeout_s: float = _DEFAULT_TIMEOUT_S) -> RenewReply:
        """One heartbeat for many leases. Sent once only: a late success is worth less than an early failure."""
        return self._parse(RenewReply, await self._once("POST", "/v1/leases/renew", request, timeout_s))

    async def release(self, key: LeaseKey, *, timeout_s: float = _DEFAULT_TIMEOUT_S) -> ReleaseReply:
        """End a lease; the reply gives the slot's state. An epoch that has ended is not an error."""
        return self._parse(ReleaseReply, await self._insist("POST", "/v1/leases/release", key, timeout_s))

    async def end(self, request: EndRequest) -> ReleaseReply:
        """End whatever lease an epoch has, without knowing its secret: for operators."""
        return self._parse(ReleaseReply, await self._insist("POST", "/v1/leases/end", request, _DEFAULT_TIMEOUT_S))

    async def act(self, key: LeaseKey, action: LeaseAction, *, timeout_s: float = SLOT_REMADE_S) -> ActionReply:
        """Do something to a leased slot (see the action). Raises StaleLeaseError; SlotDestroyedError and LeaseLostError
        when the lease ends over it; CheckpointError: the files cannot be kept; SandboxUnavailableError: the network
        cannot be had."""
        request = ActionRequest(key=key, action=action, request_id=secrets.token_hex(8))
        return self._parse(ActionReply, await self._insist("POST", "/v1/leases/act", request, timeout_s))

    async def _insist(self, method: str, path: str, body: WireModel | None, timeout_s: float) -> bytes:
        """Repeat the request until it is answered or ``timeout_s`` has passed."""
        until = time.monotonic() + timeout_s
        attempts = AsyncRetrying(
            retry=retry_if_exception_type(ConnectionLostError),
            wait=wait_exponential(multiplier=0.02, max=1.0) + wait_random(0, 0.05),
            stop=_StopAt(until),
            reraise=True,
        )
        async for attempt in attempts:
            with attempt:
                return await self._once(method, path, body, max(0.001, until - time.monotonic()))
        raise AssertionError("tenacity ends by returning or raising")  # pragma: no cover

    async def _once(self, method: str, path: str, body: WireModel | None, timeout_s: float) -> bytes:
        if self._session is None:
            if not self._owns_session:
                raise PoolClosedError(f"the control of {self.handle.id} is closed")
            self._session = open_session()
        data = None if body is None else io.BytesIO(body.model_dump_json().encode())  # a lease may have a large root
        content = {} if data is None else {"Content-Type": "application/json"}
        headers = headers_for(self.handle, **content, **self._fence)
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._session.request(method, self.handle.base_url + path, data=data, headers=headers) as response,
            ):
                raw = await self._body(response)
                status = response.status
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self._lost(method, path, timeout_s, error) from error
        if 200 <= status < 300:
            return raw
        raise refusal(self.handle, status, raw)

    async def _body(self, response: aiohttp.ClientResponse) -> bytes:
        raw = bytearray()
        async for chunk in response.content.iter_any():
            raw += chunk
            if len(raw) > _MAX_REPLY_BYTES:
                raise ProtocolError(f"container {self.handle.id} sent a reply above {_MAX_REPLY_BYTES} bytes")
        return bytes(raw)

    def _lost(self, method: str, path: str, timeout_s: float, error: Exception) -> ConnectionLostError:
        what = f"no response within {timeout_s:.1f} s" if isinstance(error, TimeoutError) else str(error) or repr(error)
        return ConnectionLostError(f"container {self.handle.id}: {method} {path}: {what}")

    def _parse(self, model: type[Reply], raw: bytes) -> Reply:
        try:
            return model.model_validate_json(raw)
        except ValidationError as error:
            raise ProtocolError(f"container {self.handle.id}: {model.__name__}: {error}") from error


class _StopAt(stop_base):
    """Stop retrying at a given time instead of after a number of attempts."""

    def __init__(self, until: float) -> None:
        self._until = until

    def __call__(self, retry_state: object) -> bool:  # noqa: ARG002 - tenacity's signature
        return time.monotonic() >= self._until - 0.01
