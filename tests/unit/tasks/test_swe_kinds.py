"""Rows as datasets have them, and what is read of each."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentenv.errors import ConfigError
from agentenv.tasks.swe.fresh_root import IN_TESTBED, SMITH, command_for
from agentenv.tasks.swe.kinds import R2E_COMMAND, normalised
from agentenv.tasks.swe.records import SweRecord, read_record

FIX = "diff --git a/a.py b/a.py\n--- a/a.py\n+++ b/a.py\n@@ -1,2 +1,2 @@\n-a\n+b\n c\n"
TESTS = FIX.replace("a.py", "tests/test_a.py")
COMMIT = "0123456789abcdef0123456789abcdef01234567"
SWE_BENCH = {
    "instance_id": "acme__a-1",
    "repo": "acme/a",
    "base_commit": COMMIT,
    "problem_statement": "a is b",
    "patch": FIX,
    "test_patch": TESTS,
    "FAIL_TO_PASS": '["tests/test_a.py::test_b"]',
    "PASS_TO_PASS": '["tests/test_a.py::test_a"]',
}
SWE_SMITH = {
    "instance_id": "acme__a.01234567.lm_rewrite__x1",
    "repo": "swesmith/acme__a.01234567",
    "problem_statement": "a is b",
    "patch": FIX,
    "FAIL_TO_PASS": ["tests/test_a.py::test_b"],
    "PASS_TO_PASS": ["tests/more/test_c.py::test_c"],
    "image_name": "registry.example/swesmith.x86_64.acme_1776_a.01234567",
}
SWE_REBENCH = {
    **SWE_BENCH,
    "docker_image": "registry.example/sweb.eval.x86_64.acme_1776_a-1",
    "install_config": {"test_cmd": "pytest --no-header -rA", "log_parser": "parse_log_pytest", "python": "3.9"},
}


def lines(*pairs: tuple[str, str]) -> dict[str, Any]:
    return {"all_lines": [{"type": kind, "content": text} for kind, text in pairs]}


def change(path: str, **more: Any) -> dict[str, Any]:
    ranges = {"old_range": {"start": 1, "length": 2}, "new_range": {"start": 1, "length": 2}, "section": ""}
    hunk = {"descriptor": ranges, "line_group": lines(("deleted", "a"), ("added", "b"), ("context", "c"))}
    return {"header": {"file": {"path": path}}, "hunks": [hunk], "is_binary_file": False, **more}


def r2e(*changes: dict[str, Any], **more: Any) -> dict[str, Any]:
    expected = {"test_b[x]": "PASSED", "TestA.test_a - why": "PASSED", "test_known": "FAILED"}
    return {
        "repo_name": "a",
        "docker_image": "registry.example/a_final:0123",
        "commit_hash": COMMIT,
        "parsed_commit_content": json.dumps({"file_diffs": changes or [change("a.py"), change("tests/test_a.py")]}),
        "expected_output_json": json.dumps(expected),
        "problem_statement": "a is b",
        "prompt": "not used",
        **more,
    }


def read(row: dict[str, Any]) -> SweRecord:
    return read_record(normalised(row))


def test_an_image_is_named_by_any_of_three_fields() -> None:
    for name in ("image", "image_name", "docker_image"):
        assert read({**SWE_BENCH, name: "registry.example/a:1"}).image == "registry.example/a:1"
    assert normalised({**SWE_BENCH, "image": None})["image"] == ""
    assert normalised({"unknown": 1}) == {"unknown": 1}


def test_the_patch_of_swe_smith_is_the_bug_and_its_tests_are_in_the_repository() -> None:
    found = read(SWE_SMITH)
    assert (found.patch_is, found.base_commit, found.test_patch, found.image) == (
        "bug",
        "",
        "",
        SWE_SMITH["image_name"],
    )
    command = SMITH.format(files="tests/more/test_c.py tests/test_a.py")
    assert command_for(found) == (f"{IN_TESTBED}\n{command}", "smith-pytest")


def test_a_record_without_an_image_needs_its_commit() -> None:
    with pytest.raises(ConfigError, match=r"base_commit: record 1 .*is missing"):
        read_record({**SWE_SMITH, "image_name": None})


def test_r2e_has_its_tests_in_the_image_and_its_solution_as_parsed_hunks() -> None:
    found = read(r2e())
    assert (found.instance_id, found.repo, found.image) == (f"a-{COMMIT}", "R2E-Gym/a", "registry.example/a_final:0123")
    assert (found.patch, found.base_commit) == (FIX, "")
    assert (found.fail_to_pass, found.pass_to_pass) == (("TestA.test_a", "test_b[x]"), ("test_known",))
    assert (found.grading, found.expected) == ("exact", {"test_known": "FAILED"})
    assert command_for(found) == (R2E_COMMAND, "r2e")
    assert {"/r2e_tests", "/testbed/run_tests.sh"} <= set(found.hidden)


def test_a_new_file_a_missing_end_of_line_and_binaries_of_a_parsed_commit() -> None:
    one = {"start": 0, "length": 0}
    hunk = {
        "descriptor": {"old_range": one, "new_range": {"start": 1, "length": None}},
        "line_group": lines(("added", "b"), ("note", "No newline at end of file")),
    }
    sides = {"minus_file": {"path": "/dev/null"}, "plus_file": {"path": "b/new.py"}}
    added = change("new.py", hunks=[hunk], **sides)
    found = read(r2e(added, change("a.png", is_binary_file=True), change("moved.py", hunks=[])))
    assert found.patch == (
        "diff --git a/new.py b/new.py\nnew file mode 100644\n--- /dev/null\n+++ b/new.py\n@@ -0,0 +1,1 @@\n+b\n"
        "\\ No newline at end of file\n"
    )


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("pytest --no-header -rA", "pytest --no-header -rA tests/test_a.py"),
        (["make", "pytest -rA tests"], "make\npytest -rA tests"),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_swe_rebench_says_how_its_tests_are_run(command: Any, said: str, *, packed: bool) -> None:
    config = {"test_cmd": command, "log_parser": "parse_log_pytest"}
    found = read({**SWE_REBENCH, "install_config": json.dumps(config) if packed else config})
    assert command_for(found) == (f"{IN_TESTBED}\n{said}", "swebench-pytest")
    assert found.image == SWE_REBENCH["docker_image"]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (r2e(expected_output_json="{"), "R2E-Gym"),
        (r2e(parsed_commit_content="{}"), "R2E-Gym.*file_diffs"),
        (
            {**SWE_REBENCH, "install_config": {"test_cmd": "npm test", "log_parser": "parse_log_next"}},
            "install_config.log_parser is 'parse_log_next', which is not read here; supported: parse_log_ant",
        ),
        ({**SWE_REBENCH, "install_config": {}}, "SWE-rebench.*test_cmd"),
        ({**SWE_REBENCH, "install_config": "pytest"}, "SWE-rebench"),
    ],
)
def test_a_row_that_is_malformed_is_named(row: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=f"record (acme__a-1|{COMMIT}).*{said}"):
        read(row)
