"""A farm as values of the catalog's metrics: read when they are scraped, from the counts that the page shows too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import chain

from agentenv.api.farm_server.activity import COUNTERS, GAUGES
from agentenv.api.farm_server.farm import Farm
from agentenv.api.farm_server.run_labels import OTHER
from agentenv.api.farm_server.tokens import Right
from agentenv.errors import LeaseReclaimedError
from agentenv.metrics import catalog, readings
from agentenv.metrics.readings import Reading
from agentenv.slots.histogram import Buckets
from agentenv.wire.leases import RunKind

_KINDS: tuple[RunKind, ...] = ("train", "eval", "interactive")
_ENDED = {name: name.removeprefix("calls_") for name in COUNTERS if name.startswith("calls_")}
"""Counters of calls that ended badly, and their label."""


def of_farm(farm: Farm, right: Right | None = None) -> Iterator[Reading]:
    """Every metric of a farm service; those of runs as far as the token covers them (None: of all)."""
    pool = farm.yard.statistics()
    return chain(
        readings.build(farm.backend_name),
        readings.of_pool(pool),
        _of_service(farm, pool.acquire_waits),
        _of_runs(farm, right),
        _of_calls(farm),
    )


def _of_service(farm: Farm, waits: Buckets) -> Iterator[Reading]:
    reclaims = farm.yard.tally.faults[LeaseReclaimedError.code]
    yield Reading(catalog.FARM_LEADER, {(): int(farm.leads)})
    yield Reading(catalog.FARM_GENERATION, {(): farm.generation if farm.leads else 0})
    yield Reading(catalog.FARM_CLIENTS, {(): len(farm.news)})
    yield Reading(catalog.FARM_WAIT, {(): waits})
    yield Reading(catalog.FARM_RECLAIMS, {(): reclaims})
    yield Reading(catalog.FARM_ADOPTED, {(): farm.yard.ledger.adopted_total})


def _of_runs(farm: Farm, right: Right | None) -> Iterator[Reading]:
    def covered(name: str) -> bool:
        return right is None or right.run == "*" or (right.covers(name) and name != OTHER)

    label = farm.desk.grants.label
    held: Counter[tuple[str, ...]] = Counter()
    waiting: Counter[tuple[str, ...]] = Counter()
    fair: dict[str, float] = {}
    fair_shares = farm.line.fair_shares(sum(farm.yard.ledger.slot_counts().values()))
    for run, view in sorted(farm.line.runs().items()):
        if not covered(run):
            continue
        name = label(run)
        fair[name] = fair.get(name, 0.0) + fair_shares.get(run, 0.0)
        for kind in _KINDS:
            held[name, kind] += view.held.get(kind, 0)
    for opened in filter(lambda one: covered(one.run), farm.desk.waiting()):
        waiting[label(opened.run), opened.ask.tags.kind] += 1
    shares: dict[tuple[str, ...], float] = {
        (name,): sum(held[name, kind] for kind in _KINDS) / most for name, most in fair.items() if most > 0
    }
    yield Reading(catalog.FARM_WAITING, {**dict.fromkeys(held, 0), **waiting})
    yield Reading(catalog.FARM_HELD, dict(held))
    yield Reading(catalog.FARM_SHARE, shares)
    grants = farm.desk.grants.counts.items()
    yield Reading(catalog.FARM_GRANTS, {(name,): count for name, count in grants if covered(name)})


def _of_calls(farm: Farm) -> Iterator[Reading]:
    totals, gauges = farm.activity.totals, farm.activity.gauges
    yield Reading(catalog.FARM_CALLS, {(): totals["calls"]})
    yield Reading(catalog.FARM_CALLS_ENDED, {(label,): totals[name] for name, label in _ENDED.items()})
    yield Reading(catalog.FARM_CALL_TIME, {(): farm.activity.call_times})
    yield Reading(catalog.FARM_EXPIRED, {(): totals["leases_expired"]})
    yield Reading(catalog.FARM_SLOTS_LOST, {(): totals["slots_lost"]})
    for metric, name in zip((catalog.FARM_RUNNING, catalog.FARM_QUEUED, catalog.FARM_HELD_BYTES), GAUGES, strict=True):
        yield Reading(metric, {(): gauges[name]})
