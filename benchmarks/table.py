"""``python -m benchmarks.table``: put the figures of results.json into docs/performance.md."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

COLUMNS = ("target", "what", "value", "goal", "ours", "bare bash", "bwrap per call", "holds")


def cells(target: str, entry: Mapping[str, Any]) -> tuple[str, ...]:
    """One entry of results.json as a row of the table."""
    beside = entry["beside"] or {}

    def figure(name: str) -> str:
        value = beside.get(name)
        return "" if value is None else f"{_short(value)} {beside['unit']}"

    goal = entry["goal"].replace(">=", "≥").replace("<=", "≤")
    value = f"{entry['value']:g} {entry['unit']}"
    holds = "yes" if entry["holds"] else "no"
    return (target, entry["what"], value, goal, figure("ours"), figure("bare"), figure("bwrap_per_call"), holds)


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def markdown(record: Mapping[str, Any]) -> str:
    """The whole of results.json, dated, as Markdown."""
    machine = record["machine"]
    where = f"{machine['cores']} cores, kernel {machine['kernel']}, Python {machine['python']}"
    lines = [f"{record['measured_at'][:10]}, {where}, in one run:", ""]
    lines += [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    for target, entry in record["targets"].items():
        *shown, holds = cells(target, entry)
        lines.append(f"| {' | '.join([*shown, holds if entry['holds'] else f'**{holds}**'])} |")
    return "\n".join(lines)


def replace_between(text: str, name: str, new: str) -> str:
    """``text`` with what stands between the markers of ``name`` replaced. Raises ValueError without markers."""
    pattern = re.compile(f"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"no <!-- {name} --> … <!-- /{name} --> to put the figures between")
    return pattern.sub(lambda match: f"{match[1]}\n{new}\n\n{match[2]}", text)


def main() -> int:
    """Write the table into the page, or print it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.table", description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("out/bench/results.json"))
    parser.add_argument("--page", type=Path, default=Path("docs/performance.md"))
    parser.add_argument("--name", default="results", help="of the markers in the page (default: results)")
    parser.add_argument("--print", action="store_true", help="print the table, change nothing")
    chosen = parser.parse_args()
    table = markdown(json.loads(chosen.results.read_text()))
    if chosen.print:
        print(table)
    else:
        chosen.page.write_text(replace_between(chosen.page.read_text(), chosen.name, table))
    return 0


if __name__ == "__main__":
    sys.exit(main())
