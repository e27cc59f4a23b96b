"""Nomad's JSON as frozen facts, limited to the fields that matter for decisions. Pure.

Facts arrive in any order, twice or late (a list, the event stream): ``modify_index`` tells the newer of two.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

TASK = "sandbox"
GROUP = "sandbox"
PORT = "http"

_INDEX = re.compile(r"\[(\d+)\]$")
_NS_PER_S = 1e9


@dataclass(frozen=True)
class TaskEvent:
    """One entry of a task's short history: Nomad's type of it and its sentence."""

    kind: str
    message: str
    exit_code: int = 0
    oom_killed: bool = False


@dataclass(frozen=True)
class Allocation:
    """One allocation of the job: its desired and actual state, and its container's address."""

    id: str
    index: int
    node: str
    modify_index: int
    desired: str = "run"
    """``run``, ``stop`` or ``evict``."""
    client: str = "pending"
    """``pending``, ``running``, ``complete``, ``failed``, ``lost`` or ``unknown``."""
    migrating: bool = False
    task_state: str = "pending"
    """``pending``, ``running`` or ``dead``."""
    failed: bool = False
    restarts: int = 0
    events: tuple[TaskEvent, ...] = ()
    address: str | None = None
    """``host:port`` of its sandbox server; None in lists, which leave it out."""

    @property
    def container(self) -> str:
        """Id of the container it is running: a task restarted in place is another container."""
        return f"{self.id}.{self.restarts}" if self.restarts else self.id


@dataclass(frozen=True)
class Node:
    """A client of the cluster. ``drain_s``: how long its drain may take, from its start; None without a limit."""

    id: str
    modify_index: int
    name: str = ""
    draining: bool = False
    drain_s: float | None = None


@dataclass(frozen=True)
class Evaluation:
    """The scheduler's result. ``failures``: its figures for each group it could not place completely."""

    id: str
    modify_index: int
    status: str
    failures: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    queued: int = 0


@dataclass(frozen=True)
class Job:
    """The job as registered: requested number of containers, and whether it was stopped."""

    modify_index: int
    count: int
    stopped: bool = False


@dataclass(frozen=True)
class Snapshot:
    """Everything at one index of the cluster's log. Older allocations missing from it no longer exist."""

    index: int
    allocations: tuple[Allocation, ...]
    nodes: tuple[Node, ...] = ()
    evaluations: tuple[Evaluation, ...] = ()
    job: Job | None = None


Fact = Snapshot | Allocation | Node | Evaluation | Job


def allocation(raw: Mapping[str, Any]) -> Allocation:
    """Parse a list's stub or a whole allocation. Raises KeyError when it is neither."""
    state: Mapping[str, Any] = (raw.get("TaskStates") or {}).get(TASK) or {}
    transition = raw.get("DesiredTransition") or {}
    found = _INDEX.search(raw["Name"])
    return Allocation(
        id=raw["ID"],
        index=int(found[1]) if found else 0,
        node=raw["NodeID"],
        modify_index=raw["ModifyIndex"],
        desired=raw.get("DesiredStatus") or "run",
        client=raw.get("ClientStatus") or "pending",
        migrating=bool(transition.get("Migrate")),
        task_state=state.get("State") or "pending",
        failed=bool(state.get("Failed")) or raw.get("ClientStatus") == "failed",
        restarts=state.get("Restarts") or 0,
        events=tuple(_task_event(event) for event in state.get("Events") or ()),
        address=_address(raw),
    )


def _task_event(raw: Mapping[str, Any]) -> TaskEvent:
    details = raw.get("Details") or {}
    return TaskEvent(
        kind=raw.get("Type") or "",
        message=raw.get("DisplayMessage") or raw.get("DriverError") or raw.get("Message") or "",
        exit_code=int(raw.get("ExitCode") or details.get("exit_code") or 0),
        oom_killed=str(details.get("oom_killed", "false")).lower() == "true",
    )


def _address(raw: Mapping[str, Any]) -> str | None:
    shared = (raw.get("AllocatedResources") or {}).get("Shared") or {}
    for port in shared.get("Ports") or ():
        if port.get("Label") == PORT and port.get("HostIP"):
            host = port["HostIP"]
            return f"[{host}]:{port['Value']}" if ":" in host else f"{host}:{port['Value']}"
    return None


def node(raw: Mapping[str, Any]) -> Node:
    """Parse a list's stub (without deadline) or a whole node."""
    strategy = raw.get("DrainStrategy") or {}
    deadline_ns = strategy.get("Deadline") or 0
    return Node(
        id=raw["ID"],
        modify_index=raw["ModifyIndex"],
        name=raw.get("Name") or "",
        draining=bool(strategy) or bool(raw.get("Drain")),
        # Nomad: 0 is no deadline, below 0 is at once.
        drain_s=max(0.0, deadline_ns / _NS_PER_S) if deadline_ns else None,
    )


def evaluation(raw: Mapping[str, Any]) -> Evaluation:
    """Parse an evaluation of a list or an event."""
    return Evaluation(
        id=raw["ID"],
        modify_index=raw["ModifyIndex"],
        status=raw.get("Status") or "",
        failures=raw.get("FailedTGAllocs") or {},
        queued=sum((raw.get("QueuedAllocations") or {}).values()),
    )


def job(raw: Mapping[str, Any]) -> Job:
    """Parse a whole job."""
    counts = [group.get("Count") or 0 for group in raw.get("TaskGroups") or () if group.get("Name") == GROUP]
    return Job(modify_index=raw["ModifyIndex"], count=sum(counts), stopped=bool(raw.get("Stop")))


def events(line: Mapping[str, Any], job_id: str) -> Iterable[Allocation | Node | Evaluation | Job]:
    """The facts in one line of the event stream, without those of other jobs."""
    for event in line.get("Events") or ():
        payload = event.get("Payload") or {}
        match event.get("Topic"):
            case "Allocation" if (raw := payload.get("Allocation")) and raw.get("JobID") == job_id:
                yield allocation(raw)
            case "Node" if raw := payload.get("Node"):
                yield node(raw)
            case "Evaluation" if (raw := payload.get("Evaluation")) and raw.get("JobID") == job_id:
                yield evaluation(raw)
            case "Job" if (raw := payload.get("Job")) and raw.get("ID") == job_id:
                # The last event of a purged job looks like that of a running job.
                yield replace(job(raw), stopped=True) if event.get("Type") == "JobDeregistered" else job(raw)
