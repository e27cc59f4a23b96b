"""Rows of datasets with images, each kind turned into the fields of SWE-bench that ``records.py`` reads.

A kind is known by the fields that its rows have and lack. What a dataset leaves to its own harness (where the tests
are, how they are run, which patch solves it) is decided by fields here; docs/swe.md lists them.
"""

from __future__ import annotations

import ast
import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from agentenv.errors import ConfigError
from agentenv.tasks.swe import language_logs
from agentenv.tasks.swe.fresh_root import IN_TESTBED
from agentenv.tasks.swe.outcomes import EXIT_CODE, TESTS_END
from agentenv.tasks.swe.records import TestLog
from agentenv.tasks.swe.scoring import controls_tests
from agentenv.tasks.swe.swebench_logs import READERS

Row = Mapping[str, Any]

R2E_TESTS: Final = ("/r2e_tests", "/root/r2e_tests", "/testbed/r2e_tests")
R2E_SCRIPTS: Final = ("/testbed/run_tests.sh", "/root/run_tests.sh", "/run_tests.sh")
R2E_COMMAND: Final = f"""\
for tests in {" ".join(R2E_TESTS)}; do [ -e r2e_tests ] || [ ! -d $tests ] || ln -s $tests r2e_tests; done
for script in {" ".join(R2E_SCRIPTS)}; do [ ! -f $script ] || break; done
PATH=/testbed/.venv/bin:/root/.local/bin:$PATH bash $script"""
"""As R2E-Gym's own harness runs an image's tests; they expect to find themselves below the repository."""
_SAME_AS: Final[Mapping[TestLog, str]] = {
    "swebench-pytest": "astroid flask marshmallow pvlib pyvista sqlfluff xarray",
    "swebench-pytest-options": "pydicom requests pylint",
    "swebench-pytest-v2": "astropy scikit sphinx",
    "swebench-rspec": "rspec_transformed_json",
    "swebench-micropython": "micropython_test",
    "swebench-gradle": "gradle_custom",
    "swebench-carbon": "react_pdf",
}
PARSERS: Final[Mapping[str, TestLog]] = {
    **{
        f"parse_log_{log.removeprefix('swebench-').replace('-', '_')}": log
        for log in (*READERS, *language_logs.READERS)
    },
    **{f"parse_log_{name}": log for log, names in _SAME_AS.items() for name in names.split()},
}
"""What SWE-bench calls how a row's tests are read, and what reads them here."""
_BY_NUMBER: Final[Mapping[str, Mapping[str, TestLog]]] = {
    "parse_log_jekyll": {
        **dict.fromkeys(("9141", "8047", "8167"), "swebench-minitest"),
        **dict.fromkeys(("8761", "8771"), "swebench-cucumber"),
    },
    "parse_log_immutable_js": {"2006": "swebench-jest", "2005": "swebench-jest-json"},
}
"""Two repositories' tests have two runners: by the number in a record's instance_id."""
EVAL_SCRIPT: Final = "/eval.sh"
PRO: Final = "/workspace"
"""Where the programs of SWE-bench Pro expect themselves."""
_PRO_COMMAND: Final = """\
{{ {before}
}} > {there}/before.log 2>&1
bash {there}/run_script.sh {files} > {there}/stdout.log 2> {there}/stderr.log
python3 {there}/parser.py {there}/stdout.log {there}/stderr.log {there}/output.json > {there}/parser.log 2>&1
cat {there}/output.json"""
NEED_IMAGES: Final = ("eval_script", "test_cmds", "rebuild_cmds", "install_config", "before_repo_set_cmd")
"""Fields with a dataset's own commands, which run in its images."""
_SIGNS: Final = {"context": " ", "added": "+", "deleted": "-"}


@dataclass(frozen=True)
class Options:
    """What a dataset's harness has beside the rows."""

    run_scripts: Path | None = None
    """Directory ``run_scripts`` of SWE-bench Pro's repository."""


