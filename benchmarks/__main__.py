"""``python -m benchmarks``: measure the targets, write results.json, print the table."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import platform
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.baselines import CORES
from benchmarks.farm import BACKENDS
from benchmarks.measure import Outcome
from benchmarks.table import COLUMNS, cells
from benchmarks.targets import TARGETS
from benchmarks.targets.effort import Effort

WIDE = 150
"""Columns of a terminal in which the whole table is shown."""


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="directory of results.json")
    parser.add_argument("--only", default=",".join(TARGETS), help="comma-separated targets (default: all)")
    parser.add_argument(
        "--backend", default="local", help=f"comma-separated, measured in turn in one run: {', '.join(BACKENDS)}"
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds per figure; the median counts (default: 3)")
    parser.add_argument("--quick", action="store_true", help="one round, few calls: does it run at all?")
    chosen = parser.parse_args()
    for kind, names, known in (("target", chosen.only, TARGETS), ("backend", chosen.backend, BACKENDS)):
        if unknown := set(names.split(",")) - set(known):
            parser.error(f"unknown {kind} {min(unknown)}; there are {', '.join(known)}")
    if chosen.rounds < 1:
        parser.error("--rounds must be at least 1")
    try:
        chosen.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out: cannot make {chosen.out}: {error.strerror}")
    return chosen


def _table(entries: dict[str, dict[str, Any]], width: int) -> Table:
    wanted = [index for index, name in enumerate(COLUMNS) if name != "what" or width >= WIDE]
    table = Table()
    for index in wanted:
        table.add_column(COLUMNS[index], no_wrap=COLUMNS[index] == "target")
    for target, entry in entries.items():
        *shown, holds = cells(target, entry)
        row = [*shown, f"[green]{holds}[/]" if entry["holds"] else f"[red]{holds}[/]"]
        table.add_row(*(row[index] for index in wanted))
    return table


def told(entries: dict[str, dict[str, Any]], width: int) -> list[str]:
    """What each target is, where the table has no room for it."""
    return [] if width >= WIDE else [f"{target}: {entry['what']}" for target, entry in entries.items()]


def busy(load: float) -> str:
    """A warning if others compute here too, else nothing."""
    if load < CORES / 2:
        return ""
    return f"this machine is busy (load {load:.1f} on {CORES} cores): the figures will be worse than it can do"


def _record(outcomes: list[Outcome], backends: list[str], took_s: dict[str, float], load: float) -> dict[str, Any]:
    return {
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "cores": CORES,
            "kernel": platform.release().partition("-")[0],
            "python": platform.python_version(),
            "load_before": load,
        },
        "backends": backends,
        "took_s": took_s,
        "targets": {o.target: {k: v for k, v in dataclasses.asdict(o).items() if k != "target"} for o in outcomes},
    }


def main() -> int:
    """Returns 0 when all ran, whatever held: the figures say the rest."""
    chosen = _arguments()
    backends, names = chosen.backend.split(","), chosen.only.split(",")
    effort = Effort(rounds=1, calls=20, kills_s=45, away_s=20) if chosen.quick else Effort(rounds=chosen.rounds)
    effort = dataclasses.replace(effort, backends=tuple(backends))
    console = Console()
    load = os.getloadavg()[0]
    if warning := busy(load):
        console.print(f"[yellow]{warning}[/]", soft_wrap=True)
    outcomes: list[Outcome] = []
    took_s: dict[str, float] = {}
    path = chosen.out / "results.json"
    with Progress(console=console) as progress:
        task = progress.add_task("measuring", total=len(names))
        for name in names:
            progress.update(task, description=f"measuring {name}")
            began = time.monotonic()
            outcomes += asyncio.run(TARGETS[name](effort))
            took_s[name] = round(time.monotonic() - began, 1)
            record = _record(outcomes, backends, took_s, load)
            path.write_text(json.dumps(record, indent=1) + "\n")  # each time: a run that is cut short has its figures
            progress.advance(task)
    console.print(_table(record["targets"], console.width))
    for line in told(record["targets"], console.width):
        console.print(line, highlight=False)
    console.print(f"written to {path}; docs/performance.md has the method")
    return 0


if __name__ == "__main__":
    sys.exit(main())
