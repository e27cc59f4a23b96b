"""The farm's metrics: all of the catalog's, with a bounded number of runs, and the page's numbers."""

from __future__ import annotations

from collections.abc import Mapping

from agentenv.api.farm_server.farm import Farm
from agentenv.api.farm_server.page_routes import of_farm
from agentenv.api.farm_server.run_labels import IDLE_S, OTHER, RunCounts
from agentenv.api.farm_server.sight import Sights
from agentenv.api.farm_server.tokens import Right
from agentenv.metrics.catalog import FARM_METRICS
from agentenv.metrics.exporter import renderer
from agentenv.metrics.scrape import Samples, parse
from agentenv.slots.backends.fake import FakeBackend
from agentenv.wire import sight as wire
from tests.farm_crowd import crowd


def farm_of(*runs: str, containers: int = 3, slots: int = 6) -> Farm:
    farm = Farm(FakeBackend())
    crowd(farm, containers, slots, runs)
    farm.leads = True
    return farm


def scraped(farm: Farm) -> Samples:
    return parse(renderer()(of_farm(farm))[0].decode())


def test_every_metric_of_the_catalog_is_there_with_its_labels() -> None:
    farm = farm_of("a")
    farm.queue.grants.add("a", 2)
    samples = scraped(farm)
    for metric in FARM_METRICS:
        name = f"{metric.name}_count" if metric.kind == "histogram" else metric.name
        assert samples.values.get(name), metric.name
        for labels in samples.values[name]:
            assert {label for label, _ in labels} == set(metric.labels), metric.name
    found = {name for name in samples.values if name.startswith("agentenv_farm_")}
    suffixes = ("_bucket", "_sum", "_count")
    assert {name for name in found if not name.endswith(suffixes)} <= {metric.name for metric in FARM_METRICS}


def test_values_are_those_of_the_farm() -> None:
    farm = farm_of("a", "b")
    farm.manager.tally.waits.add(0.2)
    farm.manager.tally.faults["lease_reclaimed"] = 3
    samples = scraped(farm)
    assert samples.one("agentenv_farm_leader") == 1
    assert samples.one("agentenv_farm_adopted_total") == 12
    assert samples.one("agentenv_farm_reclaims_total") == 3
    assert samples.one("agentenv_farm_ask_wait_seconds_count") == 1
    assert samples.by("agentenv_farm_slots_held", "run") == {"a": 6, "b": 6}
    assert samples.one("agentenv_farm_share", run="a") == 1
    assert samples.by("agentenv_pool_slots", "state")["leased"] == 12


async def test_the_page_shows_the_same_numbers() -> None:
    farm = farm_of("a", "b", "b")
    whole = wire.sight_line.validate_json(await Sights(farm).whole(Right("*", "read", None, "x")))
    assert isinstance(whole, wire.Sight)
    samples = scraped(farm)
    assert whole.farm.load.slots == {
        state: count for state, count in samples.by("agentenv_pool_slots", "state").items() if count
    }
    held: Mapping[str, float] = {run.run: sum(run.held.values()) for run in whole.runs}
    assert held == samples.by("agentenv_farm_slots_held", "run")


def test_a_standby_says_that_it_does_not_lead() -> None:
    farm = Farm(FakeBackend())
    samples = scraped(farm)
    assert samples.one("agentenv_farm_leader") == 0
    assert samples.one("agentenv_farm_generation") == 0


def test_two_hundred_runs_are_named_and_the_rest_is_other() -> None:
    farm = farm_of(*(f"run-{number}" for number in range(250)), containers=100, slots=7)
    samples = scraped(farm)
    held = samples.by("agentenv_farm_slots_held", "run")
    assert len(held) == 201
    assert held[OTHER] == 100
    assert sum(held.values()) == 500
    assert len(samples.by("agentenv_farm_share", "run")) == 201


def test_a_run_gives_its_label_back_when_it_has_been_away_for_long() -> None:
    counts = RunCounts(most=1)
    counts.add("a", 2)
    counts.add("b", 3)
    assert counts.counts == {"a": 2, OTHER: 3}
    counts.forget({"a"}, 0.0)
    counts.forget({"b"}, IDLE_S - 1)
    assert counts.label("b") == OTHER
    counts.forget({"b"}, IDLE_S)
    counts.add("b", 1)
    assert counts.counts == {"b": 1, OTHER: 3}


def test_a_run_called_other_is_no_run_of_its_own() -> None:
    counts = RunCounts()
    counts.add(OTHER, 1)
    counts.add("", 1)
    assert counts.counts == {OTHER: 2}
