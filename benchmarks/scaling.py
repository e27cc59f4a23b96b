"""``python -m benchmarks.scaling``: the scale policy under made-up loads, in simulated time.

The real Ledger and Scaler lead 1,000 containers of 10 slots; trajectories, containers and time are
simulated. Writes the plot and the table of docs/scaling.md.
"""

from __future__ import annotations

import argparse
import gc
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

from agentenv.config import PoolSettings
from benchmarks.farmsim.backend import Starts
from benchmarks.farmsim.loads import Steps, Stream, bursts, exponential, lognormal, steady, wave
from benchmarks.farmsim.simulation import Scenario, Simulation, Story
from benchmarks.measure import percentile
from benchmarks.svg import Line, Panel, page
from benchmarks.table import replace_between

MINUTE = 60.0
UNTIL_S = 48 * MINUTE
LAST_ARRIVAL_S = 32 * MINUTE
"""The end of every load shows the way down."""
FARM = PoolSettings(
    min_containers=20, max_containers=1_000, target_idle_slots=200, acquire_timeout_s=1200, scale_cooldown_s=5.0
)
POINTS = 300
"""Of each line in the plot."""


def scenarios(scale: float = 1.0) -> list[Scenario]:
    """The loads of the plot, on ``scale`` times 1,000 containers."""
    high = 10_000 * scale
    minutes = exponential(MINUTE)
    settings = farm(scale)
    quick, slow = Starts(), Starts(between_s=(30.0, 90.0), at_once=max(1, round(100 * scale)))

    def stream(rate: object, highest: float, stay: object = minutes) -> Stream:
        return Stream(rate, highest / MINUTE, stay, LAST_ARRIVAL_S)  # type: ignore[arg-type]

    swing = wave(0.1 * high, 0.85 * high, 16 * MINUTE, MINUTE)
    spikes = bursts(0.1 * high, 2.0 * high, 8 * MINUTE, 40.0, MINUTE)
    tail = lognormal(20.0, 1.3, 20 * MINUTE)
    groups = Steps(round(0.8 * high), 90.0, tail, LAST_ARRIVAL_S)
    return [
        Scenario("steady", stream(steady(0.6 * high, MINUTE), 0.6 * high), settings, quick, until_s=UNTIL_S),
        Scenario("waves", stream(swing, 0.85 * high), settings, quick, until_s=UNTIL_S),
        Scenario("bursts", stream(spikes, 2.0 * high), settings, quick, until_s=UNTIL_S),
        Scenario("training steps, long tails", groups, settings, quick, until_s=UNTIL_S),
        Scenario("slow starts (30 to 90 s)", stream(swing, 0.85 * high), settings, slow, until_s=UNTIL_S),
        Scenario(
            "a container lost every 5 s",
            stream(steady(0.6 * high, MINUTE), 0.6 * high),
            settings,
            Starts(between_s=(5.0, 15.0)),
            lost_every_s=5.0,
            until_s=UNTIL_S,
        ),
    ]


def farm(scale: float) -> PoolSettings:
    """The farm of the plot, made smaller."""
    small = {name: max(1, round(getattr(FARM, name) * scale)) for name in ("min_containers", "max_containers")}
    return FARM.model_copy(update={**small, "target_idle_slots": round(FARM.target_idle_slots * scale)})


@dataclass(frozen=True)
class Moves:
    """How the goal moved. ``turns``: changes of direction. ``flaps``: a step up within the cool-down of one
    down at a demand that was there before it."""

    up: int
    down: int
    turns: int
    flaps: int


def moves(story: Story) -> Moves:
    """Count them."""
    settings = story.scenario.settings
    goals = [(0.0, settings.min_containers, 0), *story.goals]
    up = down = turns = flaps = direction = 0
    fell_at, fell_demand = -1e9, 0
    for (_, before, _), (when, goal, demand) in pairwise(goals):
        step = 1 if goal > before else -1
        up, down, turns = up + (step > 0), down + (step < 0), turns + (step * direction < 0)
        if step > 0 and when - fell_at <= settings.scale_cooldown_s and demand <= fell_demand:
            flaps += 1
        if step < 0:
            fell_at, fell_demand = when, demand
        direction = step
    return Moves(up, down, turns, flaps)


