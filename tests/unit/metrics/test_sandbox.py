"""What the sandbox server writes at /metrics is what Prometheus' own parser reads."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from agentenv.metrics.scrape import parse
from agentenv.sandbox.loop_watch import Stalls
from agentenv.sandbox.server.metrics import COUNTED, LOOP, METRICS, Statistics, exposition


def text(statistics: Statistics, isolation: str = "full") -> str:
    states = {"free": 2, "leased": 1}
    stalls = {"server": Stalls(3, 0.25, 0.125), "supervisor": Stalls(4, 0.5, 0.0)}
    lines = exposition(
        statistics.as_dict(),
        states,
        version="1.2.3",
        isolation=isolation,
        stalls=stalls,
        call_times=statistics.call_times(),
    )
    return "".join(lines)


def test_prometheus_reads_every_metric_with_its_kind_and_help() -> None:
    families = {family.name: family for family in text_string_to_metric_families(text(Statistics()))}
    for metric in METRICS:
        family = families.pop(metric.name.removesuffix("_total") if metric.kind == "counter" else metric.name)
        assert (family.type, family.documentation) == (metric.kind, metric.help)
        for sample in family.samples:
            suffix = sample.name.removeprefix(metric.name)
            assert suffix in (("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",))
            assert tuple(sample.labels) == (("le",) if suffix == "_bucket" else metric.labels)
    assert families == {}


def test_each_counter_shows_its_own_field() -> None:
    statistics = Statistics()
    for number, name in enumerate(statistics.as_dict(), start=1):
        setattr(statistics, name, number)
    samples = parse(text(statistics))
    for metric in COUNTED:
        assert samples.one(metric.name) == getattr(statistics, metric.field)
    assert samples.by("agentenv_sandbox_slots", "state") == {"free": 2, "leased": 1}


def test_every_field_is_exposed() -> None:
    shown = {metric.field for metric in COUNTED} | {"slots_free", "slots_leased"}
    assert shown == Statistics().as_dict().keys()


def test_calls_are_counted_by_how_long_they_ran() -> None:
    statistics = Statistics()
    for duration_s in (0.0005, 0.01, 0.02, 400.0):
        statistics.ran(duration_s)
    samples = parse(text(statistics))
    buckets = samples.by("agentenv_sandbox_call_seconds_bucket", "le")
    assert [buckets[bound] for bound in ("0.001", "0.01", "0.025", "300", "+Inf")] == [1, 2, 3, 3, 4]
    assert samples.one("agentenv_sandbox_call_seconds_count") == 4
    assert samples.one("agentenv_sandbox_call_seconds_sum") == 400.0305


def test_the_loops_stalls_are_told() -> None:
    samples = parse(text(Statistics()))
    told = [samples.by(metric.name, "process") for metric in LOOP]
    assert told == [
        {"server": 3, "supervisor": 4},
        {"server": 0.25, "supervisor": 0.5},
        {"server": 0.125, "supervisor": 0.0},
    ]


def test_the_process_is_measured() -> None:
    samples = parse(text(Statistics()))
    assert (samples.one("agentenv_sandbox_server_resident_bytes") or 0) > 1e6
    assert (samples.one("agentenv_sandbox_server_cpu_seconds_total") or 0) > 0
    assert (samples.one("agentenv_sandbox_server_open_files") or 0) >= 3


def test_label_values_cannot_break_out() -> None:
    samples = parse(text(Statistics(), isolation='a"b\\c\nd'))
    assert samples.by("agentenv_sandbox_info", "isolation") == {'a"b\\c\nd': 1.0}
