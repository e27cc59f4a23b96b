"""One slot over time: started, reset, sealed, lost, quarantined; each change proved before told."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Protocol

from agentenv.errors import SandboxUnavailableError
from agentenv.sandbox import cgroups, network, slot_process
from agentenv.sandbox.network import NetworkProcess
from agentenv.sandbox.reaper import Reaper, end_of
from agentenv.sandbox.slot_process import Ground, SlotProcess
from agentenv.sandbox.slot_states import SlotPhase, moved

log = logging.getLogger(__name__)

_START_ATTEMPTS = 3
_PROOF_DEADLINE_S = 5.0
_LOSSES = 5
_LOSSES_WITHIN_S = 10.0


class SlotReports(Protocol):
    """Who is told what became of a slot."""

    def ready(self, slot: SlotLife) -> None:
        """The slot can be used; its ``kept`` says whether the workspace is the one of before."""

    def failed(self, slot: SlotLife) -> None:
        """The slot is quarantined for good; its ``reason`` says why."""

    def lost(self, slot: SlotLife, reason: str) -> None:
        """The slot ended by itself; it is being reset."""


@dataclass(frozen=True)
class Workshop:
    """What slots of one container share. ``gate`` bounds how many start at once."""

    ground: Ground
    reaper: Reaper
    reports: SlotReports
    gate: asyncio.Semaphore
    network_tool: str | None


@dataclass
class CrashLoop:
    """Tells a crash from a crash loop: ``limit`` crashes within ``within_s``."""

    limit: int
    within_s: float
    times: deque[float] = field(default_factory=deque)

    def crashed(self, now: float) -> bool:
        """Note a crash at ``now``; True when this makes it a loop."""
        self.times.append(now)
        while self.times[0] < now - self.within_s:
            self.times.popleft()
        return len(self.times) >= self.limit


class SlotLife:
    """One slot. Read ``phase``, ``epoch``, ``lease``, ``process``; ask with :meth:`ask`."""

    def __init__(self, shop: Workshop, number: int) -> None:
        self.number = number
        self.phase = SlotPhase.absent
        self.epoch = 0
        self.lease: dict[str, Any] | None = None
        self.used = False
        """Whether anybody has held a lease since the last reset: such a slot is never handed out
        again without one."""
        self.kept = False
        self.reason = ""
        self.process: SlotProcess | None = None
        self._network: NetworkProcess | None = None
        self._shop = shop
        self._task: asyncio.Task[None] | None = None
        self._reset_after = False
        self._losses = CrashLoop(_LOSSES, _LOSSES_WITHIN_S)

    def __repr__(self) -> str:
        return f"<slot {self.number} {self.phase.value} epoch {self.epoch}{' leased' if self.lease else ''}>"

    async def first_start(self) -> None:
        """Bring the slot up for the first time. Raises SandboxUnavailableError instead of
        quarantining: at start the container can still refuse to serve."""
        self._move(SlotPhase.starting)
        await self._start(fresh=True)
        self._arrive(kept=False, tell=False)

    def begin(self) -> None:
        """Bring the slot up in the background; reports tell what came of it."""
        self._task = asyncio.create_task(self._bring_up(), name=f"slot {self.number}")

    def ask(self, op: str) -> None:
        """``reset`` or ``seal``. A reset asked for during a reset is that reset; a quarantined slot
        stays what it is."""
        if self.phase is SlotPhase.ready:
            self._turn(SlotPhase.resetting if op == "reset" else SlotPhase.sealing)
        elif op == "reset" and self._sealing:
            self._reset_after = True

    def remember(self, lease: dict[str, Any] | None) -> None:
        """Keep the lease for the next server; ignored while the slot is not ready."""
        if self.phase is SlotPhase.ready:
            self.lease = lease
            self.used = self.used or lease is not None

    async def settled(self) -> None:
        """Wait until the slot is neither starting nor resetting."""
        while self._task is not None and not self._task.done():
            await asyncio.wait([self._task])

    def _move(self, to: SlotPhase) -> None:
        self.phase = moved(self.phase, to)

    def _turn(self, to: SlotPhase) -> None:
        self._move(to)
        self._sealing = to is SlotPhase.sealing
        if to is SlotPhase.resetting:
            self.epoch += 1
            self.lease, self.used = None, False
        self._task = asyncio.create_task(self._cycle(), name=f"slot {self.number}")

    _sealing = False

    async def _cycle(self) -> None:
        keep = self._sealing
        try:
            await self._end()
            if not keep:
                await self._discard()
        except (OSError, TimeoutError) as error:
            self._quarantine(f"could not be proved clean: {error or type(error).__name__}")
            return
        self._move(SlotPhase.starting)
        await self._bring_up(keep=keep)

    async def _bring_up(self, *, keep: bool = False) -> None:
        if self.phase is SlotPhase.absent:
            self._move(SlotPhase.starting)
        try:
            await self._start(fresh=not keep)
        except (OSError, TimeoutError, SandboxUnavailableError) as error:
            self._quarantine(f"could not be started: {error}")
            return
        self._arrive(kept=keep)

    async def _start(self, *, fresh: bool) -> None:
        """Make what the slot needs and start it; a failed start that was undone is tried again."""
        for attempt in range(1, _START_ATTEMPTS + 1):
            try:
                async with self._shop.gate:
                    if fresh:
                        self._prepare()
                    else:
                        slot_process.reopen_workspace(self._shop.ground, self.number)
                    await self._start_once()
            except SandboxUnavailableError as error:
                if self.process is not None:
                    await self._end()
                if fresh:
                    await self._discard()
                if attempt == _START_ATTEMPTS:
                    raise
                log.warning("slot %d: start %d failed: %s", self.number, attempt, error)
            else:
                return

    def _prepare(self) -> None:
        ground = self._shop.ground
        plan = ground.plan(self.number)
        if plan is not None:
            cgroups.make(plan)
        slot_process.mount_workspace(ground, self.number)

    async def _start_once(self) -> None:
        shop = self._shop
        self.process = await slot_process.start(shop.ground, self.number, shop.reaper)
        if shop.network_tool is not None:
            self._network = await network.attach(shop.ground, self.process, shop.reaper, shop.network_tool)

    def _arrive(self, *, kept: bool, tell: bool = True) -> None:
        assert self.process is not None
        self._move(SlotPhase.ready)
        self.kept = kept
        self._sealing = False
        process = self.process
        process.exited.add_done_callback(lambda ended: self._ended(process, ended))
        if self._reset_after:
            self._reset_after = False
            self.ask("reset")
        elif tell:
            self._shop.reports.ready(self)

    def _ended(self, process: SlotProcess, ended: asyncio.Future[int]) -> None:
        if self.phase is not SlotPhase.ready or process is not self.process or ended.cancelled():
            return
        reason = f"the slot's agent ended by itself: {end_of(ended.result())}"
        if self._losses.crashed(time.monotonic()):
            self._quarantine(f"{reason}, {_LOSSES} times within {_LOSSES_WITHIN_S:.0f} s")
            return
        self._shop.reports.lost(self, reason)
        self._turn(SlotPhase.resetting)

    async def _end(self) -> None:
        """Kill all of the slot and prove it. Raises OSError or TimeoutError when it cannot be proved."""
        if self._network is not None:
            await self._network.kill()
            self._network = None
        if self.process is None:
            return
        await self.process.kill()
        plan = self.process.plan
        self.process = None
        if plan is None:
            return
        deadline = time.monotonic() + _PROOF_DEADLINE_S
        while left := cgroups.members(plan):
            if time.monotonic() > deadline:
                raise OSError(f"{len(left)} processes survived SIGKILL for {_PROOF_DEADLINE_S:.0f} s")
            cgroups.kill(plan)
            await asyncio.sleep(0.001)

    async def _discard(self) -> None:
        """Remove the workspace and the cgroup. Raises OSError when either stays."""
        ground = self._shop.ground
        slot_process.unmount_workspace(ground, self.number)
        plan = ground.plan(self.number)
        deadline = time.monotonic() + _PROOF_DEADLINE_S
        while plan is not None and not cgroups.remove(plan):
            if time.monotonic() > deadline:
                raise OSError("its cgroup cannot be removed: the kernel still counts a process in it")
            await asyncio.sleep(0.001)

    def _quarantine(self, reason: str) -> None:
        log.error("slot %d is quarantined: %s", self.number, reason)
        self.reason = reason
        self.lease = None
        self._move(SlotPhase.quarantined)
        self._shop.reports.failed(self)
