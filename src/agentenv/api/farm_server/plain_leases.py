"""The leases that the farm holds itself, for programs that only know their trajectories' names."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from agentenv.api.farm_server.lost_names import LostSlot
from agentenv.api.farm_server.request_queue import RequestQueue
from agentenv.api.farm_server.settings import PlainSettings
from agentenv.api.farm_server.tokens import Right
from agentenv.background import TaskSet
from agentenv.containers.handle import ContainerHandle
from agentenv.errors import AcquireTimeoutError, AgentEnvError, LeaseLostError, PoolClosedError
from agentenv.slots.container_link import ContainerLink
from agentenv.slots.lease import LeaseBook, SlotLease
from agentenv.slots.pool_errors import acquire_timeout_error
from agentenv.slots.records import LeaseRecord
from agentenv.slots.statistics import Tally
from agentenv.wire import farm as wire
from agentenv.wire.base import SlotIndex
from agentenv.wire.leases import BY_NAME, RenewRequest

_LOOK_S: Final = wire.ASK_TTL_S / 2
"""How often an ask that waits is looked at: it is dropped when no client does."""
_SEARCH_S: Final = 1.0


class PlainLeases:
    """See the module. They last in their containers for as long as they were last renewed, whatever becomes of this
    process; so whoever has a name's slot is looked up at the containers. Implements
    :class:`agentenv.slots.lease.LeaseKeeper`."""

    def __init__(self, queue: RequestQueue, settings: PlainSettings, clock: Callable[[], float]) -> None:
        self.settings = settings
        self.clock = clock
        self._queue = queue
        self._book = LeaseBook(self, Tally(), reset_timeout_s=0)
        queue.on_ended = self._book.lose
        self._found: dict[tuple[str, str], LeaseRecord] = {}
        self._searched_at = -math.inf
        self._tasks = TaskSet()

    @property
    def closed(self) -> bool:
        """Whether the farm is ending."""
        return self._queue.closed

    async def granted(self, ask: wire.Ask, run: str, right: Right) -> SlotLease | None:
        """The lease of an ask for one slot, for as long as that waits; None if it was granted one which has ended.
        Raises what the ask was refused with; LeaseLostError: it was withdrawn meanwhile; PoolClosedError."""
        queue = self._queue
        await queue.ask(wire.AsksRequest(asks=(ask,), run=run), run, right.tokens, right.ends_unix_s)
        while (opened := queue.find(ask.request_id, run)) is not None and not opened.decided.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await opened.decided.wait()
        if opened is None:
            raise LeaseLostError("the trajectory was released while it waited for a slot")
        if opened.error is not None:
            raise opened.error.copy()
        if not opened.granted:
            raise PoolClosedError("the farm service is shutting down", next_step="retry: its replacement will answer")
        if not opened.held:
            return None
        ((number, grant),) = opened.held.items()
        link = queue.manager.links[grant.lease.partition("/")[0]]
        container = ContainerHandle(link.handle.id, grant.index, grant.base_url, grant.token, grant.slots)
        return self._book.get(number) or self._book.hold(number, grant.trajectory, grant.key, link, container)

    def late(self, ask: wire.Ask, run: str) -> AcquireTimeoutError:
        """Why an ask is not granted within ``acquire_timeout_s``."""
        opened = self._queue.find(ask.request_id, run)
        place = None if opened is None else self._queue.state_of(opened).place
        return acquire_timeout_error(self.settings.acquire_timeout_s, place)

    async def renew(self, leases: Sequence[SlotLease]) -> tuple[SlotIndex, ...]:
        """Leases of one container last ``idle_s`` from now on: the slots of those that do. Of those that have ended the
        watch tells. Raises AgentEnvError when it is not known that they do."""
        request = RenewRequest(keys=tuple(lease.key for lease in leases), ttl_s=self.settings.idle_s)
        return (await leases[0].link.control.renew(request)).renewed

    def withdraw(self, ask: wire.Ask, run: str) -> None:
        """It is not wanted any more, and what was granted for it was released."""
        self._queue.cancel(ask.request_id, run)
        self._queue.lost_names.forget(run, ask.trajectories[0])

    # -- by name ---------------------------------------------------------------------------------

    def of_name(self, run: str, trajectory: str) -> LeaseRecord | None:
        """The lease of that trajectory, whichever farm process has granted it. All are searched at most once a second:
        later ones were granted by this process, which remembers them."""
        self._learn()
        if self.clock() - self._searched_at >= _SEARCH_S:
            self._searched_at = self.clock()
            mine = self._queue.leases(lambda lease: lease.tags.environment == BY_NAME)
            self._found = {(lease.tags.run, lease.trajectory): lease for lease in mine}
        found = self._found.get((run, trajectory))
        return found if found is not None and found.held else None

    def lost(self, run: str, trajectory: str) -> LostSlot | None:
        """What that trajectory had, if it has lost it and has nothing now."""
        return self._queue.lost_names.find(run, trajectory) if self.of_name(run, trajectory) is None else None

    def release(self, run: str, trajectory: str, by: str, lease: SlotLease | None = None) -> bool:
        """End the lease of that trajectory, for the token ``by``, and forget what it has lost. False: it has none."""
        lost = self._queue.lost_names.forget(run, trajectory)
        if lost is not None and (link := self._queue.manager.links.get(lost.container)) is not None:
            self._tasks.start(trajectory, self._forget(link, lost), "release")
        found = lease or self.of_name(run, trajectory)
        return found is not None and self._queue.end(found.id, None, by)

    async def _forget(self, link: ContainerLink, lost: LostSlot) -> None:
        """Its container need not tell the next farm process of it."""
        with suppress(AgentEnvError):
            await link.control.end(lost.ended)

    def tick(self) -> None:
        """Take over which names have lost their slots, and forget those of long ago. To be called now and then."""
        self._learn()
        self._queue.lost_names.forget_old()

    def _learn(self) -> None:
        self._queue.lost_names.learn(self._queue.manager.links.values())

    async def aclose(self) -> None:
        """End what goes on."""
        await self._tasks.aclose()

    # -- the book's keeper -----------------------------------------------------------------------

    def give_back(self, lease: SlotLease) -> None:
        """See :class:`agentenv.slots.lease.LeaseKeeper`. When the farm is ending it stays for the next one."""
        if not self._queue.closed:
            self._queue.end(lease.id, None)

    def left(self, lease: SlotLease) -> None:
        """See :class:`agentenv.slots.lease.LeaseKeeper`."""
        self.give_back(lease)  # nothing leaves one here

    def refused(self, lease: SlotLease, error: AgentEnvError) -> None:
        """See :class:`agentenv.slots.lease.LeaseKeeper`."""
        self._queue.manager.refused(lease.id, error)