def panel(story: Story) -> Panel:
    """Demand, slots asked for and slots that serve, over time."""
    slots, samples = story.scenario.slots, story.samples
    every = max(1, len(samples) // POINTS)
    shown = samples[::every]
    found = moves(story)
    return Panel(
        story.scenario.name,
        f"goal: {found.up} steps up, {found.down} down, {found.turns} turns; use {use(story):.0%}",
        "min",
        (
            Line("slots in demand", "#4477aa", [(s.at_s / 60, s.demand) for s in shown], filled=True),
            Line("slots serving", "#66aa55", [(s.at_s / 60, s.serving * slots) for s in shown], stepped=True),
            Line("slots asked for", "#cc5533", [(s.at_s / 60, s.goal * slots) for s in shown], stepped=True),
        ),
    )


def use(story: Story) -> float:
    """The share of serving slots that was wanted, over the whole run."""
    wanted = sum(min(s.demand, s.serving * story.scenario.slots) for s in story.samples)
    return wanted / sum(s.serving * story.scenario.slots for s in story.samples)


COLUMNS = (
    "load", "leases", "slots leased at most", "containers at most", "steps up / down", "turns", "flaps",
    "leases lost to scaling", "wait p50 / p99 (s)", "decision p50 / p99.9 / max (µs)", "slowest move p99.9 (µs)",
)  # fmt: skip


def row(story: Story) -> tuple[str, ...]:
    """What the table says of one run."""
    found = moves(story)
    decide_us = sorted(taken / 1e3 for taken in story.took_ns["decide"])
    others = {
        name: percentile(taken, 0.999) / 1e3
        for name, taken in story.took_ns.items()
        if name not in ("decide", "inventory", "lose")
    }
    worst = max(others, key=lambda name: others[name])
    return (
        story.scenario.name,
        f"{story.leases:,}",
        f"{story.most_slots_leased:,}",
        f"{story.most_containers:,}",
        f"{found.up} / {found.down}",
        str(found.turns),
        str(found.flaps),
        str(story.lost_to_scaling),
        f"{percentile(story.waits_s, 0.5):.3f} / {percentile(story.waits_s, 0.99):.2f}",
        f"{percentile(decide_us, 0.5):.0f} / {percentile(decide_us, 0.999):.0f} / {decide_us[-1]:.0f}",
        f"{others[worst]:.0f} ({worst})",
    )


def table(stories: list[Story]) -> str:
    """The figures as Markdown, dated."""
    today = datetime.now(UTC).date().isoformat()
    lines = [f"{today}, Python {sys.version.split()[0]}, `python -m benchmarks.scaling`:", ""]
    lines += [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    return "\n".join(lines + [f"| {' | '.join(row(story))} |" for story in stories])


def main() -> int:
    """Play every scenario; write plot and table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__)
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="where scaling.md and scaling.svg are")
    parser.add_argument("--scale", type=float, default=1.0, help="share of 1,000 containers (default: 1)")
    parser.add_argument("--dry-run", action="store_true", help="print the table, write nothing")
    chosen = parser.parse_args()
    # The collector would stop this process for what the simulation keeps; that is not what a decision costs.
    gc.disable()
    stories = []
    for scenario in scenarios(chosen.scale):
        stories.append(Simulation(scenario).run())
        print(" | ".join(row(stories[-1])), flush=True)
    if not chosen.dry_run:
        (chosen.docs / "scaling.svg").write_text(page([panel(story) for story in stories]))
        doc = chosen.docs / "scaling.md"
        doc.write_text(replace_between(doc.read_text(), "scaling", table(stories)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
