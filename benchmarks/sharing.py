"""``python -m benchmarks.sharing``: the fair queue under made-up runs, in simulated time.

The real FairShare divides up to 10,000 slots; runs, leases and time are simulated. Writes the plot and the tables of
docs/farm.md.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from agentenv.slots.queue_policy import Ask
from agentenv.slots.sharing import FairShare, Share
from benchmarks.farmsim.sharing import Run, Shared, SharedFarm, SharedStory
from benchmarks.measure import percentile
from benchmarks.svg import Line, Panel, page
from benchmarks.table import replace_between

MINUTE = 60.0
CROWD_SETTLED_S = 12.5 * MINUTE
"""Three mean stays of the runs whose leases last longest."""
GROUPS = (1, 8, 16, 32, 64)
GUARANTEED = 500
SPELLS = ((10 * MINUTE, 25 * MINUTE), (40 * MINUTE, 55 * MINUTE))
RECLAIM_AFTER_S = 30.0


def crowd(seed: int = 1) -> Shared:
    """50 runs of weights 1 to 4 that all want more than their share; groups of 1, 8 and 16; medians of 20 to 180 s."""
    chance = random.Random(seed)
    runs = []
    for number in range(50):
        stay_s, weight, group = (
            chance.choice([20.0, 60.0, 180.0]),
            chance.choice([1, 1, 2, 4]),
            chance.choice([1, 8, 16]),
        )
        # A group's slots come back one by one and it asks again after the last: it uses a third of what it asks for.
        runs.append(Run(f"r{number}", stay_s, Share(weight), group, wants=1_000 if group == 1 else 4_000))
    return Shared("50 runs", 10_000, tuple(runs), CROWD_SETTLED_S + 30 * MINUTE, CROWD_SETTLED_S, ("r8", "r4"))


def four(group: int = 1) -> Shared:
    """Four runs of weights 1, 1, 2 and 4 on 200 slots; ``group``: of one of weight 1."""
    made = (("a", 1.0, 30.0, 1), ("b", 1.0, MINUTE, group), ("c", 2.0, MINUTE, 1), ("d", 4.0, 30.0, 1))
    runs = tuple(Run(name, stay_s, Share(weight), size, wants=400) for name, weight, stay_s, size in made)
    name = "four runs" if group == 1 else f"four runs, one of weight 1 in groups of {group}"
    return Shared(name, 200, runs, 36 * MINUTE, 3 * runs[1].mean_stay_s, ("a", "b"))


def groups(size: int) -> Shared:
    """A run of groups and one of single slots, of equal weight, on 200 slots."""
    runs = (Run("groups", 30.0, Share(), size, wants=640), Run("singles", 30.0, Share(), wants=300))
    return Shared(f"groups of {size}", 200, runs, 60 * MINUTE, 5 * MINUTE, ("groups",))


def arrival(slots: int, group: int) -> Shared:
    """A farm that four runs have filled, and a fifth of the same kind that comes after 10 minutes."""
    here = tuple(Run(f"r{number}", MINUTE, Share(), group, wants=2 * slots) for number in range(4))
    late = Run("late", MINUTE, Share(), group, wants=2 * slots, spells=((10 * MINUTE, 60 * MINUTE),))
    return Shared(f"a run arrives, groups of {group}", slots, (*here, late), 20 * MINUTE, 10 * MINUTE, ("late",))


def guarantee(reclaim_after_s: float | None) -> Shared:
    """Long leases on 2,000 slots, and a run to which 500 are guaranteed that comes twice and leaves."""
    lent = tuple(Run(f"r{number}", 10 * MINUTE, Share(), wants=600) for number in range(8))
    owner = Run("guaranteed", MINUTE, Share(guaranteed=GUARANTEED), wants=800, spells=SPELLS)
    name = "guaranteed, never reclaimed" if reclaim_after_s is None else f"reclaimed after {reclaim_after_s:g} s"
    return Shared(name, 2_000, (*lent, owner), 70 * MINUTE, 0.0, (owner.name,), reclaim_after_s)


def off_by(story: SharedStory) -> list[float]:
    """How far each run's slot-seconds were from its fair share, up or down, as a share of it."""
    return [abs(off) for off in story.off_by.values()]


