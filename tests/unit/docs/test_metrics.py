"""Documentation, alert rules and dashboard name the metrics there are, all of them and no others."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentenv.api.image_keeper.app import KEEPER_METRICS
from agentenv.metrics.catalog import FARM_METRICS, METRICS
from agentenv.sandbox.server.metrics import METRICS as SANDBOX_METRICS

ROOT = Path(__file__).resolve().parents[3]
ALL: tuple[Any, ...] = (*METRICS, *FARM_METRICS, *KEEPER_METRICS, *SANDBOX_METRICS)
_NAME = re.compile(r"\bagentenv_[a-z_]+\b")
_LABELLED = re.compile(r"\b(agentenv_[a-z_]+)\{([^}]*)\}")
_ROW = re.compile(r"^\| `(agentenv_\w+)` \| (\w+) \| (.*?) \| (.+) \|$", re.MULTILINE)


def queryable() -> dict[str, set[str]]:
    """What Prometheus can be asked for, with the labels it has (``instance`` and ``container`` come by scraping)."""
    found: dict[str, set[str]] = {}
    for metric in ALL:
        suffixes = ("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",)
        for suffix in suffixes:
            extra = {"le"} if suffix == "_bucket" else set()
            found[metric.name + suffix] = {*metric.labels, *extra, "instance", "container"}
    return found


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load((ROOT / "ops/alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def dashboard_queries() -> Iterator[str]:
    dashboard = json.loads((ROOT / "ops/grafana/agentenv.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"]


def check(query: str) -> None:
    known = queryable()
    names = _NAME.findall(query)
    assert [name for name in names if name not in known] == [], query
    for name, selectors in _LABELLED.findall(query):
        labels = set(re.findall(r"(\w+)\s*=~?|(\w+)\s*!", selectors))
        named = {label for pair in labels for label in pair if label}
        assert named <= known[name], query
    assert query.count("(") == query.count(")"), query


def test_every_metric_is_documented_as_it_is() -> None:
    rows = {name: rest for name, *rest in _ROW.findall((ROOT / "docs/metrics.md").read_text())}
    expected = {
        metric.name: [metric.kind, ", ".join(f"`{label}`" for label in metric.labels) or "–", metric.help]
        for metric in ALL
    }
    assert rows == expected


def test_names_are_told_apart_and_well_formed() -> None:
    names = [metric.name for metric in ALL]
    assert len(set(names)) == len(names)
    for metric in ALL:
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert metric.help.endswith("."), metric.name


@pytest.mark.parametrize("query", list(dashboard_queries()))
def test_the_dashboard_queries_metrics_there_are(query: str) -> None:
    assert _NAME.search(query)
    check(query)


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: rule["alert"])
def test_alert_rules_query_metrics_there_are(rule: dict[str, Any]) -> None:
    check(rule["expr"])
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    assert rule["annotations"]["summary"]


def summary(name: str, labels: dict[str, str]) -> str:
    """An alert's summary as Prometheus renders it: as much of its templates as is used there."""
    (text,) = [rule["annotations"]["summary"] for rule in alerts() if rule["alert"] == name]
    either = re.compile(r"{{ with \$labels\.(\w+) }}(.*?){{ else }}(.*?){{ end }}")
    text = either.sub(lambda m: m[2].replace("{{ . }}", labels[m[1]]) if labels.get(m[1]) else m[3], text)
    return re.sub(r"{{ \$labels\.(\w+) }}", lambda m: labels.get(m[1], ""), text)


def test_a_silent_target_is_named_however_it_is_scraped() -> None:
    """``up`` has the labels of the target alone: ``container`` only where relabelling gives it one."""
    target = {"job": "agentenv-sandbox", "instance": "10.0.0.7:9100"}
    down = "AgentenvContainerDown"
    assert summary(down, {**target, "container": "c-1", "node": "n"}) == "container c-1 is not answering"
    assert summary(down, target) == "agentenv metrics at 10.0.0.7:9100 is not answering"


def test_every_alert_has_a_row_that_says_what_it_means() -> None:
    said = (ROOT / "docs/operations.md").read_text()
    rows = re.findall(r"^\| `(Agentenv\w+)` \| (.+?) \| (.+) \|$", said, re.MULTILINE)
    assert [name for name, *_ in rows] == [rule["alert"] for rule in alerts()]
    assert all(meaning and cure for _, meaning, cure in rows)


def test_panels_do_not_lie_on_each_other() -> None:
    panels = json.loads((ROOT / "ops/grafana/agentenv.json").read_text())["panels"]
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_scraping_as_documented_is_prometheus_configuration() -> None:
    shown = re.search(r"```yaml\n(.*?)```", (ROOT / "docs/metrics.md").read_text(), re.DOTALL)
    assert shown is not None
    jobs = {job["job_name"] for job in yaml.safe_load(shown[1])["scrape_configs"]}
    used = {name for rule in alerts() for name in re.findall(r'job="([^"]+)"', rule["expr"])}
    assert used <= jobs