@dataclass(frozen=True)
class Kind:
    """A kind of rows."""

    name: str
    has: frozenset[str]
    lacks: frozenset[str]
    read: Callable[[Row, Options], dict[str, Any]]
    """The fields that are added to a row, or replace its own. Raises ValueError, KeyError, TypeError."""

    def knows(self, row: Row) -> bool:
        """Whether a row is of this kind."""
        return all(row.get(name) is not None for name in self.has) and all(row.get(name) is None for name in self.lacks)


def normalised(row: Row, options: Options = Options()) -> Row:
    """The row with the fields of SWE-bench, and ``image``; one of no known kind as it is. Raises ConfigError when it
    is malformed."""
    kind = next((kind for kind in KINDS if kind.knows(row)), None)
    if kind is None:
        return row
    try:
        return {**row, **kind.read(row, options)}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        name = row.get("instance_id") or row.get("commit_hash")
        reason = str(error) if isinstance(error, UnsupportedError) else repr(error)
        raise ConfigError(f"record {name}", f"cannot be read as one of {kind.name}: {reason}"[:400]) from error


class UnsupportedError(ValueError):
    """What a row needs, and is not supported here: field and reason."""


def _swe_smith(row: Row, _: Options) -> dict[str, Any]:
    """The image has the repository without the bug, or with it: ``patch``. Its tests are in the repository."""
    names = [name for field in ("FAIL_TO_PASS", "PASS_TO_PASS") for name in _listed(row, field)]
    if not row.get("test_command") and (
        odd := [name for name in names if "." not in name.partition("::")[0] or "::" not in name]
    ):
        raise UnsupportedError(
            f"FAIL_TO_PASS, PASS_TO_PASS: {odd[0]!r} is no name of pytest's: only SWE-smith's own profile of a "
            "repository in another language has its command and parser; add test_command and test_log"
        )
    return {"image": row["image_name"], "patch_is": "bug", "test_log": row.get("test_log") or "smith-pytest"}


def _r2e(row: Row, _: Options) -> dict[str, Any]:
    """The image has its tests outside the repository's commits, where a policy would find them. All tests have to
    end as they did with the solution, those that failed too: R2E-Gym compares the two."""
    expected = {name.partition(" - ")[0]: word for name, word in json.loads(row["expected_output_json"]).items()}
    passing = sorted(name for name, word in expected.items() if word == "PASSED")
    commit = json.loads(row["parsed_commit_content"])
    return {
        "instance_id": f"{row['repo_name']}-{row['commit_hash']}",
        "repo": f"R2E-Gym/{row['repo_name']}",
        "image": row["docker_image"],
        "patch": "".join(_diffs(commit)),
        "FAIL_TO_PASS": passing,
        "PASS_TO_PASS": sorted(expected.keys() - set(passing)),
        "grading": "exact",
        "expected": {name: word for name, word in expected.items() if word != "PASSED"},
        "hidden": [*R2E_TESTS, *R2E_SCRIPTS],
        "test_command": R2E_COMMAND,
        "test_log": "r2e",
    }


def _diffs(commit: Row) -> Iterator[str]:
    """The changes of a parsed commit as a unified diff, without those of tests."""
    for change in commit["file_diffs"]:
        path = change["header"]["file"]["path"]
        hunks = change.get("hunks")
        if hunks and not change.get("is_binary_file") and not controls_tests(path):
            before, after = (
                (change.get(side) or {}).get("path") or default
                for side, default in (("minus_file", f"a/{path}"), ("plus_file", f"b/{path}"))
            )
            new = "new file mode 100644\n" if before == "/dev/null" else ""
            yield f"diff --git a/{path} b/{path}\n{new}--- {before}\n+++ {after}\n"
            for hunk in hunks:
                old, now = (_range(hunk["descriptor"][name]) for name in ("old_range", "new_range"))
                yield f"@@ -{old} +{now} @@\n" + "".join(map(_line, hunk["line_group"]["all_lines"]))


def _range(found: Row) -> str:
    length = found.get("length")
    return f"{found['start']},{1 if length is None else length}"


def _line(line: Row) -> str:
    return f"\\ {line['content']}\n" if line["type"] == "note" else f"{_SIGNS[line['type']]}{line['content']}\n"


