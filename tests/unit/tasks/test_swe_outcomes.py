from __future__ import annotations

import pytest

from agentenv.tasks.swe.outcomes import met, outcomes, status_of
from tests.unit.tasks.test_swe_images import record

PYTEST = """\
tests/test_a.py .F.sx
=========================== short test summary info ============================
PASSED tests/test_a.py::test_one
PASSED tests/test_a.py::test_two[a - b]
SKIPPED [1] tests/test_a.py:7: not here
XFAIL tests/test_a.py::test_later - some day
FAILED tests/test_a.py::test_three - AssertionError: assert 1 == 2
ERROR tests/test_a.py::test_four - RuntimeError
PASSED tests/test_a.py::test_five
ERROR tests/test_a.py::test_five - RuntimeError: at teardown
ERROR tests/test_b.py
"""
UNITTEST = """\
Testing against Django installed in '/testbed/django'
test_plain (utils_tests.test_html.TestUtilsHtml) ... ok
test_new_form (utils_tests.test_html.TestUtilsHtml.test_new_form) ... FAIL
test_said (utils_tests.test_html.TestUtilsHtml.test_said)
It says what it does. ... ok
test_noise (a.B.test_noise) ... skipped 'not here'
test_error (a.B.test_error) ... ERROR
test_known (a.B.test_known) ... expected failure
test_unexpected (a.B.test_unexpected) ... unexpected success

======================================================================
FAIL: test_new_form (utils_tests.test_html.TestUtilsHtml.test_new_form)
"""


def test_the_summary_of_pytest() -> None:
    assert outcomes("pytest", PYTEST) == {
        "tests/test_a.py::test_one": "PASSED",
        "tests/test_a.py::test_two[a - b]": "PASSED",
        "tests/test_a.py::test_later": "XFAIL",
        "tests/test_a.py::test_three": "FAILED",
        "tests/test_a.py::test_four": "ERROR",
        "tests/test_a.py::test_five": "ERROR",
    }


def test_the_lines_of_unittest() -> None:
    assert outcomes("unittest", UNITTEST) == {
        "test_plain (utils_tests.test_html.TestUtilsHtml)": "PASSED",
        "test_new_form (utils_tests.test_html.TestUtilsHtml.test_new_form)": "FAILED",
        "test_said (utils_tests.test_html.TestUtilsHtml.test_said)": "PASSED",
        "test_noise (a.B.test_noise)": "SKIPPED",
        "test_error (a.B.test_error)": "ERROR",
        "test_known (a.B.test_known)": "XFAIL",
        "test_unexpected (a.B.test_unexpected)": "FAILED",
    }


def test_django_names_a_test_with_a_docstring_by_it() -> None:
    found = outcomes("swebench-django", UNITTEST)
    assert found["It says what it does."] == "PASSED"
    assert found["test_plain (utils_tests.test_html.TestUtilsHtml)"] == "PASSED"
    assert "test_said (utils_tests.test_html.TestUtilsHtml.test_said)" not in found


def test_colours_and_carriage_returns_do_not_matter() -> None:
    assert outcomes("pytest", "\x1b[32mPASSED\x1b[0m a.py::\x1b[1mtest\x1b[0m\r\n") == {"a.py::test": "PASSED"}
    assert outcomes("unittest", "no test at all\n") == {}


@pytest.mark.parametrize(
    ("fail_to_pass", "pass_to_pass"),
    [("PASSED", "PASSED"), ("XFAIL", "XFAIL"), ("PASSED", "SKIPPED")],
)
def test_an_expected_failure_passes_and_what_is_skipped_is_not_broken(fail_to_pass: str, pass_to_pass: str) -> None:
    found = record(FAIL_TO_PASS=["new"], PASS_TO_PASS=["old"])
    assert met(found, {"new": fail_to_pass, "old": pass_to_pass}) == {"new", "old"}
    for bad in ("FAILED", "ERROR", "SKIPPED"):
        assert met(found, {"new": bad, "old": pass_to_pass}) == {"old"}


def test_a_name_that_was_cut_is_that_of_all_tests_that_begin_with_it() -> None:
    found = outcomes("pytest", "PASSED a.py::test_p[x y]\nXFAIL a.py::test_p[x z]\nFAILED a.py::test_q[x] - assert 0\n")
    names = ("a.py::test_p[x", "a.py::test_q[x", "a.py::test_", "a.py::test_r[")
    assert [status_of(name, found) for name in names] == ["PASSED", "FAILED", None, None]
    assert status_of("a.py::t[", {"a.py::t[a": "PASSED", "a.py::t[b": "FAILED"}) is None, "they do not agree"


def test_r2e_names_tests_without_their_files() -> None:
    text = """\
========= short test summary info =========
SKIPPED [1] r2e_tests/test_1.py:3: not here
XFAIL r2e_tests/test_1.py::test_later
PASSED r2e_tests/test_1.py::TestA::test_one
PASSED r2e_tests/test_1.py::test_two[a - b]
FAILED r2e_tests/test_1.py::test_three - assert 1 == 2
PASSED r2e_tests/test_1.py::test_four
FAILED r2e_tests/test_2.py::test_four - assert 1 == 2
"""
    assert outcomes("r2e", text) == {
        "TestA.test_one": "PASSED",
        "test_two[a": "PASSED",
        "test_three": "FAILED",
        "test_four": "FAILED",
    }
