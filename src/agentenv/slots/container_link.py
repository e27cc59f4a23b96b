"""The pool's errands to one container: ask for a lease, have a slot reset, keep in touch. I/O, no decisions."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping

from agentenv.backoff import Backoff
from agentenv.config import PoolSettings
from agentenv.containers.control import ContainerControl
from agentenv.errors import (
    AcquireTimeoutError,
    AgentEnvError,
    ConnectionLostError,
    LeaseLostError,
    ProtocolError,
    SlotDestroyedError,
    from_wire,
)
from agentenv.slots.health import Silence, Verdict
from agentenv.wire.leases import LeaseKey, LeaseLoss, LeaseRequest, RenewRequest
from agentenv.wire.states import SlotState

logger = logging.getLogger(__name__)

Stale = Mapping[int, AgentEnvError | None]
"""Leases that have ended, by id, with what the container says they were lost to."""

_POLL_MIN_S = 0.02
_POLL_MAX_S = 2.0
_AT_ONCE = 256
_RELEASE_TIMEOUT_S = 30.0
"""A reset that kills a fork bomb may take seconds; the heartbeat, not this, finds dead containers."""


class RequestLimits:
    """How many requests of a kind the whole pool has under way. Heartbeats pass by them.

    Ten thousand requests at once take this process so long that its own heartbeats come late, which
    would look like the containers' silence. Wide enough that a few stalled containers do not close them.
    """

    def __init__(self) -> None:
        self.leases = asyncio.Semaphore(_AT_ONCE)
        self.resets = asyncio.Semaphore(_AT_ONCE)


class ContainerLink:
    """Errands to one container, and what must be remembered to run them again."""

    def __init__(
        self, control: ContainerControl, settings: PoolSettings, doors: RequestLimits, clock: Callable[[], float]
    ) -> None:
        self.handle = control.handle
        self.control = control
        self._settings = settings
        self._doors = doors
        self._clock = clock
        self._keys: dict[int, LeaseKey] = {}
        self._requests: dict[int, LeaseRequest] = {}
        self._alarm = asyncio.Event()
        self.supervisor_silent_s = 0.0
        """For how long, at the last heartbeat, the container's supervisor had owed an answer."""

    @property
    def beat_s(self) -> float:
        """Between two heartbeats: often enough to renew in time, and to notice a silence in time."""
        return min(self._settings.lease_ttl_s / 3, self._settings.suspect_after_s / 2)

    async def inventory(self) -> list[SlotState]:
        """The state of every slot, by index. Raises AgentEnvError."""
        async with self._doors.leases:
            reply = await self.control.slots(timeout_s=self._settings.start_timeout_s)
        return [report.state for report in sorted(reply.slots, key=lambda report: report.slot)]

    async def lease(self, lease_id: int, slot: int, trajectory: str, deadline: float) -> None:
        """Ask for a slot. Raises ConnectionLostError (it may have been granted) or what the container says."""
        async with self._doors.leases:
            left_s = deadline - self._clock()
            if left_s <= 0:
                raise AcquireTimeoutError("the deadline passed before the request was sent")
            await self._lease(lease_id, slot, trajectory, min(left_s, self._settings.suspect_after_s))

    async def _lease(self, lease_id: int, slot: int, trajectory: str, timeout_s: float) -> None:
        request = LeaseRequest(
            slot=slot, trajectory=trajectory, ttl_s=self._settings.lease_ttl_s, request_id=secrets.token_hex(16)
        )
        self._requests[lease_id] = request
        grant = await self.control.lease(request, timeout_s=timeout_s)
        self._keys[lease_id] = grant.key

    def key(self, lease_id: int) -> LeaseKey:
        """The key of a lease that was granted. Raises KeyError for any other."""
        return self._keys[lease_id]

    async def reclaim(self, slot: int, lease_id: int | None, late: Callable[[], None]) -> SlotState:
        """Have the slot reset; ``free`` or ``quarantined``. Does not give up: its container's end cancels it.

        ``late`` is called once when the reset has taken longer than ``reset_timeout_s``. While somebody else leases
        the slot no reset is under way: that may take as long as it likes.
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
            return await self._reclaim(slot, lease_id, resetting)
        finally:
            resetting(False)

    async def _reclaim(self, slot: int, lease_id: int | None, resetting: Callable[[bool], None]) -> SlotState:
        key = self._keys.pop(lease_id, None) if lease_id is not None else None
        request = self._requests.pop(lease_id, None) if lease_id is not None else None
        backoff = Backoff(_POLL_MIN_S, _POLL_MAX_S)
        while True:
            try:
                async with self._doors.resets:
                    resetting(True)  # only now: waiting for the door is not the container's doing
                    if key is None and request is not None:
                        # Whether it was granted is not known: the same request again finds the lease, or makes it.
                        key = (await self.control.lease(request)).key
                    state = await self._release(slot, key)
                resetting(state is not SlotState.leased)
                key = request = None
            except ConnectionLostError:
                state = SlotState.resetting
            except AgentEnvError as error:
                logger.debug("slot %s/%d is not ours to release: %s", self.handle.id, slot, error)
                key, request, state = None, None, SlotState.resetting
            except Exception:  # the slot is asked after, however what was asked for it went wrong
                logger.exception("slot %s/%d could not be released", self.handle.id, slot)
                key, request, state = None, None, SlotState.resetting
            if state in (SlotState.free, SlotState.quarantined):
                return state
            await asyncio.sleep(backoff.next_s())

    async def _release(self, slot: int, key: LeaseKey | None) -> SlotState:
        if key is not None:
            return (await self.control.release(key, timeout_s=_RELEASE_TIMEOUT_S)).state
        reports = {report.slot: report.state for report in (await self.control.slots()).slots}
        return reports.get(slot, SlotState.quarantined)

    def hurry(self) -> None:
        """Beat now: something looks wrong."""
        self._alarm.set()

    async def keep_in_touch(
        self,
        heard: Callable[[Stale], None],
        silent: Callable[[Verdict], None],
    ) -> None:
        """Beat until the container is given up (``silent(gone)`` is the last word) or this is cancelled.

        ``heard(stale)`` follows each answer, with the leases that have ended and, where it is known, why.
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
                silence.heard(self._clock())
                heard(stale)
            elif self._judge(silence.tick(self._clock()), silent):
                return
            await self._pause(self.beat_s if stale is not None else min(self.beat_s, silence.step_s))
            silence.tick(self._clock())

    def _judge(self, verdict: Verdict, silent: Callable[[Verdict], None]) -> bool:
        if verdict is not Verdict.well:
            silent(verdict)
        return verdict is Verdict.gone

    async def _beat(self, held: Mapping[int, LeaseKey]) -> Stale | None:
        """One renewal: the leases that ended, or None when no good answer came."""
        request = RenewRequest(keys=tuple(held.values()), ttl_s=self._settings.lease_ttl_s)
        try:
            reply = await self.control.renew(request, timeout_s=self._settings.gone_after_s / 2)
        except AgentEnvError as error:
            logger.debug("no heartbeat of %s: %s", self.handle.id, error)
            return None
        self.supervisor_silent_s = reply.supervisor_silent_s
        lost = {loss.slot: loss for loss in reply.lost}
        return {
            lease_id: _error_of(lost.get(key.slot))
            for lease_id, key in held.items()
            if key.slot in frozenset(reply.stale)
        }

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
