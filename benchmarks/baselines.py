"""The first thing the targets are compared with, measured in the same run: bare bash, no farm at all."""

from __future__ import annotations

import atexit
import contextlib
import os
import resource
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from benchmarks.measure import MIB, Latencies

CORES = os.cpu_count() or 1
NEIGHBOUR_UID = 29_999
"""The bad neighbour of the bare baseline: its limits are counted apart from everybody else's."""
LIMITS = {"NPROC": 400, "DATA": 2048 * MIB, "FSIZE": 1024 * MIB, "CORE": 0}
"""A slot's limits as far as rlimits go: without any, a bad neighbour would end the benchmark, not slow it down."""


@cache
def scratch() -> Path:
    """A directory in memory for this run."""
    shm = Path("/dev/shm")
    path = Path(mkdtemp(prefix="agentenv-bench-", dir=shm if shm.is_dir() else None))
    path.chmod(0o711)
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


@cache
def _spawner() -> Path:
    """The compiled baseline program (spawn.c), built once per run."""
    program = scratch() / "spawn"
    source = Path(__file__).with_name("spawn.c")
    subprocess.run(["cc", "-O2", "-Wall", "-o", str(program), str(source)], check=True)
    return program


def bare_bash(
    calls: int,
    workers: int = CORES,
    *,
    command: str = "true",
    think_s: float = 0.0,
    slow: int = 0,
    seed: int = 0,
    read_bytes: int = 0,
) -> Latencies:
    """``bash -c command`` by vfork+exec from C, ``workers`` at a time, ``calls`` in all, a pause before each.

    ``slow`` of each worker's calls are ``sleep 5`` and not timed; ``read_bytes`` of output are read through a pipe.
    """
    numbers = (workers, max(1, calls // workers), round(think_s * 1e6), slow, seed, read_bytes)
    argv = [str(_spawner()), *(str(number) for number in numbers), "/usr/bin/bash", "-c", command]
    *lines, last = subprocess.run(argv, check=True, capture_output=True, text=True).stdout.splitlines()
    return Latencies([float(line) / 1e6 for line in lines], float(last.split()[1]))


def output_file(size_bytes: int) -> Path:
    """A file of so many bytes, in memory."""
    path = scratch() / f"output-{size_bytes}"
    if not path.exists():
        path.write_bytes(b"x" * size_bytes)
    return path


@contextlib.contextmanager
def bare_neighbour(command: str) -> Iterator[None]:
    """``command`` beside everything else, in no slot: rlimits under a uid of its own (root only), and a pid namespace
    so that all of it ends with this."""
    home = scratch() / "neighbour"
    home.mkdir(exist_ok=True)
    os.chown(home, NEIGHBOUR_UID, NEIGHBOUR_UID)
    limited = ["prlimit", *(f"--{name.lower()}={most}" for name, most in LIMITS.items())]
    bwrap = shlex.split("bwrap --unshare-user --unshare-pid --die-with-parent --new-session --dev-bind / / --chdir")
    process = subprocess.Popen(
        [*limited, *bwrap, str(home), "/usr/bin/bash", "-c", f"({command}) | cat > /dev/null"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        user=NEIGHBOUR_UID,
        group=NEIGHBOUR_UID,
        extra_groups=[],
    )
    try:
        time.sleep(1)
        if process.poll() is not None:
            raise RuntimeError(f"the bare neighbour ended at once, with {process.returncode}")
        yield
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(home, ignore_errors=True)


def limit_this_process() -> None:
    """LIMITS for this process and its children."""
    for name, most in LIMITS.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))
