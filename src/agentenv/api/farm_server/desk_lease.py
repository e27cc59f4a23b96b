"""A lease that the farm holds itself, for a program that only knows its trajectory's name."""

from __future__ import annotations

import asyncio
from typing import Final

from agentenv.api.farm_server.desk import Desk, OpenAsk
from agentenv.api.farm_server.tokens import Right
from agentenv.containers.handle import ContainerHandle
from agentenv.errors import (
    AgentEnvError,
    ConnectionLostError,
    LeaseLostError,
    StaleLeaseError,
)
from agentenv.slots.container_link import ContainerLink
from agentenv.slots.pool_errors import acquire_timeout_error
from agentenv.wire import farm as wire
from agentenv.wire.leases import LeaseKey, RenewRequest

_LOOK_S: Final = wire.ASK_TTL_S / 2
"""How often an ask that waits is repeated: it is dropped when nobody does."""


class DeskLease:
    """One slot, granted by the desk. Implements :class:`agentenv.executor.session.SessionLease`. It lasts in its
    container for as long as it was last renewed, whatever becomes of this process."""

    def __init__(self, desk: Desk, opened: OpenAsk) -> None:
        ((self.id, grant),) = opened.held.items()
        self.name = grant.lease
        self.key: LeaseKey = grant.key
        self.container = ContainerHandle(
            grant.lease.partition("/")[0], grant.index, grant.base_url, grant.token, grant.slots
        )
        self.by = opened.by
        self._desk = desk
        self._opened = opened

    @property
    def lost(self) -> AgentEnvError | None:
        """Why it has ended, once it has."""
        return self._opened.lost

    async def wait_lost(self) -> AgentEnvError:
        """Return when it has ended."""
        await self._opened.over.wait()
        assert self._opened.lost is not None
        return self._opened.lost

    async def seal(self) -> None:
        """Kill everything running in the slot, keeping its workspace."""
        await self._link.control.seal(self.key)

    async def renew(self, ttl_s: float) -> None:
        """It lasts so long from now on. Raises ConnectionLostError, and what ended it."""
        reply = await self._link.control.renew(RenewRequest(keys=(self.key,), ttl_s=ttl_s))
        if self.key.slot in reply.stale:
            raise self.lost or StaleLeaseError(f"the lease {self.name} has ended")

    async def release(self) -> None:
        """End it, unless the farm is ending: then it stays for the next one."""
        if not self._desk.closed:
            self._desk.end(self.id, None, self.by)

    @property
    def _link(self) -> ContainerLink:
        link = self._desk.yard.links.get(self.container.id)
        if link is None:
            raise self.lost or ConnectionLostError(f"container {self.container.id} is not known (yet)")
        return link


async def granted(desk: Desk, ask: wire.Ask, run: str, right: Right, *, timeout_s: float) -> DeskLease | None:
    """The lease of an ask for one slot; None if it was granted one before, which has ended.

    Raises AcquireTimeoutError; the ask keeps its place for ASK_TTL_S, if it is made again. LeaseLostError: it was
    withdrawn meanwhile. PoolClosedError, QuotaError, SandboxUnavailableError.
    """
    until = asyncio.get_running_loop().time() + timeout_s
    while True:
        left_s = max(0.0, until - asyncio.get_running_loop().time())
        request = wire.AsksRequest(asks=(ask,), run=run, wait_s=min(left_s, _LOOK_S))
        (state,) = (await desk.ask(request, run, right.cap, right.jti)).asks
        opened = desk.find(ask.request_id, run)
        if opened is None:
            raise LeaseLostError("the trajectory was released while it waited for a slot")
        if opened.error is not None:
            raise opened.error.copy()
        if opened.granted:
            return DeskLease(desk, opened) if opened.held else None
        if left_s <= 0:
            raise acquire_timeout_error(timeout_s, state.place)
