from __future__ import annotations

from examples.swe.outcomes import outcomes

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
        "tests/test_a.py::test_one": True,
        "tests/test_a.py::test_two[a - b]": True,
        "tests/test_a.py::test_later": False,
        "tests/test_a.py::test_three": False,
        "tests/test_a.py::test_four": False,
        "tests/test_a.py::test_five": False,
    }


def test_the_lines_of_unittest() -> None:
    assert outcomes("unittest", UNITTEST) == {
        "test_plain (utils_tests.test_html.TestUtilsHtml)": True,
        "test_new_form (utils_tests.test_html.TestUtilsHtml.test_new_form)": False,
        "test_said (utils_tests.test_html.TestUtilsHtml.test_said)": True,
        "test_noise (a.B.test_noise)": False,
        "test_error (a.B.test_error)": False,
        "test_known (a.B.test_known)": True,
        "test_unexpected (a.B.test_unexpected)": False,
    }


def test_colours_and_carriage_returns_do_not_matter() -> None:
    assert outcomes("pytest", "\x1b[32mPASSED\x1b[0m a.py::\x1b[1mtest\x1b[0m\r\n") == {"a.py::test": True}
    assert outcomes("unittest", "no test at all\n") == {}


def test_r2e_names_tests_without_their_files() -> None:
    text = """\
PASSED r2e_tests/test_1.py::TestA::test_one
PASSED r2e_tests/test_1.py::test_two[a - b]
FAILED r2e_tests/test_1.py::test_three - assert 1 == 2
PASSED r2e_tests/test_1.py::test_four
FAILED r2e_tests/test_2.py::test_four - assert 1 == 2
"""
    assert outcomes("r2e", text) == {
        "TestA.test_one": True,
        "test_two[a": True,
        "test_three": False,
        "test_four": False,
    }
