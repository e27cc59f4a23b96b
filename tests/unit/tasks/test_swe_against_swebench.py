"""What SWE-bench's own package reads in a log, and whom it calls solved, against what is read here.

Of its source distribution only the log parsers and the grading are loaded: they need nothing but the standard library,
while the packages that it depends on are those of its harness (docker, datasets, modal and others).
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentenv.tasks.pinned import Artifact, fetch_artifact
from agentenv.tasks.swe.fresh_root import Tried
from agentenv.tasks.swe.outcomes import can_decide, met, outcomes, status_of
from agentenv.tasks.swe.swebench_logs import LOGS
from tests.unit.tasks.test_swe_images import record

SWEBENCH = Artifact(
    "swebench",
    "5.0.2",
    "swebench-5.0.2.tar.gz",
    "faae7b1307b8188e842e78ef5826cf0d64fa78486adc41e3414f9533b9e0d7eb",
)


@pytest.fixture(scope="module")
def swebench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """Its parsers by repository, and its grading."""
    directory = tmp_path_factory.mktemp("swebench")
    subprocess.run(["tar", "-xf", fetch_artifact(SWEBENCH), "-C", directory], check=True)
    top = directory / f"swebench-{SWEBENCH.version}/swebench"
    before = set(sys.modules)
    try:
        for name in ("", ".harness", ".harness.log_parsers"):  # whose __init__ imports the rest of the harness
            package = ModuleType(f"swebench{name}")
            package.__path__ = [str(Path(top, *name.split(".")))]
            package.PARSER_REGISTRY = {}  # type: ignore[attr-defined]
            sys.modules[package.__name__] = package
        parsers = importlib.import_module("swebench.harness.log_parsers.python").MAP_REPO_TO_PARSER_PY
        yield SimpleNamespace(parsers=parsers, grading=importlib.import_module("swebench.harness.grading"))
    finally:
        for name in set(sys.modules) - before:
            if name.partition(".")[0] == "swebench":
                del sys.modules[name]


NAMES = (
    "a/b.py::test_one", "a/b.py::TestA::test_two[x]", "a/b.py::test_p[x y]", "a/b.py::test_p[x z]", "a/b.py::test_p[x",
    "a/b.py::test_p[l - r]", "a/b.py::test_path[/usr/bin/x]", "a/b.py::test_path[//x]", "a/b.py::test_path[/a/*b]",
    "a/b.py::test_path[a]/b]c", "a/b.py::test_m[MouseButton.LEFT-MouseButton.RIGHT]", "a/b.py::test_n[10m]", "a/b.py",
    "[100%]", "[1]", "[ 50%]", "test_a (m.C)", "test_a (m.C.test_a)", "Docs of it.", "Docs - with (brackets) [x",
    "--version is equivalent to version", "test_bare", "test_other[3]", "sympy/core/tests/test_a.py:test_bare",
    "Applying sites.0002_alter_domain_unique...test_no_migrations (m.C)", "Über alles", "a  b", "ok", "x ... y",
)  # fmt: skip
LINES = (
    "PASSED {}", "FAILED {} - assert 1 == 2", "FAILED {}", "ERROR {} - RuntimeError: a - b", "ERROR {}", "XFAIL {}",
    "XFAIL {} - some day", "XPASS {} always", "SKIPPED [1] a/b.py:7: {}", "SKIPPED {}", "PASSED", "FAILED", "ERROR: {}",
    "FAIL: {}", "FAIL: {} x", "{} PASSED", "{} PASSED [ 10%]", "{} FAILED", "{} XFAIL", "{} SKIPPED (why)",
    "{} ... ok", "  {} ... ok  ", "{} ... OK", "{} ...  OK", "{} ... FAIL", "{} ... ERROR", "{} ... skipped 'no'",
    "{} ... expected failure", "{} ... unexpected success", "{} ... Testing against Django installed in '/t' with 2",
    "2 silenced).", "{} ... Internal Server Error: /a/", "{} ... System check identified no issues (0 silenced)", "ok",
    "okay", "{} ok", "{} E", "{} F", "{} f", "{} ok                  [OK]", "____ {} ____", "__ sympy/a.py:test_x __",
    "", "ERRORS: {}", "FAILED (failures=1)", "=== 1 failed, 2 passed in 0.1s ===", "PASSED\t{}", "PASSED  {}  ",
    "Ran 3 tests, {} PASSED too", "  PASSED {}", "{}",
)  # fmt: skip
STATUSES = ("PASSED", "FAILED", "SKIPPED", "ERROR", "XFAIL", None)
LOG = st.lists(st.builds(str.format, st.sampled_from(LINES), st.sampled_from(NAMES)), max_size=12).map("\n".join)


def test_the_repositories_are_those_of_swebench(swebench: SimpleNamespace) -> None:
    assert set(LOGS) <= set(swebench.parsers)


@pytest.mark.parametrize("repo", LOGS)
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(log=LOG)
def test_every_status_is_that_of_swebench(swebench: SimpleNamespace, repo: str, log: str) -> None:
    try:
        theirs = swebench.parsers[repo](log, None)
    except IndexError:  # a line that ends after FAIL:
        return
    assert outcomes(LOGS[repo], log) == theirs


@pytest.mark.parametrize("repo", LOGS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(log=LOG, data=st.data())
def test_who_is_solved_is_who_swebench_calls_solved(
    swebench: SimpleNamespace, repo: str, log: str, data: st.DataObject
) -> None:
    statuses = outcomes(LOGS[repo], log)
    cut = (name[: name.find(" ")] for name in statuses if name.find(" ") > 0)
    names = {*statuses, *cut, "a/b.py::test_missing"}
    graded = sorted(name for name in names if status_of(name, statuses) in STATUSES)  # others SWE-bench leaves out
    solved, *kept = data.draw(st.lists(st.sampled_from(graded), min_size=1, max_size=2, unique=True))
    report = swebench.grading.get_eval_tests_report(statuses, {"FAIL_TO_PASS": [solved], "PASS_TO_PASS": kept})
    wanted = replace(record(), fail_to_pass=(solved,), pass_to_pass=tuple(kept))
    full = swebench.grading.get_resolution_status(report) == "RESOLVED_FULL"
    assert Tried(met(wanted, statuses)).score(wanted) == full


@pytest.mark.parametrize("new", STATUSES)
@pytest.mark.parametrize("old", STATUSES)
def test_each_pair_of_statuses_is_graded_as_by_swebench(
    swebench: SimpleNamespace, new: str | None, old: str | None
) -> None:
    statuses = {name: status for name, status in (("new", new), ("old", old)) if status is not None}
    report = swebench.grading.get_eval_tests_report(statuses, {"FAIL_TO_PASS": ["new"], "PASS_TO_PASS": ["old"]})
    wanted = replace(record(), fail_to_pass=("new",), pass_to_pass=("old",))
    full = swebench.grading.get_resolution_status(report) == "RESOLVED_FULL"
    assert Tried(met(wanted, statuses)).score(wanted) == full


@pytest.mark.parametrize("repo", LOGS)
@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_accepted_if_swebench_could_read_it(swebench: SimpleNamespace, repo: str, name: str) -> None:
    """Whatever line of a test that passes names it. A summary of pytest's names files, or a progress."""
    log, parse = LOGS[repo], swebench.parsers[repo]
    passes = [line.format(name) for line in ("PASSED {}", "{} ... ok", "{} ok")]
    could = any(parse(line, None).get(name) == "PASSED" for line in passes)
    runs_pytest = log not in ("swebench-django", "swebench-sympy")
    assert can_decide(log, name) == (could and (not runs_pytest or "::" in name or name == "[100%]"))
