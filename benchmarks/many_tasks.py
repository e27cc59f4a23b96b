"""``agentenv tasks check`` of a thousand task directories: the corpus of the tests again and again, each copy with an
image and a solution of its own. Prints tasks per minute, where the time went, memory, disk, and what was left over.
Root's.

    python -m benchmarks.many_tasks --tasks 1000 [--directory DIR] [-- --jobs 1]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path
from typing import Any, Final

from agentenv.sdk.roots import store_directory
from agentenv.store import Store
from agentenv.tasks.base_image import make_base
from tests.integration.task_corpus import CASES, Case

ONLY_ONCE: Final = frozenset({"a-large-solution"})
"""Twelve megabytes each."""
WITHIN: Final = ("--image-from=dockerfile", "--storage=memory", "--max-cpus=1", "--max-memory-mib=1024")
"""So that every task of the corpus fits any machine."""
SAMPLE_S: Final = 10.0


def numbered(case: Case, number: int) -> Case:
    """The same task, of which no file of an image and no solution is that of another number. Pure."""
    files = {}
    for name, text in {**case.of, **case.files}.items():
        if name.endswith("Dockerfile") and text:
            text += f"RUN echo {number} > /var/tmp/number\n"
        elif name.endswith(("solve.sh", "solution.sh")) and text:
            text += f"# {number}\n"
        files[name] = text
    return replace(case, files=files)


def write_tasks(directory: Path, tasks: int) -> None:
    """Make that many task directories that are played."""
    played = {name: case for name, case in CASES.items() if not case.refused}
    rest = [(name, case) for name, case in played.items() if name not in ONLY_ONCE]
    every = ((f"{name}-{number}", numbered(case, number)) for number in count() for name, case in rest)
    for name, case in islice(every, tasks):
        case.write(directory / name)


@dataclass
class Peaks:
    """What the check and all that it started had at most."""

    first_mib: float = 0.0
    """Of the check's own process, at the first sample."""
    own_mib: float = 0.0
    all_mib: float = 0.0
    processes: int = 0

    def sample(self, check: int) -> None:
        """Look at the process and its descendants: containers and slots have sessions of their own."""
        found = subprocess.run(["ps", "-eo", "pid=,ppid=,rss="], capture_output=True, text=True, check=True).stdout
        rows = [tuple(map(int, line.split())) for line in found.splitlines()]
        children: dict[int, list[int]] = {}
        for pid, parent, _ in rows:
            children.setdefault(parent, []).append(pid)
        below, waiting = {check}, [check]
        while waiting:
            new = children.get(waiting.pop(), [])
            below.update(new)
            waiting += new
        sizes = {pid: kib / 1024 for pid, _, kib in rows if pid in below}
        own_mib = sizes.get(check, 0.0)
        self.first_mib = self.first_mib or own_mib
        self.own_mib = max(self.own_mib, own_mib)
        self.all_mib = max(self.all_mib, sum(sizes.values()))
        self.processes = max(self.processes, len(sizes))


def used_mib(directory: Path) -> float:
    """Of its file system, by its files."""
    found = subprocess.run(["du", "-sxk", str(directory)], capture_output=True, text=True, check=False).stdout
    return int(found.split()[0]) / 1024 if found else 0.0


def left_over(state: Path) -> dict[str, list[str]]:
    """What should not be there any more."""
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    commands = subprocess.run(["ps", "-eo", "pid=,args="], capture_output=True, text=True, check=True).stdout
    return {
        "mounts": [mount for mount in mounts if mount.startswith(str(state))],
        "processes": [line for line in commands.splitlines() if str(state) in line],
        "state": sorted(path.name for path in state.iterdir()),
    }


def run(directory: Path, more: list[str], out: Path, limit_s: float) -> dict[str, Any]:
    """Check the tasks, by a process of its own, which gets SIGINT after that long."""
    state = Path(os.environ["AGENTENV_STATE_DIR"])
    peaks, before_mib, began_s = Peaks(), used_mib(store_directory()), time.monotonic()
    command = [sys.executable, "-c", "from agentenv.cli import main; main()", "tasks", "check", str(directory), *WITHIN]
    command += ["--host-env=A_KEY", "--times", *more]
    with out.open("w") as rows:
        env = {**os.environ, "A_KEY": "secret"}
        check = subprocess.Popen(command, stdout=rows, start_new_session=True, env=env)
        interrupted = False
        while check.poll() is None:
            peaks.sample(check.pid)
            if not interrupted and 0 < limit_s < time.monotonic() - began_s:
                check.send_signal(signal.SIGINT)  # once: a second one ends it before it has cleared up
                interrupted = True
            time.sleep(SAMPLE_S)
    elapsed_s = time.monotonic() - began_s
    lines = out.read_text().splitlines()
    good, bad = (sum(line.startswith(mark) for line in lines) for mark in ("ok ", "BAD"))
    return {
        "code": check.returncode,
        "ok": good,
        "bad": bad,
        "tasks_per_minute": round(60 * (good + bad) / elapsed_s, 1),
        "elapsed_s": round(elapsed_s),
        "check_mib": [round(peaks.first_mib), round(peaks.own_mib)],
        "all_processes_mib": round(peaks.all_mib),
        "processes": peaks.processes,
        "store_mib": [round(before_mib), round(used_mib(store_directory()))],
        "left_over": left_over(state),
        "end": lines[-2:],
    }


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.many_tasks", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--tasks", type=int, default=1000)
    parser.add_argument("--directory", type=Path, help="keep the tasks, the store and the rows here")
    parser.add_argument("--limit-s", type=float, default=0.0, help="interrupt the check after that long")
    parser.add_argument("more", nargs="*", help="further options of the check")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        place: Path = given.directory or Path(made)
        for name in ("state", "cache"):
            (place / name).mkdir(parents=True, exist_ok=True)
            os.environ[f"AGENTENV_{name.upper()}_DIR"] = str(place / name)
        make_base(Store.open(store_directory()))
        write_tasks(place / "tasks", given.tasks)
        found = run(place / "tasks", given.more, place / "rows.txt", given.limit_s)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
