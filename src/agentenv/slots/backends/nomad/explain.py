"""Nomad's reasons in terms a caller can act on: why nothing is placed, why a task died, what an error means. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentenv.errors import AgentEnvError, ConfigError, SandboxUnavailableError
from agentenv.slots.backends.base import StartFailed
from agentenv.slots.backends.nomad.facts import Allocation, TaskEvent

_DRIVER_EVENTS = ("Driver Failure", "Setup Failure", "Failed Validation", "Failed Artifact Download")
_IMAGE = re.compile(
    r"failed to pull|pull access denied|manifest unknown|image .*not found|no such image", re.IGNORECASE
)
_WORDS_CHARACTERS = 600


class NomadError(Exception):
    """A failed request to Nomad; for the backend's own use. ``status`` is the HTTP status, 0 without an answer.

    Not part of the error tree: callers get the result of :func:`opening_error`.
    """

    def __init__(self, status: int, message: str, *, next_step: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.next_step = next_step


def placement(failures: Mapping[str, Mapping[str, Any]]) -> StartFailed:
    """Why containers wait to be placed, from an evaluation's ``FailedTGAllocs``, in Nomad's own terms."""
    metric: Mapping[str, Any] = next(iter(failures.values()), {})
    waiting = 1 + (metric.get("CoalescedFailures") or 0)
    causes = [
        *(f"{_dimension(name)} on {_nodes(count)}" for name, count in _pairs(metric, "DimensionExhausted")),
        *(f"class {name} exhausted on {_nodes(count)}" for name, count in _pairs(metric, "ClassExhausted")),
        *(f"{_nodes(count)} filtered by {name!r}" for name, count in _pairs(metric, "ConstraintFiltered")),
        *(f"{_nodes(count)} of class {name} filtered" for name, count in _pairs(metric, "ClassFiltered")),
        *(f"quota exhausted: {limit}" for limit in metric.get("QuotaExhausted") or ()),
    ]
    nobody = not (metric.get("NodesEvaluated") or causes)
    if nobody:
        causes = ["no node is ready and eligible in the job's datacenters and node pool"]
    what = "a container" if waiting == 1 else f"{waiting} containers"
    return StartFailed(
        f"Nomad cannot place {what}: {', '.join(causes) or 'it does not say why'}",
        next_step=_placement_cure(metric, nobody),
    )


def _placement_cure(metric: Mapping[str, Any], nobody: bool) -> str:
    if nobody:
        return "start a Nomad client, end its drain, or name other datacenters"
    if any("agentenv_data_dir" in name for name in metric.get("ConstraintFiltered") or ()):
        return "prepare the clients for the job: `nomad node meta apply agentenv_data_dir=<the client's data_dir>`"
    if metric.get("ConstraintFiltered") or metric.get("ClassFiltered"):
        return "give the job's driver and constraints a node that has them (`nomad node status -verbose`)"
    return (
        "add nodes; lower the slots' memory, slots_per_container or cpu_mhz; lower max_containers; or name a lower "
        "memory_mib with memory_oversubscription"
    )


def _pairs(metric: Mapping[str, Any], name: str) -> Sequence[tuple[str, int]]:
    return sorted((metric.get(name) or {}).items())


def _dimension(name: str) -> str:
    return name if "exhausted" in name or ":" in name else f"{name} exhausted"


def _nodes(count: int) -> str:
    return f"{count} node" if count == 1 else f"{count} nodes"


def hopeless(allocation: Allocation) -> bool:
    """Whether its task cannot be set up at all, although Nomad may still be trying."""
    last = _last(allocation.events, (*_DRIVER_EVENTS, "Started"))
    return last is not None and last.kind != "Started"


def end_of(allocation: Allocation) -> str:
    """Why it ended, in a few words, as in the error of a lost lease."""
    for event in reversed(allocation.events):
        if event.oom_killed:
            return "it was killed for using more memory than memory_mib"
        if event.kind in ("Terminated", "Killed", *_DRIVER_EVENTS) and event.message:
            return f"Nomad reports {allocation.client}: {event.message}"
    return f"Nomad reports {allocation.client}, desired {allocation.desired}"


def start_failure(allocation: Allocation, image: str, stdout: str, stderr: str) -> StartFailed:
    """Why a container did not become ready: the driver's message, else the end of its own log."""
    if (driver := _last(allocation.events, _DRIVER_EVENTS)) is not None:
        return _driver_failure(driver, image)
    if (said := failed_event(stdout)) is not None:
        return replace(said, reason=f"{said.reason}; it logged: {_tail(stderr)}") if "log" in said.next_step else said
    words = _tail(stderr) or _tail(stdout)
    ended = f"{allocation.container} ended before it was ready: {end_of(allocation)}"
    return StartFailed(
        f"{ended}; {f'it logged: {words}' if words else 'it logged nothing'}", next_step=_end_cure(allocation)
    )