def _swe_rebench(row: Row, _: Options) -> dict[str, Any]:
    """The row has its own test command, which gets the files of the test patch, or is a list that is run as it is."""
    config = row["install_config"]
    config = json.loads(config) if isinstance(config, str) else config
    parser = config.get("log_parser")
    log = _log_of(row, parser, "install_config.log_parser") if parser else None
    command = config["test_cmd"]
    lines = f"{command} {{files}}" if isinstance(command, str) else "\n".join(command)
    before = "\n".join(_lines(config, "eval_commands"))
    install = "\n".join(_lines(config, "install"))
    return {
        "image": _image(row),
        "install_command": f"{IN_TESTBED}\n{install}" if install else "",
        "test_command": "\n".join(filter(None, (IN_TESTBED, before, lines))),
        "test_log": "swebench-pytest-v2-cut" if log == "swebench-pytest-v2" else log,
    }


def _swe_bench_live(row: Row, _: Options) -> dict[str, Any]:
    """The row has its commands: those that build, those that test, and those that print what the tests said."""
    parser = str(row.get("log_parser") or row.get("parser") or "").strip()
    if parser.lower() != "pytest":
        what = "is a program" if "\n" in parser else f"is {parser!r}"
        raise UnsupportedError(f"log_parser {what}: only pytest's is read here; set test_log, and remove log_parser")
    test, prints = (" ; ".join(_lines(row, name)) for name in ("test_cmds", "print_cmds"))
    rebuild = " ; ".join(_lines(row, "rebuild_cmds"))
    return {
        "image": _image(row) or f"starryzhang/sweb.eval.x86_64.{_image_id(row)}",
        "install_command": f"{IN_TESTBED}\n{rebuild}" if rebuild else "",
        "test_command": f"{IN_TESTBED}\n" + (f"{{ {test}\n}} > /dev/null 2>&1\n{prints}" if prints else test),
        "test_log": "swebench-pytest",
        "grading": "live",
    }


def _swe_bench_pro(row: Row, options: Options) -> dict[str, Any]:
    """The row's tests are run and read by two programs of Pro's repository, for each record its own. Its tests come out
    of the image's history."""
    name = row["instance_id"]
    if options.run_scripts is None:
        raise UnsupportedError(
            "run_scripts is not set: that directory of SWE-bench Pro's repository has how its tests are run and read"
        )
    programs = {each: options.run_scripts / name / each for each in ("run_script.sh", "parser.py")}
    if missing := [path for path in programs.values() if not path.is_file()]:
        raise UnsupportedError(f"run_scripts: {missing[0]} is missing")
    parts = (("Requirements", "requirements"), ("New interfaces introduced", "interface"))
    more = "".join(f"\n\n{title}:\n{row[field]}" for title, field in parts if row.get(field))
    tag = row.get("dockerhub_tag")
    command = _PRO_COMMAND.format(
        before=row["before_repo_set_cmd"].strip().split("\n")[-1],
        there=PRO,
        files=shlex.quote(",".join(_listed(row, "selected_test_files_to_run"))),
    )
    return {
        "image": _image(row) or (f"jefzda/sweap-images:{tag}" if tag else ""),
        "workdir": row.get("workdir") or "/app",
        "problem_statement": row["problem_statement"] + more,
        "FAIL_TO_PASS": _listed(row, "FAIL_TO_PASS" if "FAIL_TO_PASS" in row else "fail_to_pass"),
        "PASS_TO_PASS": _listed(row, "PASS_TO_PASS" if "PASS_TO_PASS" in row else "pass_to_pass"),
        "verifier_files": {f"{PRO}/{each}": path.read_bytes().decode() for each, path in programs.items()},
        "test_command": command,
        "test_log": "json",
        "grading": "passed",
        "lays_tests": True,
    }


def _multi_swe_bench(row: Row, _: Options) -> dict[str, Any]:
    raise UnsupportedError(
        f"fix_patch_result: what its tests print is read by a program of Multi-SWE-bench's own for {row.get('org')}/"
        f"{row.get('repo')}; make a record with image, test_command and test_log of it"
    )


