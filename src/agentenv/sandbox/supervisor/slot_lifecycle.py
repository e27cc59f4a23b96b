"""Life cycle of one slot: started, reset, sealed, lost, quarantined; each change is verified before it is reported."""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import os
import signal
import time
from collections import deque
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from agentenv.backoff import Backoff
from agentenv.deadlines import scaled
from agentenv.errors import AgentEnvError, CheckpointError, ConfigError, SandboxUnavailableError
from agentenv.sandbox.limit_watch import MEMORY_ABOVE, LimitWatch
from agentenv.sandbox.slot_loss import LossReason, loss_of_end, loss_of_network
from agentenv.sandbox.supervisor import cgroups, limits, network
from agentenv.sandbox.supervisor.checkpoints import unmount
from agentenv.sandbox.supervisor.image_slot import ImageSlot
from agentenv.sandbox.supervisor.network import NetworkProcess, SlotNamespaces
from agentenv.sandbox.supervisor.plain_slot import PlainSlot
from agentenv.sandbox.supervisor.reaper import Reaper, end_of
from agentenv.sandbox.supervisor.slot_network import NetworkServices, SlotNetwork
from agentenv.sandbox.supervisor.slot_process import SlotKind, SlotProcess, SlotSetup
from agentenv.wire.network import NetworkPolicy
from agentenv.wire.roots import RootSpec
from agentenv.wire.states import SLOT_PHASE_MOVES, SlotPhase, move

log = logging.getLogger(__name__)

_START_ATTEMPTS = 3
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0
_FIRST_START_PATIENCE_S = scaled(5.0)
_SEAL_PATIENCE_S = scaled(15.0)
"""How long a seal waits for a missing resource, because a lease waits for the slot; a reset waits without limit."""
_KILLED = f"exit code {128 + signal.SIGKILL}"  # bwrap's when its child was killed, such as for lack of memory
_SHORT = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.ENOBUFS)
_PROOF_DEADLINE_S = scaled(5.0)
_LOSSES = 5
_LOSSES_WITHIN_S = 10.0  # a slot that ends this often is quarantined, not started for ever


class SlotReports(Protocol):
    """Receiver of a slot's state changes."""

    def ready(self, slot: SlotLifecycle) -> None:
        """The slot is usable; its ``kept`` is true if the workspace is unchanged."""

    def failed(self, slot: SlotLifecycle) -> None:
        """The slot is quarantined permanently; its ``reason`` says why."""

    def not_frozen(self, slot: SlotLifecycle, reason: str, *, ended: bool = False) -> None:
        """The requested checkpoint was not made; the slot is as it was, or (``ended``) its processes have
        ended and it will be ready again with its files."""

    def connected(self, slot: SlotLifecycle, env: dict[str, str], reason: str) -> None:
        """The network has changed; ``env`` is what it adds to commands. With a ``reason`` it failed, and the slot has
        none."""

    def refused(self, slot: SlotLifecycle, error: AgentEnvError) -> None:
        """The slot cannot have the requested root; it is being reset."""

    def lost(self, slot: SlotLifecycle, loss: LossReason, reason: str) -> None:
        """The slot ended by itself; it is being reset, or is quarantined."""


@dataclass(frozen=True)
class SlotServices:
    """Services shared by the slots of one container. ``gate`` bounds how many start at once."""

    setup: SlotSetup
    reaper: Reaper
    reports: SlotReports
    gate: asyncio.Semaphore
    network_tool: str | None
    """For plain slots, all of which have the container's network."""
    networks: NetworkServices | None = None
    """For image slots, each of which has its lease's."""


@dataclass(frozen=True)
class _Waiting:
    """A plain slot in which nothing has run yet: it waits while its place is taken by an image slot."""

    process: SlotProcess
    network: NetworkProcess | None


@dataclass
class CrashLoop:
    """Distinguishes a crash from a crash loop: ``limit`` crashes within ``within_s``."""

    limit: int
    within_s: float
    times: deque[float] = field(default_factory=deque)

    def crashed(self, now: float) -> bool:
        """Record a crash at ``now``; True when this makes it a loop."""
        self.times.append(now)
        while self.times[0] < now - self.within_s:
            self.times.popleft()
        return len(self.times) >= self.limit


