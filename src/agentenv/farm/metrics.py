"""Metrics of a farm run by ``agentenv up``: its containers' own metrics, each with a ``container`` label.

So one address is enough for a whole farm, without token and discovery. Slots are counted in the containers, because
other processes lease them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

from agentenv.farm.view import FarmView
from agentenv.metrics import catalog, readings
from agentenv.metrics.catalog import Metric
from agentenv.metrics.readings import Reading
from agentenv.sandbox.server.metrics import CALL_TIMES, METRICS
from agentenv.slots.histogram import Buckets
from agentenv.wire.states import ContainerState
from agentenv.wire.watch import CALL_BOUNDS_S

LABEL = "container"


def of_farm(sight: FarmView) -> Iterator[Reading]:
    """Every metric of the farm at this moment."""
    yield from readings.build(sight.census.backend)
    yield Reading(catalog.POOL_CONTAINERS, _containers(sight))
    yield Reading(catalog.POOL_GOAL, {(): sight.census.goal})
    yield Reading(catalog.POOL_SLOTS, {(state,): sight.slots[state.value] for state in readings.SLOT_STATES})
    for metric in METRICS:
        labelled = Metric(metric.name, metric.kind, metric.help, (*metric.labels, LABEL))
        values = _call_times(sight) if metric is CALL_TIMES else _values(sight, metric.name, metric.labels)
        yield Reading(labelled, dict(values))


def _containers(sight: FarmView) -> dict[tuple[str, ...], float]:
    ready = sum(container.answers for container in sight.containers)
    silent = sum(container.place.handle is not None and not container.answers for container in sight.containers)
    counts = {
        ContainerState.ready: ready,
        ContainerState.suspect: silent,
        ContainerState.starting: max(0, sight.census.goal - ready - silent),
        ContainerState.draining: 0,
    }
    return {(state,): count for state, count in counts.items()}


def _values(sight: FarmView, name: str, labels: Iterable[str]) -> Iterator[tuple[tuple[str, ...], float]]:
    for container in sight.containers:
        for found, value in container.samples.values.get(name, {}).items():
            named = dict(found)
            yield (*(named.get(label, "") for label in labels), container.place.id), value


def _call_times(sight: FarmView) -> Iterator[tuple[tuple[str, ...], Buckets]]:
    """The containers' only histogram."""
    for container in sight.containers:
        samples = container.samples
        so_far = samples.by(f"{CALL_TIMES.name}_bucket", "le")
        if so_far:
            ordered = [0, *(int(so_far[bound]) for bound in (*(f"{bound:g}" for bound in CALL_BOUNDS_S), "+Inf"))]
            counts = tuple(after - before for before, after in pairwise(ordered))
            total_s = samples.one(f"{CALL_TIMES.name}_sum") or 0.0
            yield (container.place.id,), Buckets(CALL_BOUNDS_S, counts, total_s)
