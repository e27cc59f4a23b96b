"""Rows of datasets with images, each kind turned into the fields of SWE-bench that ``records.py`` reads.

A kind is known by the fields that its rows have and lack. What a dataset leaves to its own harness (where the tests
are, how they are run, which patch solves it) is decided by fields here; docs/swe.md lists them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from agentenv.errors import ConfigError
from agentenv.tasks.swe.fresh_root import IN_TESTBED
from agentenv.tasks.swe.records import TestLog
from agentenv.tasks.swe.scoring import controls_tests

Row = Mapping[str, Any]

R2E_TESTS: Final = ("/r2e_tests", "/root/r2e_tests", "/testbed/r2e_tests")
R2E_SCRIPTS: Final = ("/testbed/run_tests.sh", "/root/run_tests.sh", "/run_tests.sh")
R2E_COMMAND: Final = f"""\
for tests in {" ".join(R2E_TESTS)}; do [ -e r2e_tests ] || [ ! -d $tests ] || ln -s $tests r2e_tests; done
for script in {" ".join(R2E_SCRIPTS)}; do [ ! -f $script ] || break; done
PATH=/testbed/.venv/bin:/root/.local/bin:$PATH bash $script"""
"""As R2E-Gym's own harness runs an image's tests; they expect to find themselves below the repository."""
PARSERS: Final[Mapping[str, TestLog]] = {
    "parse_log_pytest": "swebench-pytest",
    "parse_log_pytest_options": "swebench-pytest-options",
    "parse_log_pytest_v2": "swebench-pytest-v2",
}
"""What SWE-rebench calls how a row's tests are read, and what reads them here."""
_SIGNS: Final = {"context": " ", "added": "+", "deleted": "-"}


@dataclass(frozen=True)
class Kind:
    """A kind of rows."""

    name: str
    has: frozenset[str]
    lacks: frozenset[str]
    read: Callable[[Row], dict[str, Any]]
    """The fields that are added to a row, or replace its own. Raises ValueError, KeyError, TypeError."""

    def knows(self, row: Row) -> bool:
        """Whether a row is of this kind."""
        return all(row.get(name) is not None for name in self.has) and all(row.get(name) is None for name in self.lacks)


def normalised(row: Row) -> Row:
    """The row with the fields of SWE-bench, and ``image``; one of no known kind as it is. Raises ConfigError when it
    is malformed."""
    kind = next((kind for kind in KINDS if kind.knows(row)), None)
    if kind is None:
        return row
    try:
        return {**row, **kind.read(row)}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        name = row.get("instance_id") or row.get("commit_hash")
        raise ConfigError(f"record {name}", f"cannot be read as one of {kind.name}: {error!r}"[:300]) from error


def _swe_smith(row: Row) -> dict[str, Any]:
    """The image has the repository without the bug, or with it: ``patch``. Its tests are in the repository."""
    return {"image": row["image_name"], "patch_is": "bug"}


def _r2e(row: Row) -> dict[str, Any]:
    """The image has its tests outside the repository's commits, where a policy would find them. All that passed with
    the solution have to pass; those that failed with it do not count."""
    expected = json.loads(row["expected_output_json"])
    commit = json.loads(row["parsed_commit_content"])
    return {
        "instance_id": f"{row['repo_name']}-{row['commit_hash']}",
        "repo": f"R2E-Gym/{row['repo_name']}",
        "image": row["docker_image"],
        "patch": "".join(_diffs(commit)),
        "FAIL_TO_PASS": sorted({name.partition(" - ")[0] for name, word in expected.items() if word == "PASSED"}),
        "PASS_TO_PASS": [],
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


def _swe_rebench(row: Row) -> dict[str, Any]:
    """The row has its own test command, which gets the files of the test patch, or is a list that is run as it is."""
    config = row["install_config"]
    config = json.loads(config) if isinstance(config, str) else config
    parser = config.get("log_parser")
    if parser and parser not in PARSERS:
        raise ValueError(f"the output of its tests needs the parser {parser}; supported: {', '.join(PARSERS)}")
    command = config["test_cmd"]
    lines = f"{command} {{files}}" if isinstance(command, str) else "\n".join(command)
    return {"image": _image(row), "test_command": f"{IN_TESTBED}\n{lines}", "test_log": PARSERS.get(parser)}


def _swe_bench(row: Row) -> dict[str, Any]:
    return {"image": _image(row)}


def _image(row: Row) -> Any:
    return next((row[name] for name in ("image", "image_name", "docker_image") if row.get(name)), "")


KINDS: Final = (
    Kind("R2E-Gym", frozenset({"docker_image", "expected_output_json"}), frozenset({"FAIL_TO_PASS"}), _r2e),
    Kind("SWE-rebench", frozenset({"install_config"}), frozenset({"test_command"}), _swe_rebench),
    Kind("SWE-smith", frozenset({"image_name"}), frozenset({"base_commit", "test_patch"}), _swe_smith),
    Kind("SWE-bench", frozenset({"patch"}), frozenset(), _swe_bench),
)
"""The first that knows a row reads it."""
