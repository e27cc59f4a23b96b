"""Requests of the pool to one container: lease a slot, reset a slot, heartbeats. I/O, no decisions."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping
from enum import StrEnum

import aiohttp

from agentenv.backoff import Backoff
from agentenv.config import PoolSettings
from agentenv.containers.control import ContainerControl
from agentenv.containers.handle import ContainerHandle
from agentenv.deadlines import RELEASE_TIMEOUT_S, SLOT_REMADE_S
from agentenv.errors import (
    AcquireTimeoutError,
    AgentEnvError,
    ConnectionLostError,
    LeaseLostError,
    ProtocolError,
    SlotDestroyedError,
    from_wire,
)
from agentenv.slots.commands import Grant, Reclaim
from agentenv.slots.records import Holder
from agentenv.wire.leases import LeaseKey, LeaseLoss, LeaseRequest, RenewRequest, SlotReport
from agentenv.wire.states import SlotState


class Liveness(StrEnum):
    """State of a container judged by its silence."""

    well = "well"
    suspect = "suspect"
    gone = "gone"


class Silence:
    """Time for which one container has not answered, excluding time in which *we* were not asking.

    A process whose event loop was blocked for half a minute has received nothing either, which is no evidence
    against a container. So time counts in steps of at most ``step_s``: the rest of a longer gap between two ticks
    was our own delay.
    """

    def __init__(self, suspect_after_s: float, gone_after_s: float, now: float) -> None:
        self._suspect_after_s = suspect_after_s
        self._gone_after_s = gone_after_s
        self._last = now
        self._silent_s = 0.0
        self.step_s = suspect_after_s / 4
        """Expected interval between calls of tick()."""

    @property
    def silent_s(self) -> float:
        """Seconds of silence so far."""
        return self._silent_s

    def answered(self, now: float) -> None:
        """The container answered."""
        self._last = now
        self._silent_s = 0.0

    def tick(self, now: float) -> Liveness:
        """Time has passed without an answer; return the liveness."""
        self._silent_s += min(max(0.0, now - self._last), 2 * self.step_s)
        self._last = now
        if self._silent_s >= self._gone_after_s:
            return Liveness.gone
        return Liveness.suspect if self._silent_s >= self._suspect_after_s else Liveness.well

    def __repr__(self) -> str:
        return f"<Silence {self._silent_s:.1f} s of {self._gone_after_s:.1f} s>"


logger = logging.getLogger(__name__)

Ended = Mapping[int, AgentEnvError | None]
"""Leases that have ended, by id, with the container's reason."""

_POLL_MIN_S = 0.02
_POLL_MAX_S = 2.0
_AT_ONCE = 256
_PLAIN_AT_ONCE = 2
"""Leases of plain slots, per container: it grants one after the other, each in a fraction of a millisecond, and every
connection that a burst of leases opens stays open for half a minute."""


class RequestLimits:
    """Concurrency limits of the whole pool, per kind of request; heartbeats are exempt.

    Ten thousand requests at once keep this process busy for so long that its own heartbeats are late, which would
    look like silent containers. The limits are wide enough that a few stalled containers do not exhaust them.
    """

    def __init__(self) -> None:
        self.leases = asyncio.Semaphore(_AT_ONCE)
        self.resets = asyncio.Semaphore(_AT_ONCE)