def waited_of_estimated(story: SharedStory) -> list[float]:
    """How long asks waited as a share of what was estimated."""
    return [waited_s / said_s for said_s, waited_s in story.estimates]


def stays(story: SharedStory, name: str) -> float:
    """Mean stays until the run had 90 % of its share, at its first coming."""
    run = next(run for run in story.shared.runs if run.name == name)
    return story.reached_s[name][0] / run.mean_stay_s


def costs(times: int, runs: int = 100, waiting: int = 10_000) -> dict[str, list[float]]:
    """Own CPU time (s) of each move of the line, and of a look at what comes next, with so many runs and asks."""
    chance = random.Random(0)
    line = FairShare(runs={f"r{number}": Share(chance.choice([1.0, 2.0, 4.0])) for number in range(runs)})
    for ticket in range(waiting):
        line.push(Ask(ticket, chance.choice([1, 1, 8, 16]), f"r{ticket % runs}", chance.choice(["train", "eval"])))
    took: dict[str, list[float]] = {}

    def timed(name: str, do: Callable[..., Any], *what: Any) -> Any:
        began = time.thread_time()  # our own CPU: others on the machine do not count
        result = do(*what)
        took.setdefault(name, []).append(time.thread_time() - began)
        return result

    held: list[Ask] = []
    for number in range(times):
        ask = timed("pick", line.pick, 100)
        timed("push", line.push, Ask(waiting + number, ask.slots, ask.run, ask.kind))
        held.append(ask)
        if len(held) > runs:
            old = held.pop(chance.randrange(len(held)))
            timed("gave", line.gave, old.run, old.kind, old.slots)
        if number % 100 == 0:
            timed("upcoming", line.upcoming)
    return took


# -- what is written ---------------------------------------------------------------------------


def panel(story: SharedStory, name: str, title: str, subtitle: str) -> Panel:
    """What one run held, its fair share, and what was idle while somebody waited."""
    samples = story.samples[name]
    return Panel(
        title,
        subtitle,
        "min",
        (
            Line("slots the run holds", "#4477aa", [(s.at_s / 60, s.held) for s in samples], filled=True),
            Line("its fair share", "#cc5533", [(s.at_s / 60, s.fair) for s in samples], stepped=True),
            Line("slots idle while somebody waits", "#66aa55", [(s.at_s / 60, s.idle) for s in samples]),
        ),
    )


def _markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in rows])


def shares_table(stories: Sequence[SharedStory]) -> str:
    """How near slot-seconds are to the fair shares."""
    columns = (
        "farm", "leases", "off the fair share: mean / worst", "idle while somebody waits",
        "waited, of what was estimated: p10 / p50 / p90", "pick p50 / p99 (µs)",
    )  # fmt: skip
    rows = [
        (
            f"{story.shared.name}, {story.shared.slots:,} slots",
            f"{story.leases:,}",
            f"{statistics.mean(off_by(story)):.1%} / {max(off_by(story)):.1%}",
            f"{story.idle:.2%}",
            " / ".join(f"{percentile(waited_of_estimated(story), part):.2f}" for part in (0.1, 0.5, 0.9)),
            f"{percentile(story.pick_ns, 0.5) / 1e3:.0f} / {percentile(story.pick_ns, 0.99) / 1e3:.0f}",
        )
        for story in stories
    ]
    return _markdown(columns, rows)


def groups_table(stories: Sequence[SharedStory]) -> str:
    """What groups cost on a small farm."""
    columns = ("on 200 slots", "share of the groups", "idle while somebody waits", "longest wait: groups / singles (s)")
    rows = [
        (
            story.shared.name,
            f"{story.slot_s['groups'] / story.slot_s.total():.3f}",
            f"{story.idle:.1%}",
            f"{story.longest_wait_s['groups']:.0f} / {story.longest_wait_s['singles']:.0f}",
        )
        for story in stories
    ]
    return _markdown(columns, rows)


