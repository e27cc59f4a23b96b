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


BUILD = Metric("agentenv_build_info", "gauge", "Always 1; the labels describe what is running.", ("version", "backend"))

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

FARM_LEADER = Metric("agentenv_farm_leader", "gauge", "1: the service leads and grants slots; 0: it is a standby.")
FARM_GENERATION = Metric("agentenv_farm_generation", "gauge", "Generation of the leader; 0: this is a standby.")
FARM_CLIENTS = Metric("agentenv_farm_clients", "gauge", "Clients with an open event stream.")
FARM_WAITING = Metric("agentenv_farm_asks_waiting", "gauge", "Requests that wait for slots.", ("run", "kind"))
FARM_HELD = Metric("agentenv_farm_slots_held", "gauge", "Slots held.", ("run", "kind"))
FARM_SHARE = Metric("agentenv_farm_share", "gauge", "Slots held over the fair share.", ("run",))
FARM_GRANTS = Metric("agentenv_farm_grants_total", "counter", "Slots granted.", ("run",))
FARM_WAIT = Metric("agentenv_farm_ask_wait_seconds", "histogram", "Time from a request until it was granted.")
FARM_RECLAIMS = Metric("agentenv_farm_reclaims_total", "counter", "Leases ended for a run below its guarantee.")
FARM_ADOPTED = Metric("agentenv_farm_adopted_total", "counter", "Leases found that this process did not grant.")
FARM_CALLS = Metric("agentenv_farm_calls_total", "counter", "Finished tool calls in all containers.")
FARM_CALLS_ENDED = Metric(
    "agentenv_farm_calls_failed_total",
    "counter",
    "Tool calls that timed out, were killed for memory, were cancelled, or had a fault other than none.",
    ("why",),
)
FARM_CALL_TIME = Metric("agentenv_farm_call_seconds", "histogram", "Time calls ran in their slots.")
FARM_RUNNING = Metric("agentenv_farm_calls_running", "gauge", "Running calls.")
FARM_QUEUED = Metric("agentenv_farm_calls_queued", "gauge", "Calls queued behind earlier calls of their slot.")
FARM_HELD_BYTES = Metric(
    "agentenv_farm_held_bytes", "gauge", "Memory that containers hold for queued and running calls."
)
FARM_EXPIRED = Metric("agentenv_farm_leases_expired_total", "counter", "Leases expired for lack of a heartbeat.")
FARM_SLOTS_LOST = Metric("agentenv_farm_slots_lost_total", "counter", "Slots whose agent died unexpectedly.")

METRICS = (
    BUILD,
    POOL_CONTAINERS, POOL_GOAL, POOL_MAX, POOL_SLOTS, POOL_WAITING, POOL_GRANTED, POOL_RELEASED, POOL_LOST,
    POOL_ACQUIRE, POOL_RESET, POOL_FAULTS,
    CALLS, CANCELLED, RUNNING, SESSIONS, CONNECTED, BATCH_SIZE, BATCH_WAIT, QUEUE, RUN, OVERHEAD,
    STREAMS, RECONNECTS, REASKED,
)  # fmt: skip
"""Of a process with a pool and an executor, in the order they are exposed."""

FARM_METRICS = (
    FARM_LEADER, FARM_GENERATION, FARM_CLIENTS, FARM_WAITING, FARM_HELD, FARM_SHARE, FARM_GRANTS, FARM_WAIT,
    FARM_RECLAIMS, FARM_ADOPTED, FARM_CALLS, FARM_CALLS_ENDED, FARM_CALL_TIME, FARM_RUNNING, FARM_QUEUED,
    FARM_HELD_BYTES, FARM_EXPIRED, FARM_SLOTS_LOST,
)  # fmt: skip
"""Of a farm service, in addition to those of its pool."""
