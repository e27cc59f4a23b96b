"""Decides what to do and report, given Nomad's state. Pure: no I/O, no clock of its own.

Every method returns commands, in order, for :mod:`agentenv.slots.backends.nomad.backend` to perform. Whatever the
order in which facts and answers arrive, late or twice:

- a container is reported started at most once, only while its allocation runs, and after its handshake;
- a container that was reported started is reported gone exactly once, when its allocation ended, when its
  task was restarted in place, or when Nomad knows neither of them any more;
- a container whose allocation is to leave (scaled down, drained, migrated, given up as lost) is reported
  draining and kept until it is empty, silent, or out of time: the container is the truth about its leases.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from agentenv.backoff import pause_s
from agentenv.containers.handle import ContainerHandle
from agentenv.slots.backends.base import ContainerDraining, ContainerEvent, ContainerGone, ContainerStarted, StartFailed
from agentenv.slots.backends.nomad.explain import end_of, hopeless, placement, slow_start
from agentenv.slots.backends.nomad.facts import Allocation, Evaluation, Fact, Job, Node, Snapshot

STARTS_AT_ONCE = 32
"""Containers requested beyond those that are ready, so that many starts are spread out."""
STABLE_AFTER_S = 5.0
"""A container that died younger than this counts as a failed start."""
KICKS = 2
"""Number of consecutive failures followed by an immediate start; after that Nomad's own growing delays apply."""
RETRY_MIN_S, RETRY_MAX_S = 0.5, 30.0


@dataclass(frozen=True)
class ReportEvent:
    """Report to the pool."""

    event: ContainerEvent


@dataclass(frozen=True)
class Handshake:
    """Do the handshake with the server of this allocation; answer with handshake_done()."""

    container: str
    allocation: Allocation


@dataclass(frozen=True)
class ForgetAllocation:
    """Cancel every task for this container."""

    container: str


@dataclass(frozen=True)
class AwaitEmpty:
    """Wait until no slot of it is leased, at most ``at_most_s``; answer with emptied()."""

    container: str
    at_most_s: float | None


@dataclass(frozen=True)
class StopAllocation:
    """Stop it without delay, after a pause; Nomad starts another if the count asks for it."""

    allocation: str
    reason: str
    after_s: float = 0.0


@dataclass(frozen=True)
class Diagnose:
    """Find out from its logs why it did not become ready, and report that as StartFailed."""

    allocation: Allocation


@dataclass(frozen=True)
class Reschedule:
    """Have Nomad replace failed allocations now instead of after its delay."""


Command = ReportEvent | Handshake | ForgetAllocation | AwaitEmpty | StopAllocation | Diagnose | Reschedule


class Stage(StrEnum):
    """Progress of one container, as reported to the pool."""

    waiting = "waiting"
    shaking = "shaking"
    refused = "refused"
    serving = "serving"
    draining = "draining"
    ended = "ended"


class Where(StrEnum):
    """State of an allocation according to its newest fact."""

    pending = "pending"
    running = "running"
    leaving = "leaving"
    dead = "dead"


class _Tracked:
    """One allocation, and the container it runs now."""

    __slots__ = ("container", "diagnosed", "fact", "since", "stage", "told_at")

    def __init__(self, fact: Allocation, now: float) -> None:
        self.fact = fact
        self.begin(now)

    def begin(self, now: float) -> None:
        """Another container starts in this allocation."""
        self.container = self.fact.container
        self.stage = Stage.waiting
        self.diagnosed = False
        self.since = self.told_at = now

    def __repr__(self) -> str:
        return f"<{self.container} {self.stage}, Nomad says {self.fact.client}>"