class SlotLifecycle:
    """One slot. Read ``phase``, ``epoch``, ``lease``, ``process``; send requests with :meth:`ask`."""

    def __init__(self, services: SlotServices, number: int) -> None:
        self.number = number
        self.phase = SlotPhase.absent
        self.epoch = 0
        self.lease: dict[str, Any] | None = None
        self.handed = False
        """Whether a server has had the slot since the last reset. A slot that it had without a remembered lease
        may have been used, whatever the server reported before it died."""
        self.kept = False
        self.reason = ""
        self.process: SlotProcess | None = None
        self._network: NetworkProcess | None = None
        self._waiting: _Waiting | None = None
        self._policy: SlotNetwork | None = None
        self._services = services
        self._plain = PlainSlot(services.setup, number, services.reaper)
        self.kind: SlotKind = self._plain
        self._task: asyncio.Task[None] | None = None
        self._reset_after = False
        self._given_up = asyncio.Event()
        self._losses = CrashLoop(_LOSSES, _LOSSES_WITHIN_S)
        self._limits: LimitWatch | None = None

    def __repr__(self) -> str:
        return f"<slot {self.number} {self.phase.value} epoch {self.epoch}{' leased' if self.lease else ''}>"

    async def first_start(self) -> None:
        """Start the slot for the first time. Raises SandboxUnavailableError instead of quarantining, because at
        start the container can still refuse to serve."""
        self._move(SlotPhase.starting)
        await self._start(fresh=True, patience_s=_FIRST_START_PATIENCE_S)
        self._arrive(kept=False, report=False)

    def begin(self) -> None:
        """Start the slot in the background; the outcome is reported."""
        self._begin(self._bring_up())

    def reset(self) -> None:
        """Recreate it. During a reset this has no effect; a quarantined slot stays quarantined."""
        if self.phase is SlotPhase.ready:
            self._turn(SlotPhase.resetting)
        elif self._sealing or self._checkpoint or self.phase is SlotPhase.rerooting:
            self._reset_after = True
            self._given_up.set()

    def seal(self) -> None:
        """New namespaces over the same workspace; ignored while the slot is not ready."""
        if self.phase is SlotPhase.ready:
            self._turn(SlotPhase.sealing)

    def reroot(self, root: RootSpec) -> None:
        """Make it a slot with this root until the next reset; ignored while the slot is not ready."""
        if self.phase is SlotPhase.ready:
            try:
                self._services.setup.require_fit(root)
                self._next = self._made_from(root)
            except (AgentEnvError, OSError) as error:
                self.refuse(error if isinstance(error, AgentEnvError) else SandboxUnavailableError(str(error)))
            else:
                self._turn(SlotPhase.rerooting)

    def refuse(self, why: AgentEnvError) -> None:
        """It cannot have the requested root; ignored while the slot is not ready."""
        if self.phase is SlotPhase.ready:
            self._services.reports.refused(self, why)
            self._turn(SlotPhase.resetting)

    def _made_from(self, root: RootSpec) -> SlotKind:
        setup, reaper = self._services.setup, self._services.reaper
        if not root.image:
            origin = setup.origin_of(root) if root.checkpoint else None
            return PlainSlot(setup, self.number, reaper, origin, root.workdir)
        place, layers = setup.tree.image_root(self.number), setup.layers_of(root)
        return ImageSlot(setup, self.number, reaper, root, place, layers)

    def freeze(self, name: str) -> None:
        """Keep what the slot has written as a checkpoint, and continue from it; ignored while the slot is not ready."""
        if self.phase is not SlotPhase.ready:
            return
        checkpoints = self._services.setup.checkpoints
        if checkpoints is None:
            self._services.reports.not_frozen(self, "this container has no checkpoints")
        elif (refused := self.kind.checkpoint_refusal(checkpoints)) is not None:
            self._services.reports.not_frozen(self, refused.message)
        else:
            self._checkpoint = name
            self._turn(SlotPhase.freezing)

    def connect(self, policy: NetworkPolicy) -> None:
        """Change the network of an image slot; the outcome is reported. Ignored while the slot is not ready."""
        if self.phase is not SlotPhase.ready:
            return
        if self._policy is None or not isinstance(self.kind, ImageSlot):
            self._services.reports.connected(self, {}, "only image slots have a network of their own")
            return
        self.kind.policy = policy
        self._connecting = asyncio.create_task(self._change_network(self._policy, policy))

    async def _change_network(self, network: SlotNetwork, policy: NetworkPolicy) -> None:
        reason = ""
        try:
            await network.apply(policy)
        except SandboxUnavailableError as error:
            reason = str(error)  # with the cure
        if network is self._policy and self.phase is SlotPhase.ready:
            self._services.reports.connected(self, dict(network.env), reason)

    _connecting: asyncio.Task[None] | None = None

    @property
    def network_env(self) -> Mapping[str, str]:
        """What its network adds to the environment of commands."""
        return {} if self._policy is None else self._policy.env

    def remember(self, lease: dict[str, Any] | None) -> None:
        """Remember the lease for the next server; ignored while the slot is not ready."""
        if self.phase is SlotPhase.ready:
            self.lease = lease

    async def settled(self) -> None:
        """Wait until the slot is neither starting nor resetting."""
        while self._task is not None and not self._task.done():
            await asyncio.wait([self._task])

    def _move(self, to: SlotPhase) -> None:
        self.phase = move(SLOT_PHASE_MOVES, self.phase, to, self)

    def _turn(self, to: SlotPhase) -> None:
        self._move(to)
        self._sealing = to is SlotPhase.sealing
        if to is SlotPhase.resetting:
            self.epoch += 1
            self.lease, self.handed = None, False
            self._next = self._plain
        self._begin(self._cycle())

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        self._task = asyncio.create_task(work, name=f"slot {self.number}")
        self._task.add_done_callback(self._check_task)

    def _check_task(self, task: asyncio.Task[None]) -> None:
        """A bug in the work above must not leave the slot being reset for ever."""
        if task.cancelled() or (error := task.exception()) is None:
            return
        log.error("slot %d: its task failed", self.number, exc_info=error)
        if self.phase in (SlotPhase.starting, SlotPhase.resetting, SlotPhase.sealing):
            self._quarantine(f"internal error in the supervisor: {error!r}")

    _sealing = False
    _next: SlotKind | None = None
    """What it becomes once it is empty; None: what it is."""

    _checkpoint = ""
    """The name of the one that is being made."""

    async def _cycle(self) -> None:
        keep = self._sealing or bool(self._checkpoint)
        if self._limits is not None:
            self._limits.begin()
        try:
            if not self._set_aside():
                await self._end()
                if self._checkpoint:
                    await self._freeze()
                elif not keep:
                    await self._discard()
        except SandboxUnavailableError as error:  # it is frozen, and there is no layer to continue in
            self._move(SlotPhase.starting)
            self._give_up_seal(error)
            return
        except OSError as error:
            self._quarantine(f"its cleanup could not be verified: {error or type(error).__name__}")
            return
        if isinstance(self._next, ImageSlot) and not await self._gathered(self._next):
            return
        if self._next is not None:
            self.kind, self._next = self._next, None
        self._move(SlotPhase.starting)
        await self._bring_up(keep=keep)

    async def _gathered(self, kind: ImageSlot) -> bool:
        """Wait for the image of the slot's next root, which may take long: no other slot's start waits with us. False
        when there is none, or the lease has ended; the slot is being reset then."""
        self._given_up.clear()
        gathering = asyncio.ensure_future(kind.gather())
        given_up = asyncio.ensure_future(self._given_up.wait())
        await asyncio.wait([gathering, given_up], return_when=asyncio.FIRST_COMPLETED)
        given_up.cancel()
        try:
            if gathering.done():
                gathering.result()
                return True
            gathering.cancel()
        except (AgentEnvError, OSError) as error:
            refused = error if isinstance(error, AgentEnvError) else SandboxUnavailableError(str(error))
            self._services.reports.refused(self, refused)
        self._reset_after = False
        self.kind, self._next = kind, None  # as after a start that failed
        self._move(SlotPhase.starting)
        self._turn(SlotPhase.resetting)
        return False

    def _set_aside(self) -> bool:
        """Let an unused plain slot wait for the end of an image slot, instead of ending and recreating it."""
        if self.process is None or self.kind is not self._plain or not isinstance(self._next, ImageSlot):
            return False
        if not self.process.untouched:
            return False
        self._waiting = _Waiting(self.process, self._network)
        self.process = self._network = None
        return True

    async def _take_back(self) -> bool:
        """Whether a plain slot has waited, and is as it was; one that is not is ended. Raises OSError: it cannot be."""
        waited, self._waiting = self._waiting, None
        if waited is None:
            return False
        self.process, self._network = waited.process, waited.network
        if self.process.untouched and (self._network is None or not self._network.exited.done()):
            return True
        log.warning("slot %d: used while its image slot was ending; recreating it", self.number)
        await self._end()
        await self._discard()
        return False

    async def _freeze(self) -> None:
        assert self._services.setup.checkpoints is not None
        try:
            await self.kind.freeze(self._services.setup.checkpoints, self._checkpoint)
        except CheckpointError as error:
            self._services.reports.not_frozen(self, error.message, ended=True)

    async def _bring_up(self, *, keep: bool = False) -> None:
        if self.phase is SlotPhase.absent:
            self._move(SlotPhase.starting)
        awaited = keep or self.kind is not self._plain
        try:
            waited = self.kind is self._plain and await self._take_back()
            if not waited:
                await self._start(fresh=not keep, patience_s=_SEAL_PATIENCE_S if awaited else math.inf)
        except ConfigError as error:  # only a root that is new can be one
            self._services.reports.refused(self, error)
            self._turn(SlotPhase.resetting)
        except SandboxUnavailableError as error:
            if keep:
                self._give_up_seal(error)
            elif awaited:
                self._services.reports.refused(self, error)
                self._turn(SlotPhase.resetting)
            else:
                self._quarantine(f"could not be started: {error}")
        except OSError as error:
            self._quarantine(f"a failed start could not be undone: {error or type(error).__name__}")
        else:
            self._arrive(kept=keep, started=not waited)

    def _give_up_seal(self, error: SandboxUnavailableError) -> None:
        """The workspace cannot be moved to new namespaces: its lease ends, and the slot is completely recreated."""
        filled = self._limits is not None and self._limits.killed_by_own_limit()
        loss = LossReason.filled if filled else LossReason.not_renewed
        self._reset_after, self._checkpoint = False, ""
        self._services.reports.lost(self, loss, f"sealing it failed: {error.message}")
        self._turn(SlotPhase.resetting)

    async def _start(self, *, fresh: bool, patience_s: float) -> None:
        """Create the slot's resources and start it. A failed start is undone and retried: a few times, and for
        ``patience_s`` if a resource was temporarily short.

        Raises ConfigError when there cannot be such a slot, SandboxUnavailableError when trying again did not help,
        OSError when a start could not be undone.
        """
        began_s, backoff = time.monotonic(), Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        while True:
            try:
                async with self._services.gate:
                    if fresh:
                        await self._prepare()
                    else:
                        self.kind.reopen()
                    await self._start_once()
                return
            except (OSError, SandboxUnavailableError, ConfigError) as error:
                failure = error
            await self._end()
            if fresh:
                await self._discard()
            if isinstance(failure, ConfigError):  # the next start would fail as well
                raise failure
            patient = is_shortage(failure) and time.monotonic() - began_s < patience_s
            pause_s = backoff.next_s()
            if backoff.failures >= _START_ATTEMPTS and not patient:
                raise SandboxUnavailableError(str(failure)) from failure
            log.warning("slot %d: start %d failed: %s", self.number, backoff.failures, failure)
            await asyncio.sleep(pause_s)

    async def _prepare(self) -> None:
        plan = self.kind.plan
        if plan is not None:
            cgroups.make(plan)
        await self.kind.prepare()

    async def _start_once(self) -> None:
        services = self._services
        self.process = await self.kind.start()
        if isinstance(self.kind, ImageSlot):
            await self._connect(self.kind, self.process)
        elif services.network_tool is not None:
            self._network = await network.attach(services.setup, self.process, services.reaper, services.network_tool)

    async def _connect(self, kind: ImageSlot, process: SlotProcess) -> None:
        """Give an image slot the network of its lease."""
        services = self._services
        if services.networks is None:
            return
        namespaces = SlotNamespaces(self.number, process.network_fd, kind.namespace_fd, services.setup.tree.jail)
        self._policy = SlotNetwork(services.networks, namespaces, lambda status: self._offline(process, status))
        await self._policy.apply(kind.policy)

    def _arrive(self, *, kept: bool, report: bool = True, started: bool = True) -> None:
        """``started``: its processes are new; else we already watch for their end."""
        assert self.process is not None
        self._move(SlotPhase.ready)
        self.kept = kept
        self._sealing, self._checkpoint = False, ""
        self._watch_limits(self.process)
        if started:
            self._watch_ends(self.process, self._network)
        if self._reset_after:
            self._reset_after = False
            self.reset()
        elif report:
            self._services.reports.ready(self)

    def _watch_ends(self, process: SlotProcess, network: NetworkProcess | None) -> None:
        for one in (process, *process.services.values()):
            one.exited.add_done_callback(lambda ended: self._ended(process, ended))
        if network is not None:
            network.exited.add_done_callback(lambda ended: self._went_offline(process, ended))

    def _watch_limits(self, process: SlotProcess) -> None:
        if self._limits is not None:
            self._limits.close()
        self._limits = LimitWatch(limits.limit_files(process.plan))

    def _ended(self, process: SlotProcess, ended: asyncio.Future[int]) -> None:
        if self.phase is not SlotPhase.ready or process is not self.process or ended.cancelled():
            return
        status = ended.result()
        code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else None
        loss = loss_of_end(code, killed_for_memory_above=self._killed_above())
        self._lose(loss, f"the slot's agent exited unexpectedly: {end_of(status)}")

    def _went_offline(self, process: SlotProcess, ended: asyncio.Future[int]) -> None:
        """Without its network the slot would continue, and its calls fail without a reported reason."""
        if not ended.cancelled():
            self._offline(process, ended.result())

    def _offline(self, process: SlotProcess, status: int) -> None:
        if self.phase is not SlotPhase.ready or process is not self.process:
            return
        loss = loss_of_network(status, killed_for_memory_above=self._killed_above())
        self._lose(loss, f"the slot's network exited unexpectedly: {end_of(status)}")

    def _killed_above(self) -> bool:
        return self._limits is not None and self._limits.take_above() == MEMORY_ABOVE

    def _lose(self, loss: LossReason, reason: str) -> None:
        self._services.reports.lost(self, loss, reason)
        if self._losses.crashed(time.monotonic()):
            self._quarantine(f"{reason}, {_LOSSES} times within {_LOSSES_WITHIN_S:.0f} s")
            return
        self._turn(SlotPhase.resetting)

    async def _end(self) -> None:
        """Kill everything of the slot and verify it. Raises OSError (TimeoutError) when that fails."""
        if self._network is not None:
            await self._network.kill()
            self._network = None
        if self._policy is not None:
            await self._policy.aclose()
            self._policy = None
        if self.process is not None:
            await self.process.kill()
            self.process = None
        plan = self.kind.plan
        if plan is None:
            return
        deadline = time.monotonic() + _PROOF_DEADLINE_S
        while left := cgroups.members(plan):
            if time.monotonic() > deadline:
                raise OSError(f"{len(left)} processes survived SIGKILL for {_PROOF_DEADLINE_S:.0f} s")
            cgroups.kill(plan)
            await asyncio.sleep(0.001)

    async def _discard(self) -> None:
        """Remove the workspace and the cgroup. Raises OSError when either cannot be removed."""
        # In a thread: a large workspace takes the kernel long (300 ms a GiB), and other slots wait for us.
        await asyncio.to_thread(_remove_files, self.kind)
        if unneeded := self.kind.give_back():
            await asyncio.to_thread(unmount, unneeded)
        plan = self.kind.plan
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
        self._services.reports.failed(self)


def _remove_files(kind: SlotKind) -> None:
    try:
        kind.discard()
    except OSError as error:
        if error.errno != errno.EINVAL:  # nothing is mounted there: the failed start had not come that far
            raise


def is_shortage(failure: Exception) -> bool:
    """Whether a start failed for lack of a resource that others may release (processes, memory, time): the slot
    itself is verified empty, and a later start may succeed. Only bwrap's message shows this."""
    if isinstance(failure, TimeoutError) or isinstance(failure.__cause__, TimeoutError):
        return True
    if isinstance(failure, OSError) and failure.errno in _SHORT:
        return True
    words = str(failure)
    return any(os.strerror(number) in words for number in _SHORT) or signal.SIGKILL.name in words or _KILLED in words
