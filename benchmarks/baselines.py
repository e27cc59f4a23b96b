"""What the targets are compared with, measured in the same run."""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from benchmarks.measure import Latencies

CORES = os.cpu_count() or 1


@cache
def _spawner() -> Path:
    """The compiled baseline program (spawn.c), built once per run."""
    program = Path(mkdtemp(prefix="agentenv-bench-")) / "spawn"
    atexit.register(shutil.rmtree, program.parent, ignore_errors=True)
    source = Path(__file__).with_name("spawn.c")
    subprocess.run(["cc", "-O2", "-o", str(program), str(source)], check=True)
    return program


def bare_bash(calls: int, workers: int = CORES, *, think_s: float = 0.0) -> Latencies:
    """``bash -c true`` by vfork+exec from C, ``workers`` at a time, ``calls`` in all, a pause before each."""
    argv = [
        str(_spawner()),
        str(workers),
        str(calls // workers),
        str(round(think_s * 1e6)),
        "/usr/bin/bash",
        "-c",
        "true",
    ]
    *lines, last = subprocess.run(argv, check=True, capture_output=True, text=True).stdout.splitlines()
    return Latencies([float(line) / 1e6 for line in lines], float(last.split()[1]))