def _swe_bench_5(row: Row, _: Options) -> dict[str, Any]:
    """SWE-bench since its version 5, with Multilingual and Multimodal: the row has the script that installs, lays the
    tests and runs them."""
    assets = row.get("image_assets") or {}
    assets = json.loads(assets) if isinstance(assets, str) else assets
    if [each for part in ("test_patch", "patch") for each in assets.get(part) or () if each.get("path")]:
        raise UnsupportedError("image_assets: its tests need pictures that are fetched from the internet")
    kinds = {"pass_and_fail": "swebench", "fail_only": "fail-only"}
    if (kind := row.get("eval_type") or "pass_and_fail") not in kinds:
        raise UnsupportedError(f"eval_type is {kind!r}; supported: {', '.join(kinds)}")
    return {
        "image": _image(row),
        "verifier_files": {EVAL_SCRIPT: _with_exit_code(row["eval_script"])},
        "test_command": f"bash {EVAL_SCRIPT}",
        "test_log": _log_of(row, row["log_parser"], "log_parser"),
        "grading": kinds[kind],
        "lays_tests": True,
    }


def _with_exit_code(script: str) -> str:
    """An eval_script that prints its tests' exit code, which SWE-bench compares with what they printed. Its own is that
    of the command that restores the tests."""
    lines = script.split("\n")
    end = next((number for number, line in enumerate(lines) if TESTS_END in line), None)
    if end is None:
        return script
    return "\n".join(
        [*lines[:end], "agentenv_code=$?", lines[end], f'echo "{EXIT_CODE} $agentenv_code"', *lines[end + 1 :]]
    )


def _swe_bench(row: Row, _: Options) -> dict[str, Any]:
    return {"image": _image(row)}


def _log_of(row: Row, parser: str, field: str) -> TestLog:
    """How a row's tests are read. Raises UnsupportedError."""
    if parser in _BY_NUMBER:
        found = _BY_NUMBER[parser].get(row["instance_id"].rpartition("-")[2])
    else:
        found = PARSERS.get(parser)
    if found is None:
        raise UnsupportedError(
            f"{field} is {parser!r}, which is not read here; supported: {', '.join(sorted(PARSERS))}"
        )
    return found


def _lines(row: Row, field: str) -> Sequence[str]:
    """Commands: a list, one text, or none."""
    value = row.get(field) or []
    return [value] if isinstance(value, str) else list(value)


def _listed(row: Row, field: str) -> list[str]:
    """A list, or one as the text of JSON or of Python, as SWE-bench Pro has."""
    value = row[field]
    if not isinstance(value, str):
        return list(value)
    try:
        return list(json.loads(value))
    except ValueError:
        return list(ast.literal_eval(value))


def _image_id(row: Row) -> str:
    return str(row["instance_id"]).lower().replace("__", "_1776_")


def _image(row: Row) -> Any:
    return next((row[name] for name in ("image", "image_name", "docker_image") if row.get(name)), "")


KINDS: Final = (
    Kind("R2E-Gym", frozenset({"docker_image", "expected_output_json"}), frozenset({"FAIL_TO_PASS"}), _r2e),
    Kind("SWE-bench Pro", frozenset({"before_repo_set_cmd"}), frozenset(), _swe_bench_pro),
    Kind("Multi-SWE-bench", frozenset({"fix_patch"}), frozenset({"patch"}), _multi_swe_bench),
    Kind("SWE-bench with eval_script", frozenset({"eval_script", "log_parser"}), frozenset(), _swe_bench_5),
    Kind("SWE-bench-Live", frozenset({"test_cmds"}), frozenset({"test_command"}), _swe_bench_live),
    Kind("SWE-rebench", frozenset({"install_config"}), frozenset({"test_command"}), _swe_rebench),
    Kind("SWE-smith", frozenset({"image_name"}), frozenset({"base_commit", "test_patch"}), _swe_smith),
    Kind("SWE-bench", frozenset({"patch"}), frozenset(), _swe_bench),
)
"""The first that knows a row reads it."""