class FleetView:
    """The farm's containers, derived from Nomad's facts and the containers' answers. See the module."""

    def __init__(self, *, start_timeout_s: float) -> None:
        self._start_timeout_s = start_timeout_s
        self._tracked: dict[str, _Tracked] = {}
        self._nodes: dict[str, Node] = {}
        self._index = 0
        self._failures = 0
        self._verdict = 0
        self.job: Job | None = None
        self.unplaced: StartFailed | None = None
        """Nomad's reason why containers are not placed."""

    # -- what Nomad says ------------------------------------------------------------------------

    def update(self, fact: Fact, now: float) -> list[Command]:
        """Process a fact from the event stream, or a snapshot."""
        match fact:
            case Snapshot():
                return self._reconcile(fact, now)
            case Allocation():
                return self._update_allocation(fact, now)
            case Node():
                return self._update_node(fact, now)
            case Evaluation():
                return self._update_evaluation(fact)
            case Job():
                if self.job is None or fact.modify_index >= self.job.modify_index:
                    self.job = fact
        return []

    def tick(self, now: float) -> list[Command]:
        """Time has passed: report late containers, once per ``start_timeout_s`` each."""
        commands: list[Command] = []
        for one in self._tracked.values():
            late = one.stage is Stage.waiting and self._where(one.fact) is Where.pending
            if late and now - one.told_at >= self._start_timeout_s:
                one.told_at = now
                commands.append(ReportEvent(slow_start(one.fact, now - one.since)))
        return commands

    # -- what the containers answered ------------------------------------------------------------

    def handshake_done(self, container: str, outcome: ContainerHandle | StartFailed, now: float) -> list[Command]:
        """Process the outcome of a Handshake. A late one is ignored."""
        one = self._find(container)
        if one is None or one.stage is not Stage.shaking:
            return []
        if isinstance(outcome, StartFailed):
            one.stage = Stage.refused
            if outcome.foreign:
                return [ReportEvent(outcome)]
            self._failures += 1
            after_s = RETRY_MAX_S if outcome.permanent else pause_s(RETRY_MIN_S, RETRY_MAX_S, self._failures)
            return [ReportEvent(outcome), StopAllocation(one.fact.id, outcome.reason, after_s)]
        one.stage, one.since = Stage.serving, now
        commands: list[Command] = [ReportEvent(ContainerStarted(outcome))]
        if self.unplaced is not None:
            commands.append(ReportEvent(self.unplaced))  # a successful start is not progress of those still waiting
        return commands

    def emptied(self, container: str, now: float, *, silent: bool) -> list[Command]:
        """Process the outcome of an AwaitEmpty: nothing is leased any more, time is over, or (``silent``) there was
        no answer."""
        one = self._find(container)
        if one is None or one.stage is not Stage.draining:
            return []
        commands: list[Command] = [StopAllocation(one.fact.id, "it is drained")]
        if silent or one.fact.client == "lost":
            # Nobody will report its end: its node is gone.
            commands += self._end(one, "it is drained and does not respond" if silent else "it is drained", now)
        return commands

    # -- what the pool wants ---------------------------------------------------------------------

    def desired_count(self, goal: int, asked: int | None) -> int:
        """The count to request from Nomad, towards ``goal``. Decreases at once, increases as containers become
        ready."""
        if asked is not None and goal <= asked:
            return goal
        return min(goal, max(asked or 0, self.serving + STARTS_AT_ONCE))

    def allocation_of(self, container: str) -> str | None:
        """The allocation a container runs in; None if it has ended."""
        one = self._find(container)
        return one.fact.id if one is not None and one.stage is not Stage.ended else None

    def is_alive(self, allocation_id: str) -> bool:
        """Whether an allocation has a container that has not ended."""
        one = self._tracked.get(allocation_id)
        return one is not None and one.stage is not Stage.ended

    # -- views -----------------------------------------------------------------------------------

    @property
    def serving(self) -> int:
        """Number of containers reported started and not draining."""
        return sum(one.stage is Stage.serving for one in self._tracked.values())

    @property
    def alive(self) -> int:
        """Number of allocations that have not ended, without lost ones."""
        return sum(one.stage is not Stage.ended and one.fact.client != "lost" for one in self._tracked.values())

    def stages(self) -> dict[str, Stage]:
        """Stage of each container that has not ended."""
        return {one.container: one.stage for one in self._tracked.values() if one.stage is not Stage.ended}

    def __repr__(self) -> str:
        return f"<FleetView {self.serving} serving, {self.alive} alive, index {self._index}>"

    # -- the rules -------------------------------------------------------------------------------

    def _reconcile(self, snapshot: Snapshot, now: float) -> list[Command]:
        commands: list[Command] = []
        first = self._index == 0
        reset = snapshot.index < self._index  # the cluster was recreated: nothing from before exists
        for node in snapshot.nodes:
            commands += self._update_node(node, now)
        for fact in snapshot.allocations:
            if first and fact.id not in self._tracked and self._where(fact) is Where.dead:
                self._tracked[fact.id] = one = _Tracked(fact, now)  # already known
                one.stage = Stage.ended
            commands += self._update_allocation(fact, now, listed=True)
        listed = {fact.id for fact in snapshot.allocations}
        for one in list(self._tracked.values()):
            if one.fact.id not in listed and (reset or one.fact.modify_index <= snapshot.index):
                commands += self._end(one, "Nomad no longer lists its allocation", now)
                del self._tracked[one.fact.id]
        self._verdict = 0 if reset else self._verdict
        for evaluation in sorted(snapshot.evaluations, key=lambda one: one.modify_index):
            commands += self._update_evaluation(evaluation)
        self.job = snapshot.job
        self._index = snapshot.index
        return commands

    def _update_allocation(self, fact: Allocation, now: float, *, listed: bool = False) -> list[Command]:
        one = self._tracked.get(fact.id)
        if one is None:
            if not listed and fact.modify_index <= self._index:
                return []  # older than a list that no longer contains it
            one = self._tracked[fact.id] = _Tracked(fact, now)
        elif fact.modify_index < one.fact.modify_index:
            return []
        # Lists leave addresses out; an allocation's never changes.
        one.fact = fact if fact.address else replace(fact, address=one.fact.address)
        return self._decide(one, now)

    def _decide(self, one: _Tracked, now: float) -> list[Command]:
        commands: list[Command] = []
        if one.container != one.fact.container:
            commands += self._end(one, f"its task was restarted: {end_of(one.fact)}", now)
            one.begin(now)
        match self._where(one.fact):
            case Where.dead:
                commands += self._end(one, end_of(one.fact), now)
            case Where.leaving:
                commands += self._leave(one)
            case Where.running if one.stage is Stage.waiting:
                one.stage = Stage.shaking
                commands.append(Handshake(one.container, one.fact))
            case Where.pending if not one.diagnosed and hopeless(one.fact):
                commands += self._failed(one)
        return commands

    def _leave(self, one: _Tracked) -> list[Command]:
        if one.stage is Stage.serving:
            one.stage = Stage.draining
            node = self._nodes.get(one.fact.node)
            at_most_s = node.drain_s if node is not None and node.draining else None
            draining = ContainerDraining(one.container, self._why_leaving(one.fact))
            return [ReportEvent(draining), AwaitEmpty(one.container, at_most_s)]
        if one.stage in (Stage.shaking, Stage.refused):
            one.stage = Stage.waiting
            return [ForgetAllocation(one.container)]
        return []

    def _why_leaving(self, fact: Allocation) -> str:
        if fact.client == "lost":
            return "Nomad has lost its node"
        node = self._nodes.get(fact.node)
        if node is not None and node.draining:
            return f"node {node.name or node.id[:8]} is being drained"
        return "Nomad migrates its allocation" if fact.migrating else "Nomad stops its allocation"

    def _end(self, one: _Tracked, reason: str, now: float) -> list[Command]:
        """Its container has ended. No effect when that is known."""
        before, one.stage = one.stage, Stage.ended
        if before is Stage.ended:
            return []
        commands: list[Command] = [ForgetAllocation(one.container)]
        if before in (Stage.serving, Stage.draining):
            commands.append(ReportEvent(ContainerGone(one.container, reason)))
            self._failures = self._failures + 1 if now - one.since < STABLE_AFTER_S else 1
        elif one.fact.desired == "run" and before is not Stage.refused and not one.diagnosed:
            commands += self._failed(one)
        if one.fact.client == "failed" and one.fact.desired == "run" and self._failures <= KICKS:
            commands.append(Reschedule())
        return commands

    def _failed(self, one: _Tracked) -> list[Command]:
        one.diagnosed = True
        self._failures += 1
        return [Diagnose(one.fact)]

    def _where(self, fact: Allocation) -> Where:
        if fact.client in ("complete", "failed") or fact.task_state == "dead":
            return Where.dead
        node = self._nodes.get(fact.node)
        if fact.client == "lost" or fact.desired != "run" or fact.migrating or (node is not None and node.draining):
            return Where.leaving
        if fact.client == "running" and fact.task_state == "running":
            return Where.running
        return Where.pending  # also "unknown": its node is out of contact, which is not its end

    def _update_node(self, fact: Node, now: float) -> list[Command]:
        known = self._nodes.get(fact.id)
        if known is not None and fact.modify_index < known.modify_index:
            return []
        if known is not None and known.draining and fact.draining and fact.drain_s is None:
            fact = replace(fact, drain_s=known.drain_s)  # lists omit it
        self._nodes[fact.id] = fact
        if fact.draining == (known is not None and known.draining):
            return []
        return [command for one in self._on(fact.id) for command in self._decide(one, now)]

    def _update_evaluation(self, fact: Evaluation) -> list[Command]:
        if fact.status not in ("blocked", "complete") or fact.modify_index < self._verdict:
            return []
        self._verdict = fact.modify_index
        before = self.unplaced
        self.unplaced = placement(fact.failures) if fact.failures else None
        return [ReportEvent(self.unplaced)] if self.unplaced is not None and self.unplaced != before else []

    def _on(self, node: str) -> Iterator[_Tracked]:
        return (one for one in list(self._tracked.values()) if one.fact.node == node and one.stage is not Stage.ended)

    def _find(self, container: str) -> _Tracked | None:
        one = self._tracked.get(container.partition(".")[0])
        return one if one is not None and one.container == container else None
