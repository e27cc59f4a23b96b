"""The link of a farm service to one container: it follows the slots by a watch, and renews nothing.

The holders of the leases keep them alive, and release them, at the container; so the farm may be away for any time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing

import aiohttp

from agentenv.backoff import Backoff
from agentenv.config import PoolSettings
from agentenv.containers.handle import ContainerHandle
from agentenv.containers.watch import watch
from agentenv.errors import AgentEnvError, ConnectionLostError, FencedError
from agentenv.slots.commands import Reclaim
from agentenv.slots.container_link import ContainerLink, Ended, Liveness, RequestLimits, Silence
from agentenv.slots.records import Holder, holder_of
from agentenv.wire.leases import EndRequest, LostLease, SlotReport
from agentenv.wire.states import SlotState
from agentenv.wire.watch import CallTimes, WatchBeat, WatchChange, WatchList

logger = logging.getLogger(__name__)

_RETRY_MIN_S, _RETRY_MAX_S = 0.05, 2.0
_LOOK_S = 2.0
"""How long a reset is waited for before the container is asked again to end the lease."""
_NOTHING: Ended = {}


class WatchedLink(ContainerLink):
    """See the module. ``generation`` is the farm's; ``fenced`` is called when the container has obeyed a later one."""

    def __init__(
        self,
        handle: ContainerHandle,
        session: aiohttp.ClientSession | None,
        settings: PoolSettings,
        limits: RequestLimits,
        clock: Callable[[], float],
        *,
        generation: int = 0,
        fenced: Callable[[FencedError], None] = lambda _: None,
    ) -> None:
        super().__init__(handle, session, settings, limits, clock, generation=generation)
        self._generation = generation
        self._fenced = fenced
        self._reports: dict[int, SlotReport] = {}
        self._reported: dict[int, asyncio.Event] = {}
        self._why: dict[tuple[int, int], AgentEnvError] = {}
        self.statistics: Mapping[str, int] = {}
        """The container's counters at its last beat."""
        self.call_times = CallTimes()
        """How long its calls ran, at its last beat."""
        self.boot = ""
        """The server process behind the last list."""
        self.lost_before: tuple[LostLease, ...] = ()
        """Leases that were lost before the container was followed."""

    # -- what the container says -----------------------------------------------------------------

    async def inventory(self) -> tuple[list[SlotState], Mapping[int, Holder]]:
        """See :meth:`ContainerLink.inventory`; leases are adopted, whoever has them."""
        async with self._limits.leases:
            reply = await self.control.slots(timeout_s=self._settings.start_timeout_s)
        reports = sorted(reply.slots, key=lambda report: report.slot)
        self._reports = {report.slot: report for report in reports}
        self.lost_before = reply.lost
        holders = {report.slot: holder for report in reports if (holder := holder_of(report)) is not None}
        return [report.state for report in reports], holders

    def latest(self, slot: int) -> SlotReport | None:
        """See :meth:`ContainerLink.latest`."""
        return self._reports.get(slot)

    async def keep_in_touch(
        self,
        heard: Callable[[Ended], None],
        silent: Callable[[Liveness], None],
        reported: Callable[[SlotReport], None] = lambda _: None,
    ) -> None:
        """See :meth:`ContainerLink.keep_in_touch`: here ``heard`` follows each line of the watch."""
        silence = Silence(self._settings.suspect_after_s, self._settings.gone_after_s, self._clock())
        backoff = Backoff(_RETRY_MIN_S, _RETRY_MAX_S)

        def line_came() -> None:
            silence.answered(self._clock())
            backoff.reset()
            heard(_NOTHING)

        while True:
            following = asyncio.create_task(self._follow(line_came, reported))
            try:
                while not following.done():
                    await asyncio.wait({following}, timeout=silence.step_s)
                    if not following.done() and self._judge(silence.tick(self._clock()), silent):
                        return
            finally:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)
            following.result()
            if self._judge(silence.tick(self._clock()), silent):
                return
            await self._pause(backoff.next_s())
            silence.tick(self._clock())

    async def _follow(self, line_came: Callable[[], None], reported: Callable[[SlotReport], None]) -> None:
        """One connection's lines, until it is cut."""
        lines = watch(self.handle, generation=self._generation, silence_s=self._settings.suspect_after_s)
        try:
            async with aclosing(lines):
                async for line in lines:
                    line_came()
                    match line:
                        case WatchList():
                            self.boot = line.boot
                            for report in line.slots:
                                self._learn(report, reported)
                        case WatchChange(slot=report):
                            self._learn(report, reported)
                        case WatchBeat():
                            self.statistics, self.call_times = line.statistics, line.call_times
                            self.supervisor_silent_s = line.supervisor_silent_s
        except FencedError as error:
            self._fenced(error)
        except AgentEnvError as error:
            logger.debug("the watch of %s ended: %s", self.handle.id, error)

    def _learn(self, report: SlotReport, reported: Callable[[SlotReport], None]) -> None:
        self._reports[report.slot] = report
        if (event := self._reported.pop(report.slot, None)) is not None:
            event.set()
        reported(report)

    def tail(self, slot: int, epoch: int) -> AsyncGenerator[bytes, None]:
        """See :meth:`agentenv.containers.control.ContainerControl.tail`."""
        return self.control.tail(slot, epoch)

    # -- ending leases ---------------------------------------------------------------------------

    def end_with(self, slot: int, epoch: int, why: AgentEnvError) -> None:
        """The lease of this epoch is about to be reclaimed: its holder is to get ``why``."""
        self._why[slot, epoch] = why

    async def end_at_renewal(self, slot: int, epoch: int, why: AgentEnvError) -> None:
        """The lease of this epoch is not to be renewed any more: its holder gets ``why`` instead. Retried until the
        container answers, or this is cancelled."""
        request = EndRequest(slot=slot, epoch=epoch, error=why.code, message=why.message, at_renewal=True)
        backoff = Backoff(_RETRY_MIN_S, _RETRY_MAX_S)
        while True:
            try:
                await self.control.end(request)
                return
            except ConnectionLostError:
                await asyncio.sleep(backoff.next_s())
            except AgentEnvError as error:
                self._note(error)
                return

    async def _reclaim(self, command: Reclaim, resetting: Callable[[bool], None]) -> SlotState | Holder:
        slot, epoch = command.slot, command.epoch
        key = self._keys.pop(command.lease, None) if command.lease is not None else None
        request = self._requests.pop(command.lease, None) if command.lease is not None else None
        backoff = Backoff(_RETRY_MIN_S, _RETRY_MAX_S)
        if key is not None:
            epoch = key.epoch
        while key is None and request is not None and epoch is None:
            # Whether it was granted is unknown: repeating the request finds the lease, or makes it.
            try:
                async with self._limits.resets:
                    epoch = (await self.control.lease(request)).key.epoch
            except ConnectionLostError:
                await asyncio.sleep(backoff.next_s())
            except AgentEnvError as error:
                self._note(error)
                break
            except Exception:  # a request that cannot be sent has not been granted
                logger.exception("slot %s/%d could not be requested again", self.handle.id, slot)
                break
        while True:
            report = self._reports.get(slot)
            if report is not None and _is_over(report, epoch):
                return holder_of(report) or report.state
            resetting(True)
            changed = self._reported.setdefault(slot, asyncio.Event())
            if report is None or (report.state is SlotState.leased and epoch is not None):
                await self._end(slot, epoch)
            try:
                async with asyncio.timeout(_LOOK_S):
                    await changed.wait()
            except TimeoutError:
                continue

    async def _end(self, slot: int, epoch: int | None) -> None:
        if epoch is None:
            return
        why = self._why.pop((slot, epoch), None)
        error, message = (why.code, why.message) if why is not None else ("", "")
        try:
            async with self._limits.resets:
                await self.control.end(EndRequest(slot=slot, epoch=epoch, error=error, message=message))
        except AgentEnvError as failed:
            self._note(failed)
            if why is not None:
                self._why[slot, epoch] = why

    def _note(self, error: AgentEnvError) -> None:
        if isinstance(error, FencedError):
            self._fenced(error)
        logger.debug("container %s: %s", self.handle.id, error)


def _is_over(report: SlotReport, epoch: int | None) -> bool:
    """Whether a report tells what has become of a slot after the lease of that epoch (None: of any). A slot that is
    free in the same epoch was not leased yet when it was reported."""
    if report.state is SlotState.quarantined:
        return True
    if report.state is SlotState.free:
        return epoch is None or report.epoch > epoch
    return report.state is SlotState.leased and (epoch is None or report.epoch > epoch)
