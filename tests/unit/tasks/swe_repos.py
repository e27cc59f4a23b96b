"""Three small repositories with an issue each, made with git; records as a dataset has them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Files = Mapping[str, str | None]
"""Contents by path; None: removed."""

SLUGS = """\
def slug(text):
    return text.lower().replace(" ", "-")
"""
SLUG_TESTS = """\
from slugs import slug


def test_lower():
    assert slug("Ab") == "ab"


def test_space():
    assert slug("a b") == "a-b"
"""
SPANS = """\
from spans.bounds import low, high


def overlap(one, other):
    return low(one) < high(other)
"""
BOUNDS = "def low(span):\n    return min(span)\n\n\ndef high(span):\n    return max(span)\n"
SPAN_CONFTEST = "import pytest\n\n\n@pytest.fixture\ndef unit():\n    return (0, 1)\n"
SPAN_TESTS = """\
from spans import overlap


def test_same(unit):
    assert overlap(unit, unit)
"""
TALLY = """\
class Tally:
    def __init__(self):
        self.counts = {}

    def add(self, name):
        self.counts[name] = 1
"""
TALLY_TESTS = """\
import unittest

from tally.tally import Tally


class TallyTest(unittest.TestCase):
    def test_one(self):
        tally = Tally()
        tally.add("a")
        self.assertEqual(tally.counts, {"a": 1})

    @unittest.expectedFailure
    def test_none(self):
        self.assertEqual(Tally().counts, {"a": 0})
"""


def git(directory: Path, *arguments: str) -> str:
    names = ["-c", "user.name=Test", "-c", "user.email=test@localhost", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(directory), *names, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def write(directory: Path, files: Files) -> None:
    for path, content in files.items():
        target = directory / path
        if content is None:
            target.unlink()
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(content)


def record(repositories: Path, repo: str, base: Files, gold: Files, tests: Files, **fields: Any) -> dict[str, Any]:
    """Make a repository whose history goes on after the base commit, and the record of it."""
    directory = repositories / repo
    directory.mkdir(parents=True)
    git(directory, "init", "--quiet", "--initial-branch=main")
    commits = []
    for files, message in ((base, "base"), (gold, "THE SOLUTION"), (tests, "its tests")):
        write(directory, files)
        git(directory, "add", "--all")
        git(directory, "commit", "--quiet", "--message", message)
        commits.append(git(directory, "rev-parse", "HEAD").strip())
    return {
        "instance_id": f"{repo.replace('/', '__')}-1",
        "repo": repo,
        "base_commit": commits[0],
        "patch": git(directory, "diff", commits[0], commits[1]),
        "test_patch": git(directory, "diff", commits[1], commits[2]),
        "version": "1.0",
        "environment_setup_commit": commits[0],
        "hints_text": "",
        "created_at": "2024-01-01T00:00:00Z",
        **fields,
    }


def slugs(repositories: Path) -> dict[str, Any]:
    """A module beside its tests; the test patch changes a test file. Lists are JSON text, as in SWE-bench."""
    more = SLUG_TESTS + '\n\ndef test_spaces():\n    assert slug("a  b ") == "a-b"\n'
    more += '\n\ndef test_blank():\n    assert slug(" ") == ""\n'
    return record(
        repositories,
        "acme/slugs",
        {"slugs.py": SLUGS, "tests/test_slugs.py": SLUG_TESTS, "README.md": "slugs\n", "run.sh": "#!/bin/sh\n"},
        {"slugs.py": SLUGS.replace('text.lower().replace(" ", "-")', '"-".join(text.lower().split())')},
        {"tests/test_slugs.py": more},
        problem_statement="slug() makes two dashes of two spaces.",
        FAIL_TO_PASS=json.dumps(["tests/test_slugs.py::test_spaces", "tests/test_slugs.py::test_blank"]),
        PASS_TO_PASS=json.dumps(["tests/test_slugs.py::test_lower", "tests/test_slugs.py::test_space"]),
    )


def spans(repositories: Path) -> dict[str, Any]:
    """A src layout, with pytest options this runner does not know; the test patch moves a test file."""
    more = SPAN_TESTS + "\n\ndef test_apart(unit):\n    assert not overlap(unit, (2, 3))\n"
    more += "    assert not overlap((2, 3), unit)\n"
    return record(
        repositories,
        "acme/spans",
        {
            "pyproject.toml": '[tool.pytest.ini_options]\naddopts = "--cov=spans"\n',
            "src/spans/__init__.py": SPANS,
            "src/spans/bounds.py": BOUNDS,
            "tests/conftest.py": SPAN_CONFTEST,
            "tests/test_spans.py": SPAN_TESTS,
        },
        {"src/spans/__init__.py": SPANS.replace("high(other)", "high(other) and low(other) < high(one)")},
        {"tests/test_spans.py": None, "tests/unit/test_spans.py": more},
        problem_statement="overlap((0, 1), (2, 3)) is true.",
        FAIL_TO_PASS=["tests/unit/test_spans.py::test_apart", "tests/unit/test_spans.py::test_same"],
        PASS_TO_PASS=[],
    )


def tally(repositories: Path) -> dict[str, Any]:
    """unittest's style; the solution adds a file and removes one."""
    counting = TALLY.replace("self.counts[name] = 1", "counted(self.counts, name)")
    step = "def counted(counts, name):\n    counts[name] = counts.get(name, 0) + 1\n"
    more = TALLY_TESTS + '\n    def test_two(self):\n        tally = Tally()\n        tally.add("a")\n'
    more += '        tally.add("a")\n        self.assertEqual(tally.counts, {"a": 2})\n'
    return record(
        repositories,
        "acme/tally",
        {"tally/__init__.py": "", "tally/tally.py": TALLY, "tally/old.py": "old = 1\n", "test/test_it.py": TALLY_TESTS},
        {
            "tally/tally.py": "from tally.step import counted\n\n\n" + counting,
            "tally/step.py": step,
            "tally/old.py": None,
        },
        {"test/test_it.py": more},
        problem_statement="Tally counts to one.",
        FAIL_TO_PASS=["test/test_it.py::TallyTest::test_two"],
        PASS_TO_PASS=["test/test_it.py::TallyTest::test_one", "test/test_it.py::TallyTest::test_none"],
        version=None,
    )


