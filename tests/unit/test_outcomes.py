"""The suite itself: whatever a test does, the run goes on, and it does not matter how the run was started."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

CONFTEST = """
import time
import pytest

@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    if call.when == "call" and item.name == "test_whose_report_takes_long":
        time.sleep(600)
    if call.when == "call" and item.name == "test_whose_traceback_cannot_be_read":
        raise SystemError("AST constructor recursion depth mismatch")
    return (yield)
"""

FIRST = r"""
import os, signal, time
import pytest

@pytest.fixture
def hangs_too():
    yield
    time.sleep(600)

@pytest.mark.timeout(15)
def test_whose_report_takes_long(): assert False
def test_whose_traceback_cannot_be_read(): assert False
def test_whose_message_is_no_text(): assert False, "\udc80"
def test_that_interrupts_its_process(): os.kill(os.getpid(), signal.SIGINT); time.sleep(600)
@pytest.mark.timeout(15)
def test_that_hangs(hangs_too): time.sleep(600)
def test_that_exits(): raise SystemExit(3)
def test_after_them(): pass
"""
SECOND = """
import os

def test_with_a_property_that_cannot_be_sent(record_property): record_property("a", object())
def test_that_ends_its_process(): os._exit(3)
def test_after_them(): pass
"""
CHILDREN = """
import signal, subprocess
import pytest

@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGQUIT, signal.SIGHUP])
def test_a_child_takes_the_signal(number):
    with subprocess.Popen(["sleep", "600"]) as child:
        child.send_signal(number)
        assert child.wait(30) == -number
"""


def suite_run(directory: Path, *before: str) -> subprocess.CompletedProcess[str]:
    """A run of the tests there as `make test` runs its own."""
    suite = ["-p", "tests.conftest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(directory), str(directory)]
    options = ["-p", "no:cacheprovider", "-n", "2", "--no-loadscope-reorder", "--color=no"]
    argv = [*before, sys.executable, "-m", "pytest", *suite, *options]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)


def test_no_failing_test_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_first.py").write_text(FIRST)
    (tmp_path / "test_second.py").write_text(SECOND)
    ran = suite_run(tmp_path)
    outcomes = set(re.findall(r"^(FAILED|ERROR) \S*::(\w+)", ran.stdout, re.MULTILINE))
    assert outcomes == {
        ("FAILED", "test_whose_report_takes_long"),
        ("FAILED", "test_whose_traceback_cannot_be_read"),
        ("FAILED", "test_whose_message_is_no_text"),
        ("FAILED", "test_that_interrupts_its_process"),
        ("FAILED", "test_that_hangs"),
        ("ERROR", "test_that_hangs"),  # its fixture's end does, too
        ("FAILED", "test_that_exits"),
        ("FAILED", "test_with_a_property_that_cannot_be_sent"),
        ("ERROR", "test_with_a_property_that_cannot_be_sent"),  # each of its reports
        ("FAILED", "test_that_ends_its_process"),
    }
    assert "8 failed, 2 passed, 2 errors in " in ran.stdout, ran.stdout[-2000:]


def test_a_run_that_began_with_signals_ignored(tmp_path: Path) -> None:
    """A script's background job ignores SIGINT and SIGQUIT, what nohup starts SIGHUP; tests' children would inherit
    that."""
    (tmp_path / "test_children.py").write_text(CHILDREN)
    ran = suite_run(tmp_path, "sh", "-c", "trap '' INT QUIT HUP; exec \"$@\"", "sh")
    assert "3 passed in " in ran.stdout, ran.stdout[-2000:]
