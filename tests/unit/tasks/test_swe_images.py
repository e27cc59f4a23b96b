from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import pytest

from agentenv.errors import ConfigError
from agentenv.tasks.swe.debian import PACKAGES, description
from agentenv.tasks.swe.fresh_root import IN_TESTBED, Tried, check_names, command_for, paths_of_tests
from agentenv.tasks.swe.making import command_of
from agentenv.tasks.swe.records import SweRecord, read_record
from agentenv.tasks.swe.releases import difference

DIFF = "diff --git a/{0} b/{0}\n--- a/{0}\n+++ b/{0}\n@@ -1 +1 @@\n-a\n+b\n"
ROW = {
    "instance_id": "django__django-1",
    "repo": "django/django",
    "base_commit": "0123456789abcdef",
    "problem_statement": "It fails.",
    "patch": DIFF.format("django/a.py"),
    "test_patch": DIFF.format("tests/utils_tests/test_html.py") + DIFF.format("tests/utils_tests/data.txt"),
    "FAIL_TO_PASS": ["test_new (utils_tests.test_html.TestUtilsHtml)"],
    "PASS_TO_PASS": ["test_old (utils_tests.test_html.TestUtilsHtml)"],
    "image": "registry.example/django-1",
}


def record(**changes: Any) -> SweRecord:
    return read_record({**ROW, **changes})


def test_tests_of_a_record_with_an_image_may_have_any_names() -> None:
    found = record()
    assert (found.image, found.workdir) == ("registry.example/django-1", "/testbed")
    assert found.fail_to_pass == ("test_new (utils_tests.test_html.TestUtilsHtml)",)
    with pytest.raises(ConfigError, match="is not a pytest id"):
        record(image=None)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("workdir", "testbed"),
        ("test_log", "tap"),
        ("image", ["a"]),
        ("hidden", ["tests"]),
        ("patch_is", "x"),
    ],
)
def test_a_field_that_is_malformed_is_named(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=field):
        record(**{field: value})


def test_the_command_is_the_records_else_the_repositorys_else_pytest() -> None:
    said = "PYTHONPATH=. python3 tests/runtests.py --verbosity 2 --parallel 1 utils_tests.test_html"
    assert command_for(record()) == (f"{IN_TESTBED}\n{said}", "swebench-django")
    said = "python3 -m pytest -rA -p no:cacheprovider tests/utils_tests/test_html.py"
    assert command_for(record(repo="a/b")) == (f"{IN_TESTBED}\n{said}", "pytest")
    assert command_for(record(test_command="make check", test_log="unittest")) == ("make check", "unittest")
    assert paths_of_tests(record()) == ("tests/utils_tests/test_html.py", "tests/utils_tests/data.txt")


@pytest.mark.parametrize(
    ("repo", "name", "log"),
    [
        ("sympy/sympy", "test_bare", "swebench-sympy"),
        ("sympy/sympy", "sympy/tests/test_a.py::test_a", "pytest"),
        ("pytest-dev/pytest", "[100%]", "swebench-pytest"),
        ("a/b", "a.py::test_p[png-w/", "swebench-pytest"),
        ("a/b", "a.py::test_p[x y]", "pytest"),
        ("psf/requests", "a.py::test_p[x", "swebench-pytest-options"),
        ("psf/requests", "a.py::test_p[x]", "swebench-pytest-options"),
        ("psf/requests", "a.py::test_p[x y]", "pytest"),
        ("astropy/astropy", "a.py::test_p[x y]", "swebench-pytest-v2"),
        ("django/django", "Docs of it.", "swebench-django"),
    ],
)
def test_tests_are_read_by_the_names_that_they_have(repo: str, name: str, log: str) -> None:
    found = record(repo=repo, FAIL_TO_PASS=[name], PASS_TO_PASS=[])
    assert command_for(found)[1] == log
    assert ("bin/test" in command_for(found)[0]) == (log == "swebench-sympy")
    check_names(found)