def smith(repositories: Path) -> dict[str, dict[str, Any]]:
    """One bug, as the datasets have it whose tests are in the repository: by what ``patch`` and ``base_commit`` are.
    There is a file of tests that no name tells, and no test patch."""
    clean = {"slugs.py": SLUGS, "checks.py": SLUG_TESTS, "tests/test_more.py": "from checks import *\n"}
    row = record(
        repositories,
        "acme/smith",
        clean,
        {"slugs.py": SLUGS.replace('replace(" ", "-")', "strip()")},
        {"slugs.py": SLUGS},
        problem_statement="slug() makes no dashes of spaces.",
        FAIL_TO_PASS=["checks.py::test_space", "tests/test_more.py::test_space"],
        PASS_TO_PASS=["checks.py::test_lower"],
    )
    bug, fix = row["patch"], row.pop("test_patch")
    buggy = git(repositories / "acme/smith", "rev-parse", "HEAD~1").strip()
    return {
        "a fix of the base commit": {**row, "base_commit": buggy, "patch": fix, "test_patch": None},
        "a bug in the base commit": {**row, "base_commit": buggy, "patch": bug, "test_patch": ""},
        "a bug not yet in the base commit": {**row, "patch": bug},
    }


def dataset(directory: Path) -> tuple[Path, Path, list[dict[str, Any]]]:
    """The file of all three records, the directory of their repositories, and the records."""
    repositories = directory / "repositories"
    rows = [make(repositories) for make in (slugs, spans, tally)]
    file = directory / "records.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file, repositories, rows
