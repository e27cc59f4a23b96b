"""What of a policy's changes counts, how a verdict becomes a score, and what the scanner finds."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from agentenv.tasks.judging import Verdict
from agentenv.tasks.swe.records import SweRecord, read_record
from agentenv.tasks.swe.repositories import Checkout
from agentenv.tasks.swe.scan import MAX_CHANGED, differences, digest
from agentenv.tasks.swe.scoring import Changes, is_protected, judged, resolved, share
from tests.unit.tasks.test_swe_records import row

FAILING, OTHER, KEPT = "tests/test_a.py::test_b", "tests/test_a.py::test_d", "tests/test_a.py::test_a"


def checkout(**changed: Any) -> Checkout:
    fields: dict[str, Any] = {
        "tree": Path("tree"),
        "workspace": Path("workspace"),
        "known": {},
        "executable": frozenset(),
        "tests": {"tests/test_a.py": b"the tests", "tests/old.py": None},
        "gold": frozenset({"a.py", "tests/factory.py", "setup.cfg"}),
    }
    return Checkout(**{**fields, **changed})


def record() -> SweRecord:
    return read_record(row(FAIL_TO_PASS=[FAILING, OTHER], PASS_TO_PASS=[KEPT]))


@pytest.mark.parametrize(
    ("path", "protected"),
    [
        ("a.py", False),
        ("src/testing/a.py", False),
        ("contest.py", False),
        ("setup.cfg", False),
        ("pyproject.toml", False),
        ("tests/test_a.py", True),
        ("tests/old.py", True),
        ("tests/data/x.json", True),
        ("a/test/helper.py", True),
        ("a/test_b.py", True),
        ("a/b_test.py", True),
        ("conftest.py", True),
        ("src/conftest.py", True),
        ("pytest.ini", True),
        ("tox.ini", True),
        ("sitecustomize.py", True),
        ("x.pth", True),
        ("tests/factory.py", False),
    ],
)
def test_tests_and_what_steers_them_are_protected(path: str, protected: bool) -> None:
    assert is_protected(path, checkout()) is protected


def test_the_test_patch_wins_over_the_gold_patch() -> None:
    assert is_protected("a.py", checkout(tests={"a.py": b""}))


def test_only_what_is_not_protected_is_laid_over_the_repository() -> None:
    changes = Changes(
        {"a.py": b"mended", "new.py": b"new", "tests/test_a.py": b"pass", "conftest.py": b"forged"},
        ["gone.py", "tests/more.py", "tests/old.py"],
        ["link"],
    )
    found = judged(record(), checkout(), changes)
    assert found.files == {"a.py": b"mended", "new.py": b"new", "tests/test_a.py": b"the tests"}
    assert found.removed == ("gone.py", "tests/old.py")
    assert found.put_back == ("conftest.py", "tests/more.py", "tests/old.py", "tests/test_a.py")


def test_the_files_of_named_tests_are_put_back_whatever_they_are_called() -> None:
    named = read_record(row(FAIL_TO_PASS=["checks.py::test_b"], PASS_TO_PASS=[]))
    found = judged(named, checkout(tests={}), Changes({"checks.py": b"pass"}))
    assert (found.files, found.put_back) == ({}, ("checks.py",))


@pytest.mark.parametrize(
    ("outcomes", "part", "whole"),
    [
        ({FAILING: "passed", OTHER: "passed", KEPT: "passed"}, 1.0, 1.0),
        ({FAILING: "passed", OTHER: "failed", KEPT: "passed"}, 0.5, 0.0),
        ({FAILING: "passed", OTHER: "passed", KEPT: "failed"}, 0.0, 0.0),
        ({FAILING: "passed", OTHER: "passed", KEPT: "skipped"}, 0.0, 0.0),
        ({FAILING: "passed", OTHER: "passed", KEPT: "xfailed"}, 1.0, 1.0),
        ({FAILING: "passed", OTHER: "passed"}, 0.0, 0.0),
        ({KEPT: "passed"}, 0.0, 0.0),
        (None, 0.0, 0.0),
    ],
)
def test_scores(outcomes: dict[str, str] | None, part: float, whole: float) -> None:
    verdict = None if outcomes is None else Verdict(outcomes, 1.0)
    assert (share(record(), verdict), resolved(record(), verdict)) == (part, whole)


def known(root: Path) -> dict[str, str]:
    paths = (path for path in root.rglob("*") if path.is_symlink() or path.is_file())
    return {str(path.relative_to(root)): digest(str(path)) or "" for path in paths}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    (root / "pkg").mkdir(parents=True)
    (root / "pkg/venv/deep").mkdir(parents=True)
    (root / "a.py").write_text("a")
    (root / "pkg/b.py").write_text("b")
    (root / "pkg/venv/deep/c.py").write_text("c")
    (root / "link").symlink_to("a.py")
    (root / "odd\nname").write_text("x")
    return root


def test_an_untouched_tree_has_no_differences(tree: Path) -> None:
    assert differences(str(tree), known(tree), "") == {"changed": [], "removed": [], "odd": [], "more": False}


def test_changes_additions_and_removals_are_found(tree: Path) -> None:
    before = known(tree)
    (tree / "a.py").write_text("mended")
    (tree / "pkg/b.py").unlink()
    (tree / "pkg/new").mkdir()
    (tree / "pkg/new/é.py").write_text("new")
    (tree / "pkg/venv/deep/c.py").write_text("changed")
    for place in (".git", "pkg/__pycache__", ".venv/lib", "scan-1"):
        (tree / place).mkdir(parents=True)
        (tree / place / "file.py").write_text("not taken")
    (tree / "pkg/x.pyc").write_bytes(b"")
    found = differences(str(tree), before, "scan-1")
    assert found == {
        "changed": ["a.py", "pkg/new/é.py", "pkg/venv/deep/c.py"],
        "removed": ["pkg/b.py"],
        "odd": [],
        "more": False,
    }


def test_links_and_pipes_are_odd_and_nothing_below_a_link_is_seen(tree: Path) -> None:
    before = known(tree)
    (tree / "a.py").unlink()
    (tree / "a.py").symlink_to("/etc/passwd")
    (tree / "away").symlink_to("/etc")
    os.mkfifo(tree / "pipe")
    (tree / "link").unlink()
    (tree / "link").write_text("now a file")
    found = differences(str(tree), before, "")
    assert (found["odd"], found["changed"], found["removed"]) == (["a.py", "away", "pipe"], ["link"], [])


def test_too_many_differences_are_not_listed(tree: Path) -> None:
    for number in range(MAX_CHANGED + 1):
        (tree / f"{number}.py").touch()
    assert differences(str(tree), {}, "")["more"] is True
