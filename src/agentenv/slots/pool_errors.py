"""Errors of a pool whose caller gets no slot, with everything needed to see why. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from agentenv.errors import AcquireTimeoutError, ConfigError, QuotaError, SandboxUnavailableError
from agentenv.slots.backends.base import StartFailed
from agentenv.slots.commands import Expire
from agentenv.slots.statistics import PoolStatistics
from agentenv.wire.base import control_character_in
from agentenv.wire.farm import Place

_LONGER = "agentenv exec --wait; in Python acquire_timeout_s, and start_timeout_s of a Sandbox or Farm"


def timeout_error(expire: Expire, now: PoolStatistics, start_failed: StartFailed | None) -> AcquireTimeoutError:
    """The error for a waiter whose deadline has passed."""
    if expire.position:
        problem = f"no slot became free within {expire.waited_s:.1f} s"
        place = f"position {expire.position} of {expire.position + now.waiting} in the queue"
    else:
        problem = f"no slot was leased within {expire.waited_s:.1f} s"
        place = "a container with a free one was asked, and has not answered yet"
    slots = ", ".join(f"{count} {state}" for state, count in sorted(now.slots.items())) or "none"
    containers = ", ".join(f"{count} {state}" for state, count in sorted(now.containers.items())) or "none"
    at_maximum = now.goal_containers >= now.max_containers
    parts = [
        f"{problem} ({place})",
        f"slots: {slots}",
        f"containers: {containers}, requested: {now.goal_containers}, "
        + ("which is the maximum" if at_maximum else f"at most {now.max_containers}"),
    ]
    if start_failed is not None:
        parts.append(f"last failed start: {start_failed.reason}")
    return AcquireTimeoutError("; ".join(parts), next_step=_next_step(expire, now, at_maximum, start_failed))


def _next_step(expire: Expire, now: PoolStatistics, at_maximum: bool, start_failed: StartFailed | None) -> str:
    if start_failed is not None and start_failed.next_step:
        return start_failed.next_step
    if not now.slots_total:
        return f"wait longer ({_LONGER}): no container has become ready yet"
    if not expire.position:
        return f"wait longer ({_LONGER}): the container or its machine is slow"
    if at_maximum:
        return (
            "allow more slots (max_containers or slots_per_container; of a Farm: slots), use fewer at once, or wait "
            f"longer ({_LONGER})"
        )
    return f"wait longer ({_LONGER}): more containers are starting"


def unavailable_error(failed: StartFailed) -> SandboxUnavailableError:
    """The error for every waiter, once no container can ever serve."""
    return SandboxUnavailableError(f"no container can be started: {failed.reason}", next_step=failed.next_step)


def check_group(trajectories: Sequence[str], most: int) -> None:
    """Raise ConfigError for an empty group, QuotaError for one that is larger than ``most``."""
    if not trajectories:
        raise ConfigError("trajectories", "is empty", next_step="name one for each slot")
    if len(trajectories) > most:
        raise QuotaError("farm", f"{len(trajectories)} slots were asked for at once, and the farm has at most {most}")


def check_arguments(trajectory: str, timeout_s: float | None) -> None:
    """Raise ConfigError if a lease is requested with arguments out of range."""
    if not 1 <= len(trajectory) <= 256:
        raise ConfigError("trajectory", f"has {len(trajectory)} characters", next_step="allowed: 1 to 256")
    try:
        trajectory.encode()
    except UnicodeEncodeError as error:
        raise ConfigError("trajectory", f"{trajectory!r} is not valid text: {error.reason}") from error
    if found := control_character_in(trajectory):
        raise ConfigError("trajectory", f"{trajectory!r} contains the control character {found}")
    if timeout_s is not None and not (timeout_s > 0 and math.isfinite(timeout_s)):
        raise ConfigError("timeout_s", f"got {timeout_s!r}", next_step="allowed: a positive number of seconds")


def acquire_timeout_error(waited_s: float, place: Place | None) -> AcquireTimeoutError:
    """The error of an ask at a farm service whose deadline has passed; ``place``: why it waits, as last told."""
    if place is None:
        return AcquireTimeoutError(f"no slot became free within {waited_s:.1f} s", next_step="wait longer")
    eta = "" if place.eta_s is None else f", expected in {place.eta_s:.0f} s"
    detail = f": {place.detail}" if place.detail else ""
    return AcquireTimeoutError(
        f"no slot became free within {waited_s:.1f} s ({place.why}{detail}; position {place.position} of its run{eta}; "
        f"the run holds {place.run_held} of {place.total} slots, {place.free} are free)",
        next_step={
            "cap": "release slots of the run, or have its cap raised",
            "paused": "have the run resumed",
            "no_capacity": "see the farm's log",
            "image": "prefetch the image, or wait longer",
        }.get(place.why, "wait longer, or use fewer at once"),
    )