def _driver_failure(event: TaskEvent, image: str) -> StartFailed:
    message = " ".join(event.message.split())[:_WORDS_CHARACTERS]
    if _IMAGE.search(message):
        return StartFailed(
            f"cannot pull image {image!r}: {message}",
            next_step="name an image the nodes have or can pull (sandbox_image), or build it: `agentenv image build`",
            permanent=True,
        )
    if event.kind == "Failed Validation" or "failed to parse config" in message:
        cure = "correct the job file (`nomad job validate`)"
        return StartFailed(f"the driver does not understand the job: {message}", next_step=cure, permanent=True)
    if "seccomp" in message:  # rendered into the allocation's directory, which is elsewhere than the job was told
        cure = "say where clients keep allocations: `nomad node meta apply agentenv_data_dir=<the client's data_dir>`"
        return StartFailed(f"the driver refuses the container: {message}", next_step=cure, permanent=True)
    if "allow-listed" in message or "allow_caps" in message:
        cure = "set allow_caps in the docker plugin of every Nomad client as docs/operations.md says"
        return StartFailed(f"the driver refuses the container: {message}", next_step=cure, permanent=True)
    return StartFailed(f"the driver could not start the container: {message}", next_step="see the Nomad client's log")


def failed_event(stdout: str) -> StartFailed | None:
    """The supervisor's own `failed` line, if it wrote one."""
    for line in reversed(stdout.splitlines()):
        try:
            said = json.loads(line)
        except ValueError:
            continue
        if isinstance(said, dict) and said.get("event") == "failed":
            return StartFailed.from_event(said)
    return None


def _end_cure(allocation: Allocation) -> str:
    if any(event.oom_killed for event in allocation.events):
        return "raise memory_mib, or lower slots_per_container or the slots' limits"
    return f"see `nomad alloc logs -stderr {allocation.id[:8]}`"


def slow_start(allocation: Allocation, waited_s: float, error: str = "") -> StartFailed:
    """Message for a container that is neither ready nor failed."""
    last = allocation.events[-1] if allocation.events else None
    latest = f"Nomad's last event: {last.kind}: {last.message}" if last else "no Nomad client has started it yet"
    return StartFailed(
        f"{allocation.container} ({allocation.client}) is not ready after {waited_s:.0f} s; {error or latest}",
        next_step="raise start_timeout_s if it is only slow (a large image, say); else see `nomad alloc status "
        f"{allocation.id[:8]}`",
    )


def _last(events: Sequence[TaskEvent], kinds: Sequence[str]) -> TaskEvent | None:
    return next((event for event in reversed(events) if event.kind in kinds), None)


def _tail(text: str) -> str:
    return " | ".join(text.strip().splitlines()[-5:])[-_WORDS_CHARACTERS:]


def opening_error(error: NomadError, address: str, namespace: str, token_given: bool) -> AgentEnvError:
    """The error for a farm that could not be opened."""
    text = error.message
    if error.status == 0:
        return SandboxUnavailableError(
            f"no Nomad server responds at {address}: {text}",
            next_step="start one (`make nomad-dev`), or set nomad_address or NOMAD_ADDR to the address of one",
        )
    if error.status == 403:
        if token_given:
            return ConfigError(
                "token", f"Nomad at {address} refuses it: {text}",
                next_step="set NOMAD_TOKEN to one with the policy of docs/operations.md",
            )  # fmt: skip
        return ConfigError("token", f"Nomad at {address} requires an ACL token", next_step="set NOMAD_TOKEN")
    if "No path to region" in text:
        return ConfigError("region", f"Nomad at {address} has no such region: {text}", next_step="set NOMAD_REGION")
    if "amespace" in text and ("not found" in text or "nonexistent" in text or "does not exist" in text):
        return ConfigError(
            "namespace", f"{namespace!r} does not exist at {address}", next_step=f"`nomad namespace apply {namespace}`"
        )
    cure = error.next_step or "see the Nomad servers' log (`nomad monitor`), and `nomad server members`"
    return SandboxUnavailableError(f"Nomad at {address}: {text}", next_step=cure)
