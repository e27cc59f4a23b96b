"""Every metric of a farm's process, as data: documented in docs/metrics.md and used by dashboards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["gauge", "counter", "histogram"]


@dataclass(frozen=True)
class Metric:
    """One metric. A counter's ``name`` ends in ``_total``, as in queries."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()


BUILD = Metric("agentenv_build_info", "gauge", "Always 1; the labels tell what is running.", ("version", "backend"))

POOL_CONTAINERS = Metric("agentenv_pool_containers", "gauge", "Containers by state.", ("state",))
POOL_GOAL = Metric("agentenv_pool_containers_goal", "gauge", "Containers requested from the backend.")
POOL_MAX = Metric("agentenv_pool_containers_max", "gauge", "Upper limit of containers.")
POOL_SLOTS = Metric("agentenv_pool_slots", "gauge", "Slots by state.", ("state",))
POOL_WAITING = Metric("agentenv_pool_waiting", "gauge", "Trajectories waiting for a slot.")
POOL_GRANTED = Metric("agentenv_pool_leases_granted_total", "counter", "Leases granted.")
POOL_RELEASED = Metric("agentenv_pool_leases_released_total", "counter", "Leases released normally.")
POOL_LOST = Metric("agentenv_pool_leases_lost_total", "counter", "Leases lost while held.")
POOL_ACQUIRE = Metric("agentenv_pool_acquire_wait_seconds", "histogram", "Time from requesting a slot to getting it.")
POOL_RESET = Metric("agentenv_pool_reset_seconds", "histogram", "Time from releasing a slot until it is reset.")
POOL_FAULTS = Metric(
    "agentenv_pool_faults_total",
    "counter",
    "Infrastructure failures by error code; start_failed counts containers that did not start.",
    ("code",),
)

CALLS = Metric(
    "agentenv_executor_calls_total",
    "counter",
    "Finished tool calls, by tool and fault (none: the tool did its work).",
    ("tool", "fault"),
)
CANCELLED = Metric(
    "agentenv_executor_calls_cancelled_total", "counter", "Tool calls cancelled by their caller.", ("tool",)
)
RUNNING = Metric("agentenv_executor_calls_running", "gauge", "Tool calls in flight.")
SESSIONS = Metric("agentenv_executor_sessions", "gauge", "Open tool sessions, one slot each.")
CONNECTED = Metric("agentenv_executor_containers", "gauge", "Containers this process has a client for.")
BATCH_SIZE = Metric("agentenv_executor_batch_size_calls", "histogram", "Calls per batch sent.")
BATCH_WAIT = Metric(
    "agentenv_executor_batch_wait_seconds", "histogram", "Time from submitting a call until its batch was sent."
)
QUEUE = Metric(
    "agentenv_executor_queue_seconds", "histogram", "Time waiting in the container for earlier calls of the same slot."
)
RUN = Metric("agentenv_executor_run_seconds", "histogram", "Time the call ran in its slot.", ("tool",))
OVERHEAD = Metric(
    "agentenv_executor_overhead_seconds",
    "histogram",
    "The caller's remaining wait: client, network and server, without batch wait, queue and run.",
)
STREAMS = Metric("agentenv_executor_streams_total", "counter", "Connections opened to containers.")
RECONNECTS = Metric("agentenv_executor_reconnects_total", "counter", "Connections reopened to a container.")
REASKED = Metric("agentenv_executor_calls_reasked_total", "counter", "Calls resubmitted after a lost connection.")

METRICS = (
    BUILD,
    POOL_CONTAINERS, POOL_GOAL, POOL_MAX, POOL_SLOTS, POOL_WAITING, POOL_GRANTED, POOL_RELEASED, POOL_LOST,
    POOL_ACQUIRE, POOL_RESET, POOL_FAULTS,
    CALLS, CANCELLED, RUNNING, SESSIONS, CONNECTED, BATCH_SIZE, BATCH_WAIT, QUEUE, RUN, OVERHEAD,
    STREAMS, RECONNECTS, REASKED,
)  # fmt: skip
"""In the order they are exposed."""
