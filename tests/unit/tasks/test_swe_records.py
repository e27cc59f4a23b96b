"""What a dataset's row must hold, and which rows are wanted."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentenv.errors import ConfigError
from agentenv.tasks.swe.records import Wanted, read_record, read_records

DIFF = "diff --git a/a.py b/a.py\n--- a/a.py\n+++ b/a.py\n@@ -1 +1 @@\n-a\n+b\n"


def row(number: int = 1, **changed: Any) -> dict[str, Any]:
    return {
        "instance_id": f"acme__a-{number}",
        "repo": "acme/a",
        "base_commit": "0123456789abcdef0123456789abcdef01234567",
        "problem_statement": "a is b",
        "patch": DIFF,
        "test_patch": DIFF,
        "FAIL_TO_PASS": ["tests/test_a.py::test_b"],
        "PASS_TO_PASS": ["tests/test_a.py::test_a[x - y]", "tests/more_test.py::A::test_c"],
        "version": "1.0",
        "environment_setup_commit": "0123456",
        **changed,
    }


def test_lists_and_lists_as_text_are_the_same() -> None:
    plain = row()
    text = {**plain, **{name: json.dumps(plain[name]) for name in ("FAIL_TO_PASS", "PASS_TO_PASS")}}
    assert read_record(plain) == read_record(text)
    assert read_record(plain).test_files == ("tests/more_test.py", "tests/test_a.py")


def test_what_is_optional_may_be_missing_or_a_number() -> None:
    short = row(version=3.1)
    del short["environment_setup_commit"]
    found = read_record(short)
    assert (found.version, found.environment_setup_commit) == ("3.1", "")
    assert read_record(row(version=None)).version == ""


def test_a_patch_gets_the_end_of_line_git_asks_for() -> None:
    assert read_record(row(patch=DIFF.rstrip("\n"))).patch == DIFF


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("repo", "a", "owner/name"),
        ("repo", "../etc", "owner/name"),
        ("repo", "acme/..", "owner/name"),
        ("repo", None, "text"),
        ("base_commit", "main", "hex"),
        ("base_commit", "--help", "hex"),
        ("problem_statement", "  ", "not empty"),
        ("problem_statement", 7, "text"),
        ("patch", "please change a", "a unified diff"),
        ("test_patch", "please change a", "a unified diff"),
        ("FAIL_TO_PASS", [], "no test"),
        ("FAIL_TO_PASS", "tests/test_a.py::test_b", "not JSON"),
        ("FAIL_TO_PASS", '{"a": 1}', "a list"),
        ("FAIL_TO_PASS", [1], "a list"),
        ("FAIL_TO_PASS", ["test_b (tests.test_a.A)"], "not a pytest id"),
        ("FAIL_TO_PASS", ["/etc/a.py::test_b"], "not a pytest id"),
        ("FAIL_TO_PASS", ["a/../../a.py::test_b"], "not a pytest id"),
        ("FAIL_TO_PASS", ["--pyargs.py::test_b"], "not a pytest id"),
        ("FAIL_TO_PASS", ["tests/a\n.py::test_b"], "not a pytest id"),
        ("FAIL_TO_PASS", ["tests/a.py::test_b[png-w/"], "not a pytest id"),
        ("PASS_TO_PASS", None, "a list"),
        ("PASS_TO_PASS", ["tests/test_a.py::test_b"], "also in FAIL_TO_PASS"),
        ("version", ["1"], "text"),
    ],
)
def test_what_is_wrong_is_named_by_record_and_field(field: str, value: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_records([row(1), row(2, **{field: value})])
    assert caught.value.field == field
    assert "record 2 (acme__a-2)" in str(caught.value)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "field",
    ["repo", "base_commit", "problem_statement", "patch", "FAIL_TO_PASS", "PASS_TO_PASS"],
)
def test_what_is_missing_is_named(field: str) -> None:
    short = row()
    del short[field]
    with pytest.raises(ConfigError, match=rf"{field}: record 1 \(acme__a-1\): is missing"):
        read_records([short])


@pytest.mark.parametrize("nothing", [{}, {"test_patch": None}, {"test_patch": ""}])
def test_without_a_test_patch_the_tests_are_in_the_repository(nothing: dict[str, Any]) -> None:
    plain = row()
    del plain["test_patch"]
    assert read_record({**plain, **nothing}).test_patch == ""
    assert read_record({**plain, **nothing}, patch_is="bug").patch_is == "bug"


def test_a_record_without_a_base_commit_says_how_to_find_it() -> None:
    with pytest.raises(ConfigError, match="git rev-parse acme__a-1~1"):
        read_record(row(base_commit=None))


@pytest.mark.parametrize("name", [None, "", "a/b", "a\nb", "x" * 300])
def test_a_record_without_a_usable_name_is_known_by_its_number(name: Any) -> None:
    with pytest.raises(ConfigError, match="instance_id: record 2") as caught:
        read_records([row(), row(instance_id=name)])
    assert "\n" not in str(caught.value)


def test_a_name_is_there_once() -> None:
    with pytest.raises(ConfigError, match=r"record 3 .*appears twice"):
        read_records([row(1), row(2), row(1)])


def test_filters() -> None:
    rows = [row(1), row(2, repo="acme/b"), row(3, version="2.0"), row(4)]

    def left(wanted: Wanted) -> list[str]:
        return [record.instance_id[-1] for record in read_records(rows, wanted)]

    assert left(Wanted()) == ["1", "2", "3", "4"]
    assert left(Wanted(repos=("acme/a",))) == ["1", "3", "4"]
    assert left(Wanted(repos=("acme/a",), versions=("1.0",))) == ["1", "4"]
    assert left(Wanted(instances=("acme__a-4", "acme__a-2"))) == ["2", "4"]
    assert left(Wanted(limit=2)) == ["1", "2"]


def test_what_is_filtered_out_may_be_malformed() -> None:
    rows = [row(1), row(2, repo="django/django", FAIL_TO_PASS=["test_b (a.A)"])]
    assert len(read_records(rows, Wanted(repos=("acme/a",)))) == 1


def test_records_of_other_test_runners_are_left_out_when_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    rows = [row(1), row(2, FAIL_TO_PASS=["test_b (a.A)"]), row(3, PASS_TO_PASS='["src/a.test.ts > a"]')]
    assert [record.instance_id for record in read_records(rows, Wanted(python_only=True))] == ["acme__a-1"]
    assert "2 records are left out" in caplog.text
    broken = row(4)
    del broken["PASS_TO_PASS"]
    with pytest.raises(ConfigError, match=r"PASS_TO_PASS: record 4 .*is missing"):
        read_records([*rows, broken], Wanted(python_only=True))


def test_a_filter_that_leaves_nothing_says_what_there_is() -> None:
    with pytest.raises(ConfigError, match="acme/a"):
        read_records([row()], Wanted(repos=("acme/other",)))
    with pytest.raises(ConfigError, match="'acme__a-9' is not in the dataset"):
        read_records([row()], Wanted(instances=("acme__a-1", "acme__a-9")))
