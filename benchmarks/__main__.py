"""``python -m benchmarks``: measure the targets, write results.json, print the table."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import platform
import sys
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.measure import Outcome
from benchmarks.targets import CORES, TARGETS, Effort


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="directory of results.json")
    parser.add_argument("--only", default=",".join(TARGETS), help="comma-separated targets (default: all)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds per figure; the median counts (default: 3)")
    parser.add_argument("--quick", action="store_true", help="one round, few calls: does it run at all?")
    chosen = parser.parse_args()
    unknown = set(chosen.only.split(",")) - set(TARGETS)
    if unknown or chosen.rounds < 1:
        parser.error(f"unknown target {min(unknown)}; there are {', '.join(TARGETS)}" if unknown else "--rounds >= 1")
    return chosen


def _table(outcomes: list[Outcome]) -> Table:
    table = Table("target", "what", "value", "goal", "holds")
    for outcome in outcomes:
        holds = "[green]yes[/]" if outcome.holds else "[red]no[/]"
        table.add_row(outcome.target, outcome.what, f"{outcome.value:g} {outcome.unit}", outcome.goal, holds)
    return table


def _write(outcomes: list[Outcome], directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    record = {
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"cores": CORES, "kernel": platform.release(), "python": platform.python_version()},
        "targets": {o.target: {k: v for k, v in dataclasses.asdict(o).items() if k != "target"} for o in outcomes},
    }
    path = directory / "results.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path


def main() -> int:
    """Returns 0 when all ran, whatever held: the figures say the rest."""
    chosen = _arguments()
    effort = Effort(rounds=1, calls=20) if chosen.quick else Effort(rounds=chosen.rounds)
    console = Console()
    outcomes: list[Outcome] = []
    with Progress(console=console) as progress:
        task = progress.add_task("measuring", total=len(chosen.only.split(",")))
        for name in chosen.only.split(","):
            progress.update(task, description=f"measuring {name}")
            outcomes += asyncio.run(TARGETS[name](effort))
            progress.advance(task)
    path = _write(outcomes, chosen.out)
    console.print(_table(outcomes))
    console.print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