@pytest.mark.parametrize(
    "changes",
    [
        {"repo": "a/b", "PASS_TO_PASS": ["test_bare"]},
        {"repo": "a/b", "PASS_TO_PASS": ["Docs of it."]},
        {"repo": "sympy/sympy", "PASS_TO_PASS": ["test_bare", "sympy/a.py::test_a"]},
        {"repo": "psf/requests", "PASS_TO_PASS": ["test_bare"]},
        {"test_log": "swebench-pytest-options", "PASS_TO_PASS": ["a.py::test_a[/usr/bin]"]},
        {"repo": "a/b", "test_command": "make", "test_log": "unittest", "PASS_TO_PASS": ["Docs of it."]},
        {"repo": "a/b", "PASS_TO_PASS": ["a.py::test_a\nb"]},
        {"PASS_TO_PASS": [""]},
        {"FAIL_TO_PASS": ["two\nlines"]},
    ],
)
def test_a_record_that_cannot_score_1_is_refused_by_the_name_of_its_test(changes: dict[str, Any]) -> None:
    solved = ["test_new (m.C)" if changes.get("test_log") == "unittest" else "a.py::test_a"]
    with pytest.raises(ConfigError, match=r"(PASS|FAIL)_TO_.*record django__django-1: output of .* never names a test"):
        check_names(record(**{"FAIL_TO_PASS": solved, **changes}))


def test_all_tests_have_to_pass() -> None:
    found = record(FAIL_TO_PASS=["a", "b"], PASS_TO_PASS=["c"])
    outcomes = [Tried(frozenset(passed)) for passed in ("abc", "ac", "ab", "c")]
    assert [(one.score(found), one.score(found, share=True)) for one in outcomes] == [(1, 1), (0, 0.5), (0, 0), (0, 0)]
    assert Tried(None, "why").score(found) == 0
    told = Tried(frozenset("ac"), changed=("x",), output="said").details(found)
    assert told == {"FAIL_TO_PASS": "1 of 2 pass", "still failing": ["b"], "changed": ["x"], "output": "said"}


def test_a_patch_of_debian_is_described_by_its_own_words() -> None:
    text = (
        "From 77f4 Mon Sep 17 00:00:00 2001\nFrom: A <a@b>\nDate: today\nSubject: keys with spaces\n"
        "Origin: upstream\n\nThey end the tag.\n---\n a | 2 +-\n\ndiff --git a/a b/a\n--- a/a\n+++ b/a\n"
    )
    assert description(text, "x.patch") == "keys with spaces\n\nThey end the tag."
    assert description("--- a/a\n+++ b/a\n", "x.patch") == "The repair that Debian calls x.patch."


def test_only_the_files_with_tests_are_run() -> None:
    django, jinja = PACKAGES["python-django"], PACKAGES["jinja2"]
    assert command_of(django.command, ["tests/ordering/tests.py", "tests/ordering/models.py"]).endswith(
        " ordering.tests"
    )
    assert command_of(jinja.command, ["tests/test_a.py", "tests/res/a.html"]).endswith(" tests/test_a.py")


def release(directory: Path, version: str, **files: str) -> Path:
    made = directory / f"sympy-{version}.tar.gz"
    with tarfile.open(made, "w:gz") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(f"sympy-{version}/{name}")
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text.encode()))
    return made


def test_a_release_repairs_what_differs_below_a_directory(tmp_path: Path) -> None:
    before = release(
        tmp_path, "1.0", **{"a/x.py": "one\ntwo\n", "a/same.py": "s\n", "b/y.py": "y\n", "a/gone.py": "g\n"}
    )
    after = release(tmp_path, "1.1", **{"a/x.py": "one\n2\n", "a/same.py": "s\n", "b/y.py": "Y\n", "a/z.txt": "z\n"})
    assert difference(before, after, "a") == "--- a/a/x.py\n+++ b/a/x.py\n@@ -1,2 +1,2 @@\n one\n-two\n+2\n"
