"""Statistics of pool and executor as values of the catalog's metrics. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from agentenv._version import __version__
from agentenv.executor.tool_executor import ExecutorStatistics
from agentenv.metrics import catalog
from agentenv.metrics.calls import CallCounts
from agentenv.metrics.catalog import Metric
from agentenv.slots.histogram import Buckets
from agentenv.slots.statistics import PoolStatistics
from agentenv.wire.states import ContainerState, SlotState

Value = float | Buckets
Readings = Mapping[tuple[str, ...], Value]
"""Label values, in the order of the metric's labels, mapped to the value."""

CONTAINER_STATES = tuple(state for state in ContainerState if state is not ContainerState.gone)
SLOT_STATES = tuple(state for state in SlotState if state is not SlotState.gone)


@dataclass(frozen=True)
class Reading:
    """One metric's values at one moment."""

    metric: Metric
    values: Readings


def build(backend: str) -> Iterator[Reading]:
    """Version and backend."""
    yield Reading(catalog.BUILD, {(__version__, backend): 1})


def of_pool(now: PoolStatistics) -> Iterator[Reading]:
    """Every ``agentenv_pool_*`` metric; empty states are 0, so that graphs have no gaps."""
    yield Reading(catalog.POOL_CONTAINERS, {(state,): now.containers.get(state, 0) for state in CONTAINER_STATES})
    yield Reading(catalog.POOL_GOAL, {(): now.goal_containers})
    yield Reading(catalog.POOL_MAX, {(): now.max_containers})
    yield Reading(catalog.POOL_SLOTS, {(state,): now.slots.get(state, 0) for state in SLOT_STATES})
    yield Reading(catalog.POOL_WAITING, {(): now.waiting})
    yield Reading(catalog.POOL_GRANTED, {(): now.leases_granted})
    yield Reading(catalog.POOL_RELEASED, {(): now.leases_released})
    yield Reading(catalog.POOL_LOST, {(): now.leases_lost})
    yield Reading(catalog.POOL_ACQUIRE, {(): now.acquire_waits})
    yield Reading(catalog.POOL_RESET, {(): now.resets})
    yield Reading(catalog.POOL_FAULTS, {(code,): count for code, count in now.faults.items()})


def of_executor(now: ExecutorStatistics, calls: CallCounts) -> Iterator[Reading]:
    """Every ``agentenv_executor_*`` metric."""
    yield Reading(catalog.CALLS, {(tool, fault): count for (tool, fault), count in calls.ended.items()})
    yield Reading(catalog.CANCELLED, {(tool,): count for tool, count in calls.given_up.items()})
    yield Reading(catalog.RUNNING, {(): now.running_now})
    yield Reading(catalog.SESSIONS, {(): now.sessions_now})
    yield Reading(catalog.CONNECTED, {(): now.containers_now})
    yield Reading(catalog.BATCH_SIZE, {(): calls.batch_sizes.now()})
    yield Reading(catalog.BATCH_WAIT, {(): calls.batch_waits.now()})
    yield Reading(catalog.QUEUE, {(): calls.queues.now()})
    yield Reading(catalog.RUN, {(tool,): runs.now() for tool, runs in calls.runs.items()})
    yield Reading(catalog.OVERHEAD, {(): calls.overheads.now()})
    yield Reading(catalog.STREAMS, {(): now.streams})
    yield Reading(catalog.RECONNECTS, {(): now.reconnects})
    yield Reading(catalog.REASKED, {(): now.reasked})
