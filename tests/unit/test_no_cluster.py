"""Where Nomad cannot be had, the tests that need it fail, and no others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
RUN = """
import sys
import pytest
from agentenv.dev import program

def unavailable(*_):
    raise RuntimeError("no Nomad to be had")

program.nomad_program = unavailable
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "tests/contract/test_backend_fence.py", "-k", "fake or nomad"]))
"""


def test_only_the_tests_of_the_cluster_fail_without_one() -> None:
    done = subprocess.run(
        [sys.executable, "-c", RUN], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    ended = done.stdout.splitlines()
    failed = [line for line in ended if line.startswith(("ERROR ", "FAILED "))]
    assert failed
    assert all("[nomad" in line for line in failed), failed
    assert "no Nomad to be had" in done.stdout
    assert " passed" in ended[-1]
    assert done.returncode == 1