class ContainerLink:
    """Requests to one container, and what must be remembered to repeat them."""

    def __init__(
        self,
        handle: ContainerHandle,
        session: aiohttp.ClientSession | None,
        settings: PoolSettings,
        limits: RequestLimits,
        clock: Callable[[], float],
        *,
        generation: int = 0,
        guest: bool = False,
    ) -> None:
        """``generation`` is that of whoever controls the container, 0: nobody else ever does. ``guest``: somebody else
        may control it, and leases are taken beside its own."""
        self.handle = handle
        self.control = ContainerControl(handle, session, generation=generation or None, guest=guest)
        self._settings = settings
        self._limits = limits
        self._clock = clock
        self._keys: dict[int, LeaseKey] = {}
        self._ttls: dict[int, float] = {}
        """Of the leases that are renewed for another time than the settings'."""
        self._requests: dict[int, LeaseRequest] = {}
        """Those without an answer that says whether the lease was granted."""
        self._plain_leases = asyncio.Semaphore(_PLAIN_AT_ONCE)
        self._alarm = asyncio.Event()
        self.listed = False
        """Whether the container's slots are known."""
        self.supervisor_silent_s = 0.0
        """Seconds for which, at the last heartbeat, the container's supervisor had not answered."""

    @property
    def beat_s(self) -> float:
        """Interval between heartbeats: short enough to renew leases and to notice silence in time."""
        shortest_s = min((self._settings.lease_ttl_s, *self._ttls.values()))
        return min(shortest_s / 3, self._settings.suspect_after_s / 2)

    async def inventory(self) -> tuple[list[SlotState], Mapping[int, Holder]]:
        """Return the state of every slot, by index, and whose the leased ones are that this link adopts: none.
        Raises AgentEnvError."""
        async with self._limits.leases:
            reply = await self.control.slots(timeout_s=self._settings.start_timeout_s)
        return [report.state for report in sorted(reply.slots, key=lambda report: report.slot)], {}

    async def lease(self, grant: Grant) -> int:
        """Request a lease; returns the slot's epoch. Raises ConnectionLostError (it may have been granted) or the
        error the container reports."""
        async with self._limits.leases:
            left_s = grant.deadline - self._clock()
            if left_s <= 0:
                raise AcquireTimeoutError("the deadline passed before the request was sent")
            if grant.root is not None:
                return await self._lease(grant, min(left_s, SLOT_REMADE_S))
            patience_s = min(left_s, self._settings.suspect_after_s)
            try:
                async with asyncio.timeout(patience_s), self._plain_leases:
                    return await self._lease(grant, patience_s)
            except TimeoutError as error:
                raise ConnectionLostError(
                    f"container {self.handle.id} did not answer a lease within {patience_s:.3g} s"
                ) from error

    async def _lease(self, grant: Grant, timeout_s: float) -> int:
        request = LeaseRequest(
            slot=grant.slot,
            trajectory=grant.trajectory,
            ttl_s=grant.ttl_s or self._settings.lease_ttl_s,
            request_id=grant.request_id or secrets.token_hex(16),
            tags=grant.tags,
            root=grant.root,
        )
        self._requests[grant.lease] = request
        granted = await self.control.lease(request, timeout_s=timeout_s)
        self._keys[grant.lease] = granted.key
        self._requests.pop(grant.lease, None)
        return granted.key.epoch

    def hold(self, lease_id: int, key: LeaseKey, ttl_s: float | None = None) -> None:
        """Renew a lease that was granted elsewhere, for ``ttl_s`` each time; None: the settings'."""
        self._keys[lease_id] = key
        if ttl_s is not None:
            self._ttls[lease_id] = ttl_s

    def let_go(self, lease_id: int) -> None:
        """Renew it no longer. No effect if it is not held."""
        self._keys.pop(lease_id, None)
        self._ttls.pop(lease_id, None)

    @property
    def held(self) -> tuple[int, ...]:
        """The leases that it renews."""
        return tuple(self._keys)

    def key(self, lease_id: int) -> LeaseKey:
        """Key of a granted lease. Raises KeyError for any other."""
        return self._keys[lease_id]

    async def reclaim(self, command: Reclaim, late: Callable[[], None]) -> SlotState | Holder:
        """Have the slot reset; return ``free`` or ``quarantined``, or who has leased it meanwhile (never this class).
        Retries until cancelled, which happens when the container is gone.

        ``late`` is called once if the reset takes longer than ``reset_timeout_s``. While another client leases the
        slot no reset is under way, and no time limit applies.
        """
        alarm: asyncio.TimerHandle | None = None
        loop = asyncio.get_running_loop()

        def resetting(under_way: bool) -> None:
            nonlocal alarm
            if alarm is not None and not under_way:
                alarm.cancel()
                alarm = None
            elif alarm is None and under_way:
                alarm = loop.call_later(self._settings.reset_timeout_s, late)

        try:
            return await self._reclaim(command, resetting)
        finally:
            resetting(False)

    async def _reclaim(self, command: Reclaim, resetting: Callable[[bool], None]) -> SlotState | Holder:
        slot, lease_id = command.slot, command.lease
        key = self._keys.pop(lease_id, None) if lease_id is not None else None
        request = self._requests.pop(lease_id, None) if lease_id is not None else None
        backoff = Backoff(_POLL_MIN_S, _POLL_MAX_S)
        while True:
            try:
                async with self._limits.resets:
                    resetting(True)  # only now: waiting for the limit is not the container's fault
                    if key is None and request is not None:
                        # Whether it was granted is unknown: repeating the request finds the lease, or makes it.
                        key = (await self.control.lease(request)).key
                    state = await self._release(slot, key)
                resetting(state is not SlotState.leased)
                key = request = None
            except ConnectionLostError:
                state = SlotState.resetting
            except AgentEnvError as error:
                logger.debug("slot %s/%d is not ours to release: %s", self.handle.id, slot, error)
                key, request, state = None, None, SlotState.resetting
            except Exception:  # keep asking about the slot, whatever went wrong with the request
                logger.exception("slot %s/%d could not be released", self.handle.id, slot)
                key, request, state = None, None, SlotState.resetting
            if state in (SlotState.free, SlotState.quarantined):
                return state
            await asyncio.sleep(backoff.next_s())

    async def _release(self, slot: int, key: LeaseKey | None) -> SlotState:
        if key is not None:
            return (await self.control.release(key, timeout_s=RELEASE_TIMEOUT_S)).state
        reports = {report.slot: report.state for report in (await self.control.slots()).slots}
        return reports.get(slot, SlotState.quarantined)

    def latest(self, slot: int) -> SlotReport | None:  # noqa: ARG002 - for those that watch
        """What the container last reported of the slot, if it is watched."""
        return None

    async def end_at_renewal(self, slot: int, epoch: int, why: AgentEnvError) -> None:
        """For those that watch: whoever renews its own leases need not be told."""

    def hurry(self) -> None:
        """Send a heartbeat now, because something looks wrong."""
        self._alarm.set()

    async def keep_in_touch(
        self,
        heard: Callable[[Ended], None],
        silent: Callable[[Liveness], None],
        reported: Callable[[SlotReport], None] = lambda _: None,  # noqa: ARG002 - for those that watch
    ) -> None:
        """Send heartbeats until the container is given up (``silent(gone)`` comes last) or this is cancelled.

        ``heard(ended)`` follows each answer, with the leases that have ended and, if known, the reasons;
        ``reported`` each report about a slot, if the container is watched.
        """
        silence = Silence(self._settings.suspect_after_s, self._settings.gone_after_s, self._clock())
        while True:
            beat = asyncio.create_task(self._beat(dict(self._keys)))
            try:
                while not beat.done():
                    await asyncio.wait({beat}, timeout=silence.step_s)
                    if not beat.done() and self._judge(silence.tick(self._clock()), silent):
                        return
            finally:
                beat.cancel()
            stale = beat.result()
            if stale is not None:
                silence.answered(self._clock())
                heard(stale)
            elif self._judge(silence.tick(self._clock()), silent):
                return
            await self._pause(self.beat_s if stale is not None else min(self.beat_s, silence.step_s))
            silence.tick(self._clock())

    def _judge(self, liveness: Liveness, silent: Callable[[Liveness], None]) -> bool:
        if liveness is not Liveness.well:
            silent(liveness)
        return liveness is Liveness.gone

    async def _beat(self, held: Mapping[int, LeaseKey]) -> Ended | None:
        """One heartbeat; returns the leases that ended, or None without a valid answer."""
        usual_s, ended = self._settings.lease_ttl_s, dict[int, AgentEnvError | None]()
        for ttl_s in {self._ttls.get(lease_id, usual_s) for lease_id in held} or {usual_s}:
            alike = {lease_id: key for lease_id, key in held.items() if self._ttls.get(lease_id, usual_s) == ttl_s}
            request = RenewRequest(keys=tuple(alike.values()), ttl_s=ttl_s)
            try:
                reply = await self.control.renew(request, timeout_s=self._settings.gone_after_s / 2)
            except AgentEnvError as error:
                logger.debug("no heartbeat of %s: %s", self.handle.id, error)
                return None
            self.supervisor_silent_s = reply.supervisor_silent_s
            lost = {loss.slot: loss for loss in reply.lost}
            stale = frozenset(reply.stale)
            ended |= {id_: _error_of(lost.get(key.slot)) for id_, key in alike.items() if key.slot in stale}
        return ended

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._alarm.wait()
        except TimeoutError:
            return
        finally:
            self._alarm.clear()

    def __repr__(self) -> str:
        return f"<ContainerLink {self.handle.id}>"


def _error_of(loss: LeaseLoss | None) -> AgentEnvError | None:
    if loss is None:
        return None
    error = from_wire(loss.error, loss.message, "", LeaseLostError, SlotDestroyedError)
    return None if isinstance(error, ProtocolError) else error
