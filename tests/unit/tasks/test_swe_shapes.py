"""Rows that have how their tests are run: what is read of them, what is refused, and what counts as resolved."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentenv.errors import ConfigError
from agentenv.tasks.swe.fresh_root import IN_TESTBED, Tried, check_names, command_for
from agentenv.tasks.swe.kinds import EVAL_SCRIPT, Options, normalised
from agentenv.tasks.swe.outcomes import met, read
from agentenv.tasks.swe.records import SweRecord, read_record, read_records
from tests.unit.tasks.test_swe_images import record
from tests.unit.tasks.test_swe_kinds import SWE_BENCH, SWE_REBENCH, SWE_SMITH

SCRIPT = (
    "#!/bin/bash\nset -uxo pipefail\n: '>>>>> Start Test Output'\ngo test\n: '>>>>> End Test Output'\ngit checkout a\n"
)
WITH_SCRIPT = {
    **SWE_BENCH,
    "image": "registry.example/a-1",
    "eval_script": SCRIPT,
    "eval_type": "pass_and_fail",
    "log_parser": "parse_log_gotest",
    "FAIL_TO_PASS": ["TestAdd"],
    "PASS_TO_PASS": ["TestOld"],
}
LIVE = {
    **SWE_BENCH,
    "rebuild_cmds": ["make", "make install"],
    "test_cmds": ["pytest -rA tests"],
    "print_cmds": [],
    "log_parser": "pytest",
}
PRO = {
    **{name: value for name, value in SWE_BENCH.items() if name not in ("FAIL_TO_PASS", "PASS_TO_PASS")},
    "instance_id": "instance_acme__a-1",
    "fail_to_pass": "['a | it\\'s new']",
    "pass_to_pass": '["a | old"]',
    "before_repo_set_cmd": "git reset --hard\ngit checkout abc -- tests/a.ts",
    "selected_test_files_to_run": "['tests/a.ts', 'tests/b c.ts']",
    "dockerhub_tag": "acme.a-1",
    "requirements": "- be fast",
}


def reading(row: dict[str, Any], **options: Any) -> SweRecord:
    found = read_record(normalised(row, Options(**options)))
    check_names(found)
    return found


def test_a_script_of_swe_bench_installs_lays_and_runs_the_tests_and_says_how_they_ended() -> None:
    found = reading(WITH_SCRIPT)
    assert (command_for(found), found.lays_tests) == ((f"bash {EVAL_SCRIPT}", "swebench-gotest"), True)
    assert found.verifier_files[EVAL_SCRIPT].split("\n")[3:8] == [
        "go test",
        "agentenv_code=$?",
        ": '>>>>> End Test Output'",
        'echo ">>>>> Test Exit Code: $agentenv_code"',
        "git checkout a",
    ]
    assert reading({**WITH_SCRIPT, "eval_type": "fail_only", "log_parser": "parse_log_marked"}).grading == "fail-only"


@pytest.mark.parametrize(
    ("printed", "score"),
    [
        ("--- PASS: TestAdd (0.1s)\n--- SKIP: TestOld (0s)\n", 1),
        ("--- PASS: TestAdd (0.1s)\n--- FAIL: TestOld (0s)\n", 0),
        ("--- SKIP: TestAdd (0.1s)\n--- PASS: TestOld (0s)\n", 0),
        ("--- PASS: TestAdd (0.1s)\n", 0),
        ("", 0),
    ],
)
def test_a_run_counts_by_what_it_printed_between_the_marks(printed: str, score: int) -> None:
    found = reading(WITH_SCRIPT)
    before = "--- FAIL: TestAdd (0s)\n+ : '>>>>> Start Test Output'\n"
    output = f"{before}{printed}+ : '>>>>> End Test Output'\n>>>>> Test Exit Code: 0\n"
    statuses = read(found, "swebench-gotest", output)
    assert Tried(None if statuses is None else met(found, statuses)).score(found) == score


def test_a_run_without_its_marks_or_with_another_exit_code_than_it_says_is_none() -> None:
    found = reading(WITH_SCRIPT)
    good = "--- PASS: TestAdd (0.1s)\n--- PASS: TestOld (0s)\n"
    assert read(found, "swebench-gotest", good) is None, "the script was not played to its end"
    marked = f": '>>>>> Start Test Output'\n{good}: '>>>>> End Test Output'\n>>>>> Test Exit Code: "
    assert read(found, "swebench-gotest", f"{marked}0\n") == {"TestAdd": "PASSED", "TestOld": "PASSED"}
    assert read(found, "swebench-gotest", f"{marked}1\n") is None, "it ended badly, and names no failure"
    assert read(record(), "pytest", "PASSED a.py::test\n") == {"a.py::test": "PASSED"}
    assert read(record(), "pytest", "no test\n") is None


def test_where_failures_only_are_named_the_runner_must_have_counted_its_tests() -> None:
    found = replace(record(FAIL_TO_PASS=["adds"], PASS_TO_PASS=["draws"]), grading="fail-only")
    for output, score in (
        ("9 specs, 0 failures\n", 1),
        ("0 specs\n", 0),
        ("", 0),
        ("1) adds\n9 specs, 1 failure\n", 0),
    ):
        statuses = read(found, "swebench-marked", output)
        assert Tried(None if statuses is None else met(found, statuses)).score(found) == score, output


def test_live_has_its_own_commands_and_does_not_miss_a_test_that_passed_before() -> None:
    found = reading(LIVE)
    assert found.image == "starryzhang/sweb.eval.x86_64.acme_1776_a-1"
    assert found.install_command == f"{IN_TESTBED}\nmake ; make install"
    assert command_for(found) == (f"{IN_TESTBED}\npytest -rA tests", "swebench-pytest")
    quiet = reading({**LIVE, "print_cmds": ["cat log"], "docker_image": "registry.example/live"})
    assert command_for(quiet)[0].endswith("{ pytest -rA tests\n} > /dev/null 2>&1\ncat log")
    new, old = found.fail_to_pass[0], found.pass_to_pass[0]
    for status, kept in (("PASSED", True), ("SKIPPED", True), ("XFAIL", False), ("FAILED", False), ("ERROR", False)):
        assert met(found, {new: "PASSED", old: status}) == ({new, old} if kept else {new})
    assert met(found, {new: "PASSED"}) == {new, old}
    assert met(found, {new: "XFAIL"}) == {old}


def test_pro_runs_and_reads_its_tests_by_two_programs_of_its_repository(tmp_path: Path) -> None:
    programs = tmp_path / "instance_acme__a-1"
    programs.mkdir()
    (programs / "run_script.sh").write_bytes(b"echo $1\r\n")
    (programs / "parser.py").write_text("pass\n")
    found = reading(PRO, run_scripts=tmp_path)
    assert (found.image, found.workdir, found.grading) == ("jefzda/sweap-images:acme.a-1", "/app", "passed")
    assert (found.fail_to_pass, found.pass_to_pass) == (("a | it's new",), ("a | old",))
    assert found.problem_statement == "a is b\n\nRequirements:\n- be fast"
    command, log = command_for(found)
    assert "git checkout abc -- tests/a.ts\n} > /workspace/before.log 2>&1\n" in command
    assert "\nbash /workspace/run_script.sh 'tests/a.ts,tests/b c.ts' >" in command
    assert found.verifier_files["/workspace/run_script.sh"] == "echo $1\r\n"
    output = json.dumps(
        {"tests": [{"name": "a | it's new", "status": "PASSED"}, {"name": "a | old", "status": "SKIPPED"}]}
    )
    statuses = read(found, log, output)
    assert statuses is not None
    assert met(found, statuses) == {"a | it's new"}
    assert read(found, log, "cat: no such file") is None


def test_the_statuses_of_an_exact_record_are_compared_one_by_one() -> None:
    found = replace(record(FAIL_TO_PASS=["new"], PASS_TO_PASS=["bad"]), grading="exact", expected={"bad": "FAILED"})
    assert met(found, {"new": "PASSED", "bad": "FAILED"}) == {"new", "bad"}
    assert met(found, {"new": "PASSED", "bad": "PASSED"}) == {"new"}
    assert met(found, {"new": "PASSED", "bad": "FAILED", "other": "PASSED"}) == set()


def test_the_commands_of_swe_rebench_and_the_runners_of_two_repositories() -> None:
    config = {
        "test_cmd": "pytest -rA",
        "log_parser": "parse_log_pytest_v2",
        "install": "pip install -e .",
        "eval_commands": ["a"],
    }
    found = reading({**SWE_REBENCH, "install_config": config})
    assert found.install_command == f"{IN_TESTBED}\npip install -e ."
    assert command_for(found) == (f"{IN_TESTBED}\na\npytest -rA tests/test_a.py", "swebench-pytest-v2-cut")
    for number, log in (("9141", "swebench-minitest"), ("8761", "swebench-cucumber")):
        row = {**WITH_SCRIPT, "instance_id": f"jekyll__jekyll-{number}", "log_parser": "parse_log_jekyll"}
        assert reading(row).test_log == log


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (PRO, "SWE-bench Pro: run_scripts is not set"),
        ({**WITH_SCRIPT, "eval_type": "some"}, "eval_type is 'some'; supported: pass_and_fail, fail_only"),
        ({**WITH_SCRIPT, "log_parser": "parse_log_p5js"}, "log_parser is 'parse_log_p5js', which is not read here"),
        ({**WITH_SCRIPT, "log_parser": "parse_log_jekyll"}, "log_parser is 'parse_log_jekyll'"),
        ({**WITH_SCRIPT, "image_assets": '{"test_patch": [{"path": "a.png", "url": "u"}]}'}, "image_assets: "),
        ({**LIVE, "log_parser": "def parse(log):\n    return {}"}, "SWE-bench-Live: log_parser is a program"),
        ({**LIVE, "log_parser": "cargo"}, "SWE-bench-Live: log_parser is 'cargo'"),
        (
            {"org": "acme", "repo": "a", "number": 1, "fix_patch": "x", "instance_id": "acme__a-1"},
            "Multi-SWE-bench: fix_patch_result: .* acme/a",
        ),
        (
            {**SWE_SMITH, "FAIL_TO_PASS": ["tests::adds"]},
            "SWE-smith: FAIL_TO_PASS, PASS_TO_PASS: 'tests::adds' is no name of pytest's",
        ),
        (
            {**SWE_SMITH, "FAIL_TO_PASS": ["TestAdd"]},
            "SWE-smith: FAIL_TO_PASS, PASS_TO_PASS: 'TestAdd' is no name of pytest's",
        ),
    ],
)
def test_what_cannot_be_played_as_it_means_is_refused_by_field_and_reason(row: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=rf"(?s)record \S+: cannot be read as one of .*{said}"):
        reading(row)


@pytest.mark.parametrize("field", ["expected", "verifier_files"])
@pytest.mark.parametrize("value", ["text", {"a": 1}, ["a"]])
def test_tables_of_texts_are_checked(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=field):
        record(**{field: value})
    with pytest.raises(ConfigError, match=r"verifier_files.*absolute"):
        record(verifier_files={"eval.sh": "x"})


def test_refused_records_are_collected_and_the_others_returned() -> None:
    rows = [
        SWE_BENCH,
        {**SWE_BENCH, "instance_id": "acme__a-2", "patch": "no diff"},
        {**SWE_BENCH, "instance_id": "acme__a-3"},
    ]

    def check(record: SweRecord) -> None:
        if record.instance_id == "acme__a-3":
            raise ConfigError("image", "record acme__a-3 names none")

    refused: dict[str, ConfigError] = {}
    assert [found.instance_id for found in read_records(rows, check=check, refused=refused)] == ["acme__a-1"]
    assert list(refused) == ["acme__a-2", "acme__a-3"]
    assert read_records(rows[1:], check=check, refused={}) == ()
    with pytest.raises(ConfigError, match="acme__a-2"):
        read_records(rows)
