"""Every metric a farm's process exposes, as data: what docs/metrics.md lists and dashboards may query."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["gauge", "counter", "histogram"]


@dataclass(frozen=True)
class Metric:
    """One metric. A counter's ``name`` ends in ``_total``, as it is queried."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()


BUILD = Metric("agentenv_build_info", "gauge", "Always 1; the labels say what runs.", ("version", "backend"))

POOL_CONTAINERS = Metric("agentenv_pool_containers", "gauge", "Containers by state.", ("state",))
POOL_GOAL = Metric("agentenv_pool_containers_goal", "gauge", "Containers the pool has asked its backend for.")
POOL_MAX = Metric("agentenv_pool_containers_max", "gauge", "Containers the pool may ask for at most.")
POOL_SLOTS = Metric("agentenv_pool_slots", "gauge", "Slots by state.", ("state",))
POOL_WAITING = Metric("agentenv_pool_waiting", "gauge", "Trajectories that wait for a slot.")
POOL_GRANTED = Metric("agentenv_pool_leases_granted_total", "counter", "Slots handed to a trajectory.")
POOL_RELEASED = Metric("agentenv_pool_leases_released_total", "counter", "Slots given back in good order.")
POOL_LOST = Metric("agentenv_pool_leases_lost_total", "counter", "Slots lost while somebody held them.")
POOL_ACQUIRE = Metric(
    "agentenv_pool_acquire_wait_seconds", "histogram", "From asking for a slot until it was handed over."
)
POOL_RESET = Metric(
    "agentenv_pool_reset_seconds", "histogram", "From releasing a slot until its container said it is clean."
)
POOL_FAULTS = Metric(
    "agentenv_pool_faults_total",
    "counter",
    "Failures of ours by the code of agentenv.errors, and start_failed: containers that did not start.",
    ("code",),
)

CALLS = Metric(
    "agentenv_executor_calls_total",
    "counter",
    "Tool calls that ended, by tool and whose fault they report (none: the tool did its work).",
    ("tool", "fault"),
)
CANCELLED = Metric("agentenv_executor_calls_cancelled_total", "counter", "Tool calls their caller gave up.", ("tool",))
RUNNING = Metric("agentenv_executor_calls_running", "gauge", "Tool calls without a result yet.")
SESSIONS = Metric("agentenv_executor_sessions", "gauge", "Open tool sessions, each with a slot.")
CONNECTED = Metric("agentenv_executor_containers", "gauge", "Containers with a client in this process.")
BATCH_SIZE = Metric("agentenv_executor_batch_size_calls", "histogram", "Calls in each batch that left.")
BATCH_WAIT = Metric(
    "agentenv_executor_batch_wait_seconds", "histogram", "From making a call until its batch left (company's price)."
)
QUEUE = Metric(
    "agentenv_executor_queue_seconds", "histogram", "Wait in the container for the slot's earlier calls to end."
)
RUN = Metric("agentenv_executor_run_seconds", "histogram", "What the call itself took in its slot.", ("tool",))
OVERHEAD = Metric(
    "agentenv_executor_overhead_seconds",
    "histogram",
    "What the caller waited besides: client, network, server. Not batch wait, queue or run.",
)
STREAMS = Metric("agentenv_executor_streams_total", "counter", "Connections made to containers.")
RECONNECTS = Metric(
    "agentenv_executor_reconnects_total", "counter", "Connections that followed another one to the same container."
)
REASKED = Metric("agentenv_executor_calls_reasked_total", "counter", "Calls asked about again after a cut connection.")

METRICS = (
    BUILD,
    POOL_CONTAINERS, POOL_GOAL, POOL_MAX, POOL_SLOTS, POOL_WAITING, POOL_GRANTED, POOL_RELEASED, POOL_LOST,
    POOL_ACQUIRE, POOL_RESET, POOL_FAULTS,
    CALLS, CANCELLED, RUNNING, SESSIONS, CONNECTED, BATCH_SIZE, BATCH_WAIT, QUEUE, RUN, OVERHEAD,
    STREAMS, RECONNECTS, REASKED,
)  # fmt: skip
"""In the order they are exposed."""
