"""What is read in a log, and what the packages of the datasets read in the same (``tests/golden/swe_answers.py``)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentenv.tasks.swe.kinds import PARSERS
from agentenv.tasks.swe.outcomes import can_decide, outcomes, runs_pytest
from agentenv.tasks.swe.records import TestLog
from tests.golden.swe_answers import ANSWERS
from tests.golden.swe_cases import LINES, logs

THEIRS: dict[str, Any] = json.loads(ANSWERS.read_text())["statuses"]
FAILURES_ONLY = ("chart_js", "bpmn_js", "openlayers", "eslint", "marked")
OTHERS: dict[str, TestLog] = {
    "smith": "smith-pytest",
    "rebench_v2": "swebench-pytest-v2-cut",
    "gym_pydantic": "swebench-pydantic",
    "r2e": "r2e",
}


def reader(name: str) -> TestLog:
    return OTHERS.get(name) or PARSERS[f"parse_log_{name}"]


@pytest.mark.parametrize("name", LINES)
def test_every_status_is_that_of_the_datasets_own_parser(name: str) -> None:
    for log, theirs in zip(logs(name), THEIRS[name], strict=True):
        if theirs is not None:
            assert outcomes(reader(name), log) == theirs, log


@pytest.mark.parametrize("name", LINES)
def test_the_logs_try_each_parser(name: str) -> None:
    known = [status for statuses in THEIRS[name] for status in (statuses or {}).values()]
    assert len(known) > 15
    assert sum(statuses is None for statuses in THEIRS[name]) < len(THEIRS[name]) / 2


def test_each_parser_of_swebench_is_compared_or_refused() -> None:
    """Parsers that choose among others by a record's number are in ``kinds``; those of five repositories of Multimodal
    are not read."""
    chosen = {"parse_log_jekyll", "parse_log_immutable_js"}
    refused = {f"parse_log_{name}" for name in ("lighthouse", "next", "p5js", "prismjs", "quarto_cli")}
    same = {name for name, log in PARSERS.items() if any(reader(each) == log for each in LINES)}
    theirs = set(json.loads(ANSWERS.read_text())["parsers"])
    assert theirs - same == chosen | refused


@pytest.mark.parametrize("name", sorted(set(LINES) - {"phpunit", "doctest", "karma", "highlightjs", "calypso"}))
def test_a_name_that_a_parser_reads_is_accepted(name: str) -> None:
    """Of pytest's those with a file, which all of its tests have."""
    decisive = "FAILED" if name in FAILURES_ONLY else "PASSED"
    named = {test for statuses in THEIRS[name] for test, status in (statuses or {}).items() if status == decisive}
    if runs_pytest(reader(name)):
        named = {test for test in named if "::" in test}
    refused = {test for test in named if not can_decide(reader(name), test)}
    assert len(refused) <= len(named) / 10, refused
