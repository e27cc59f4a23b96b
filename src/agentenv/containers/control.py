"""The control side of one container: leases, actions on leased slots, the inventory.

Tool calls use the executor's stream instead.
"""

from __future__ import annotations

import asyncio
import io
import secrets
from collections.abc import AsyncGenerator

import aiohttp

from agentenv.containers.connection import ContainerConnection, Reply, Retries
from agentenv.deadlines import SLOT_REMADE_S, scaled
from agentenv.errors import ConnectionLostError
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
from agentenv.wire.server import PausedReply, ServerInfo, SlotsReply
from agentenv.wire.tails import TAIL_BEAT_S

_DEFAULT_TIMEOUT_S = scaled(10.0)
_FIRST_PAUSE_S = 0.02


class ContainerControl(ContainerConnection):
    """Control client of one container. Every request is safe to repeat, and is repeated until its deadline.

    Every method raises ConnectionLostError when there was no response within ``timeout_s``, ProtocolError when the
    response violates the wire contract, and otherwise the error the container named: FencedError for requests that
    change leases when another farm controls the container (``guest``: lease although a farm controls it).
    """

    async def info(self, *, timeout_s: float = _DEFAULT_TIMEOUT_S) -> ServerInfo:
        """The handshake. Raises ProtocolError when the server speaks another version."""
        return self.server_info(await self._request_with_retries("GET", "/v1/info", None, timeout_s))

    async def slots(self, *, timeout_s: float = _DEFAULT_TIMEOUT_S) -> SlotsReply:
        """The inventory."""
        return await self._request_model(SlotsReply, "GET", "/v1/slots", None, timeout_s)

    async def paused(self) -> PausedReply:
        """The paused slots."""
        return await self._request_model(PausedReply, "GET", "/v1/paused", None, _DEFAULT_TIMEOUT_S)

    async def drop_paused(self, checkpoint: str) -> PausedReply:
        """Drop a paused slot; the reply has those that are left. No effect if there is none."""
        return await self._request_model(PausedReply, "DELETE", f"/v1/paused/{checkpoint}", None, _DEFAULT_TIMEOUT_S)

    async def lease(self, request: LeaseRequest, *, timeout_s: float = _DEFAULT_TIMEOUT_S) -> LeaseGrant:
        """Lease a slot. Repeating a ``request_id`` returns the same lease."""
        return await self._request_model(LeaseGrant, "POST", "/v1/leases", request, timeout_s)

    async def renew(self, request: RenewRequest, *, timeout_s: float = _DEFAULT_TIMEOUT_S) -> RenewReply:
        """One heartbeat for many leases. Sent once only: a late success is worth less than an early failure."""
        raw = await self._once("POST", "/v1/leases/renew", request, timeout_s)
        return self.parsed(RenewReply, raw)

    async def release(self, key: LeaseKey, *, timeout_s: float = _DEFAULT_TIMEOUT_S) -> ReleaseReply:
        """End a lease; the reply gives the slot's state. An epoch that has ended is not an error."""
        return await self._request_model(ReleaseReply, "POST", "/v1/leases/release", key, timeout_s)

    async def end(self, request: EndRequest) -> ReleaseReply:
        """End whatever lease an epoch has, without knowing its secret: for operators."""
        return await self._request_model(ReleaseReply, "POST", "/v1/leases/end", request, _DEFAULT_TIMEOUT_S)

    async def act(self, key: LeaseKey, action: LeaseAction, *, timeout_s: float = SLOT_REMADE_S) -> ActionReply:
        """Do something to a leased slot (see the action). Raises StaleLeaseError; SlotDestroyedError and LeaseLostError
        when the lease ends over it; CheckpointError: the files could not be kept; SandboxUnavailableError: the
        network could not be changed."""
        request = ActionRequest(key=key, action=action, request_id=secrets.token_hex(8))
        return await self._request_model(ActionReply, "POST", "/v1/leases/act", request, timeout_s)

    async def tail(self, slot: int, epoch: int) -> AsyncGenerator[bytes, None]:
        """What the calls in one slot print, until the lease of that epoch ends: lines (:mod:`agentenv.wire.tails`) in
        pieces of any length as they arrive. Not repeated: it raises ConnectionLostError when the connection is cut."""
        silence_s = scaled(5 * TAIL_BEAT_S)
        path = f"/v1/slots/{slot}/tail"
        async with self.stream("GET", path, params={"epoch": epoch}, silence_s=silence_s) as response:
            async for piece in response.content.iter_any():
                yield piece

    async def _request_model(
        self, model: type[Reply], method: str, path: str, body: WireModel | None, timeout_s: float
    ) -> Reply:
        return self.parsed(model, await self._request_with_retries(method, path, body, timeout_s))

    async def _request_with_retries(self, method: str, path: str, body: WireModel | None, timeout_s: float) -> bytes:
        """Repeat the request until there is a response or ``timeout_s`` has passed."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        retries = Retries(_FIRST_PAUSE_S, within_s=timeout_s, since_s=began_s)
        while True:
            try:
                return await self._once(method, path, body, max(0.001, began_s + timeout_s - loop.time()))
            except ConnectionLostError as lost:
                await retries.after(lost)

    async def _once(self, method: str, path: str, body: WireModel | None, timeout_s: float) -> bytes:
        data = None if body is None else _json(body)
        return await self.request(method, path, data=data, timeout_s=timeout_s)


def _json(body: WireModel) -> aiohttp.Payload:
    # aiohttp warns about plain bytes above a megabyte, and a lease may have a large root.
    return aiohttp.BytesIOPayload(io.BytesIO(body.model_dump_json().encode()), content_type="application/json")
