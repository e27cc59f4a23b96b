"""Rules by which ``agentenv gc`` recognises orphans. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

UNATTENDED_AFTER_S = 60.0
"""A pool sends heartbeats to every container it leases from every few seconds, even without leases. After this
silence it is dead: even its leases have expired."""
IDLE_JOB_AFTER_S = 900.0
"""A job without containers gives no sign of its owner: it waits for capacity, or its containers end while starting.
Stopping it is always safe, because a running farm submits a stopped job again; the limit is long enough for this to
be rare."""
_ONLY_DECREASED_SHARE = 0.9
"""Of the time between two observations: a lease that lost so much of its remaining time was not renewed meanwhile. One
that was renewed lost no more than has passed since."""
KEPT = "kept container"
"""Kind of a container whose farm nobody runs at present."""


@dataclass(frozen=True)
class Orphan:
    """A leftover. ``problem``: why it could not be removed, or must not be."""

    kind: str
    name: str
    why: str
    removed: bool = False
    problem: str = ""


@dataclass(frozen=True)
class JobFacts:
    """A Nomad job that has a token of ours, or is a sandbox. ``heard_s``: of each container that answered."""

    id: str
    registered: bool
    token_age_s: float = 0.0
    sandbox: bool = True
    stopped: bool = False
    kept: bool = False
    running: int = 0
    heard_s: tuple[float, ...] = ()
    idle_s: float | None = None
    """Seconds since it was last submitted, if it has no container that is running, draining, or out of Nomad's
    sight."""


def judge_job(job: JobFacts, unattended_after_s: float = UNATTENDED_AFTER_S) -> Orphan | None:
    """Judge whether a job is orphaned; None if it is in use, or there is no evidence."""
    if not job.registered:
        if job.token_age_s < unattended_after_s:
            return None  # a farm being created writes its token first
        return Orphan("token", f"nomad/jobs/{job.id}", "its job is no longer registered")
    if not job.sandbox:
        return None
    if job.stopped:
        return Orphan("job", job.id, "stopped; only its record is left")
    if job.kept:
        return None
    if not job.running:
        if job.idle_s is None or job.idle_s <= max(IDLE_JOB_AFTER_S, unattended_after_s):
            return None
        since = f"{job.idle_s / 60:.0f} min after it was last submitted"
        return Orphan(
            "job", job.id, f"none of its containers is running, {since}; a run that needs the job submits it again"
        )
    if len(job.heard_s) < job.running:
        silent = job.running - len(job.heard_s)
        problem = f"{silent} of {job.running} containers do not respond, so their owner is unknown"
        return Orphan("job", job.id, "perhaps a run that died", problem=f"{problem}; `agentenv down` ends it")
    quiet_s = min(job.heard_s)
    if quiet_s < unattended_after_s:
        return None
    return Orphan("job", job.id, f"its run is dead: silent for {quiet_s:.0f} s")


def is_sandbox(job: Mapping[str, Any]) -> bool:
    """Whether a registered job is a farm of ours, judged by its group and task."""
    return any(
        group.get("Name") == "sandbox" and any(task.get("Name") == "sandbox" for task in group.get("Tasks") or ())
        for group in job.get("TaskGroups") or ()
    )


@dataclass(frozen=True)
class SeenLease:
    """A lease at one observation."""

    container: str
    slot: int
    epoch: int
    trajectory: str
    expires_in_s: float


def unrenewed(before: Sequence[SeenLease], after: Sequence[SeenLease], between_s: float) -> list[SeenLease]:
    """Leases whose remaining time only decreased between two observations: they are not renewed. ``between_s``: the
    least time that passed between the two observations of any lease."""
    then = {(lease.container, lease.slot, lease.epoch): lease.expires_in_s for lease in before}
    return [
        lease
        for lease in after
        if (earlier_s := then.get((lease.container, lease.slot, lease.epoch))) is not None
        and earlier_s - lease.expires_in_s > between_s * _ONLY_DECREASED_SHARE
    ]
