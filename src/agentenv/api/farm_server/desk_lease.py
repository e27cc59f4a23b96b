"""Leases that the farm holds itself, for programs that only know their trajectories' names."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from agentenv.api.farm_server.desk import Desk
from agentenv.api.farm_server.open_ask import OpenAsk
from agentenv.api.farm_server.tokens import Right
from agentenv.containers.handle import ContainerHandle
from agentenv.errors import AgentEnvError, ConnectionLostError, LeaseLostError, PoolClosedError
from agentenv.slots.container_link import ContainerLink
from agentenv.slots.pool_errors import acquire_timeout_error
from agentenv.slots.records import LeaseRecord
from agentenv.wire import farm as wire
from agentenv.wire.base import SlotIndex
from agentenv.wire.leases import BY_NAME, ActionReply, LeaseAction, LeaseKey, RenewRequest

_LOOK_S: Final = wire.ASK_TTL_S / 2
"""How often an ask that waits is looked at: it is dropped when no client does."""
_SEARCH_S: Final = 1.0


class DeskLease:
    """One slot, granted by the desk. Implements :class:`agentenv.executor.session.SessionLease`. It lasts in its
    container for as long as it was last renewed, whatever becomes of this process."""

    def __init__(self, desk: Desk, opened: OpenAsk) -> None:
        ((self.id, grant),) = opened.held.items()
        self.name = grant.lease
        self.key: LeaseKey = grant.key
        container = grant.lease.partition("/")[0]
        self.container = ContainerHandle(container, grant.index, grant.base_url, grant.token, grant.slots)
        self._by = opened.by
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

    async def act(self, action: LeaseAction) -> ActionReply:
        """Do something to the slot (see the action)."""
        return await self.link.control.act(self.key, action)

    async def release(self) -> None:
        """End it, unless the farm is ending: then it stays for the next one."""
        if not self._desk.closed:
            self._desk.end(self.id, None, self._by)

    @property
    def link(self) -> ContainerLink:
        """The farm's link to its container. Raises what ended the lease, ConnectionLostError."""
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
    await desk.ask(wire.AsksRequest(asks=(ask,), run=run), run, right.tokens, right.ends_unix_s)
    while (opened := desk.find(ask.request_id, run)) is not None and not opened.decided.is_set():
        left_s = until - asyncio.get_running_loop().time()
        if left_s <= 0:
            raise acquire_timeout_error(timeout_s, desk.state_of(opened).place)
        with suppress(TimeoutError):
            async with asyncio.timeout(min(left_s, _LOOK_S)):
                await opened.decided.wait()
    if opened is None:
        raise LeaseLostError("the trajectory was released while it waited for a slot")
    if opened.error is not None:
        raise opened.error.copy()
    if not opened.granted:
        raise PoolClosedError("the farm service is shutting down", next_step="retry: its replacement will answer")
    return DeskLease(desk, opened) if opened.held else None


async def renew(leases: Sequence[DeskLease], ttl_s: float) -> tuple[SlotIndex, ...]:
    """Leases of one container last so long from now on: the slots of those that do. Of those that have ended the watch
    tells. Raises AgentEnvError when it is not known that they do."""
    keys = tuple(lease.key for lease in leases)
    return (await leases[0].link.control.renew(RenewRequest(keys=keys, ttl_s=ttl_s))).renewed


class HeldBefore:
    """Finds the leases that the farm holds itself, whichever farm process has granted them. All are searched at most
    once a second: later ones were granted by this process, which remembers them."""

    def __init__(self, desk: Desk, clock: Callable[[], float]) -> None:
        self._desk = desk
        self._clock = clock
        self._found: dict[tuple[str, str], LeaseRecord] = {}
        self._searched_at = -math.inf

    def find(self, run: str, trajectory: str) -> LeaseRecord | None:
        """The lease of that trajectory. What it may have lost instead is in the desk's ``lost_names``."""
        self._desk.lost_names.learn(self._desk.yard.links.values())
        if self._clock() - self._searched_at >= _SEARCH_S:
            self._searched_at = self._clock()
            mine = self._desk.leases(lambda lease: lease.tags.environment == BY_NAME)
            self._found = {(lease.tags.run, lease.trajectory): lease for lease in mine}
        found = self._found.get((run, trajectory))
        return found if found is not None and found.held else None