def arrivals_table(stories: Sequence[Sequence[SharedStory]]) -> str:
    """How long a run that comes late waits for its share; one row per list of seeds."""
    rows = []
    for seeds in stories:
        found = [stays(story, "late") for story in seeds]
        shared = seeds[0].shared
        rows.append(
            (f"{shared.slots:,}", str(shared.runs[0].group), f"{statistics.median(found):.2f}", f"{max(found):.2f}")
        )
    return _markdown(("slots", "groups of", "90 % of its share after, median (mean stays)", "longest"), rows)


def guarantees_table(stories: Sequence[SharedStory]) -> str:
    """What reclaiming changes, and what it costs."""
    rows = []
    for story in stories:
        reached = " / ".join(f"{seconds:.0f}" for seconds in story.reached_s["guaranteed"])
        late = [at_s for at_s, _ in story.reclaimed if all(not 0 <= at_s - begin < 2 * MINUTE for begin, _ in SPELLS)]
        rows.append((story.shared.name, reached, f"{len(story.reclaimed):,}", f"{len(late):,}"))
    columns = (
        "",
        "90 % of the guarantee after (s), first / second time",
        "leases reclaimed",
        "more than 2 min after it came",
    )
    return _markdown(columns, rows)


def main() -> int:
    """Play every scenario; write plot and tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sharing", description=__doc__)
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="where farm.md and farm-sharing.svg are")
    parser.add_argument("--seeds", type=int, default=9, help="arrivals per farm (default: 9)")
    parser.add_argument("--dry-run", action="store_true", help="print the tables, write nothing")
    chosen = parser.parse_args()
    gc.disable()  # it would stop this process for what the simulation keeps; that is not what a pick costs
    many = SharedFarm(crowd()).run()
    sized = [SharedFarm(groups(size)).run() for size in GROUPS]
    late = [
        [SharedFarm(arrival(slots, group), seed).run() for seed in range(chosen.seeds)]
        for slots in (200, 2_000)
        for group in (1, 16)
    ]
    owned = [SharedFarm(guarantee(after_s)).run() for after_s in (None, RECLAIM_AFTER_S)]
    today = datetime.now(UTC).date().isoformat()
    text = "\n\n".join(
        [
            f"{today}, Python {sys.version.split()[0]}, `python -m benchmarks.sharing`:",
            shares_table([many, *(SharedFarm(four(group)).run() for group in (1, 8))]),
            groups_table(sized),
            arrivals_table(late),
            guarantees_table(owned),
        ]
    )
    print(text)
    if not chosen.dry_run:
        (chosen.docs / "farm-sharing.svg").write_text(page(panels(many, sized[-1], late[-1][0], owned)))
        doc = chosen.docs / "farm.md"
        doc.write_text(replace_between(doc.read_text(), "sharing", text))
    return 0


def panels(many: SharedStory, sized: SharedStory, late: SharedStory, owned: Sequence[SharedStory]) -> list[Panel]:
    """The plot."""
    first, second = many.shared.watched
    never, after = owned
    shares = {run.name: f"weight {run.share.weight:g}, groups of {run.group}" for run in many.shared.runs}
    return [
        panel(many, first, "One of 50 runs", f"{shares[first]}; slot-seconds {many.off_by[first]:+.1%}"),
        panel(many, second, "Another of 50 runs", f"{shares[second]}; slot-seconds {many.off_by[second]:+.1%}"),
        panel(late, "late", "A run arrives on a full farm", f"90 % after {stays(late, 'late'):.2f} mean stays"),
        panel(sized, "groups", f"Groups of {GROUPS[-1]} beside single slots", f"idle {sized.idle:.1%}"),
        panel(never, "guaranteed", "500 of 2,000 slots guaranteed, lent while unused", "never reclaimed"),
        panel(after, "guaranteed", "The same", f"{after.shared.name}: {len(after.reclaimed):,} leases ended for it"),
    ]


if __name__ == "__main__":
    sys.exit(main())
